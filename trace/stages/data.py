"""Stage `data`: write the problems of every split as JSON lines, with a manifest.

`<out_dir>/{sft,rl}.jsonl` and one file per evaluation task: `mini_math`, `mini_math_long`, `mini_code` (and
`validation`) of source generated, `humaneval` and `gsm8k_subset` of source packaged. lm-eval reads the evaluation
files, RL reads `rl.jsonl`. The rows depend on the data section alone (packaged: and on the packages' versions), so the
cold start, which generates its training rows itself, sees exactly these splits. Nothing here imports PyTorch, so an
edit of the model code rewrites no data.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from trace_rl.config.experiment import DataConfig
from trace_rl.tasks.dataset import build_splits
from trace_rl.tasks.packaged import build_packaged_splits, package_versions
from trace_rl.tasks.problem import Problem, write_jsonl

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
    out_dir = Path(out_dir)
    rows = rows_of(config)
    temporary = out_dir.with_name(f".{out_dir.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    files = {}
    for stem, problems in rows.items():
        path = temporary / f"{stem}.jsonl"
        write_jsonl(path, problems=problems)
        files[path.name] = {
            "rows": len(problems),
            "kinds": sorted({problem.kind for problem in problems}),
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
    manifest: dict[str, Any] = {"digest": config.digest(), "files": files}
    if config.source == "packaged":
        manifest["packages"] = package_versions()
    (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    shutil.rmtree(out_dir, ignore_errors=True)
    temporary.replace(out_dir)
    return manifest


def rows_of(config: DataConfig) -> dict[str, list[Problem]]:
    """Problems by file stem."""
    settings = config.model_dump(exclude={"source"})
    if config.source == "packaged":
        # The others belong to the generated families; DataConfig refuses them here.
        names = ("seed", "train_problems", "rl_problems", "eval_problems", "operands", "max_operand")
        return build_packaged_splits(**{name: settings[name] for name in names})
    splits = build_splits(**settings)
    return {stem: splits[split] for split, stem in FILE_OF_SPLIT.items()}
