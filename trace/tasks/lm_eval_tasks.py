"""The package's lm-eval tasks: the YAML files beside this module, judged by the verifiers that give RL its reward.

A task is a YAML file here plus, at most, one function below. Rows come from the run's data (`<task>.jsonl`, written by
the data stage): `bind_tasks` points each task at its file.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from trace_rl.errors import UserError
from trace_rl.tasks.dataset import score
from trace_rl.tasks.problem import Problem

FOLDER = Path(__file__).parent


def local_tasks() -> dict[str, Path]:
    """Task name -> YAML file."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def bind_tasks(names: Sequence[str], *, data: Path, folder: Path) -> None:
    """For each task of ours write a task file into `folder` that includes it and reads its rows in `data`.

    lm-eval's TaskManager takes the folder as its include path. Arrow files go there, too, not to the user's cache.
    """
    for name in sorted(set(names) & set(local_tasks())):
        rows = data / f"{name}.jsonl"
        if not rows.is_file():
            raise UserError(f"task {name} needs {rows}; run the data stage, or drop the task from evaluate.tasks")
        bound = {
            "include": str(local_tasks()[name]),
            "task": name,
            "dataset_kwargs": {"data_files": {"test": str(rows.resolve())}, "cache_dir": str(folder / "arrow")},
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(bound), encoding="utf-8")


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """1.0 for a right answer, else 0.0; never partial credit."""
    problem = Problem(kind=doc["kind"], prompt=doc["prompt"], answer=doc["answer"], payload=doc["payload"])
    return {"acc": score(problem, results[0])}
