"""Stage `data`: write the problems of every split as JSON lines, with a manifest.

`<out_dir>/{sft,validation,rl,mini_math,mini_math_long,mini_code}.jsonl`; lm-eval reads the evaluation files,
RL reads `rl.jsonl`. The rows depend on the data section alone, so the cold start, which generates its training rows
itself, sees exactly these splits. Nothing here imports PyTorch, so an edit of the model code rewrites no data.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from trace_rl.config.experiment import DataConfig
from trace_rl.errors import UserError
from trace_rl.tasks.dataset import build_splits
from trace_rl.tasks.problem import write_jsonl

FILE_OF_SPLIT = {
    "train": "sft",
    "validation": "validation",
    "rl": "rl",
    "eval_math": "mini_math",
    "eval_math_long": "mini_math_long",
    "eval_code": "mini_code",
}


def run(config: DataConfig, out_dir: Path) -> dict[str, Any]:
    """Generate every split and write the directory `out_dir` complete or not at all; returns the manifest."""
    if config.source != "generated":
        raise UserError(f"data.source is {config.source!r}; this stage writes source generated")
    out_dir = Path(out_dir)
    splits = build_splits(**config.model_dump(exclude={"source"}))
    temporary = out_dir.with_name(f".{out_dir.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    files = {}
    for split, stem in FILE_OF_SPLIT.items():
        path = temporary / f"{stem}.jsonl"
        write_jsonl(path, problems=splits[split])
        files[path.name] = {
            "rows": len(splits[split]),
            "kinds": sorted({problem.kind for problem in splits[split]}),
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
    manifest = {"digest": config.digest(), "files": files}
    (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    shutil.rmtree(out_dir, ignore_errors=True)
    temporary.replace(out_dir)
    return manifest
