"""What runs again after what: dry runs on a copy of the tree whose artifacts exist and are recorded as up to date."""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
METHODS = ("bf16", "fp4_naive", "qat", "trace", "trace_full", "ptq_nvfp4")
DOWNSTREAM = {"summary": 1, "report": 1}


class Tree:
    """A copy of package, workflow and configuration in which files may be edited."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("trace", "workflow", "config"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "Snakefile", folder)
        (folder / "import").mkdir()
        (folder / "import" / "trace_rl").symlink_to(Path("..") / "trace")

    def snakemake(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(self.folder / "import"), "PATH": f"{BIN}:{os.environ['PATH']}"}
        command = [sys.executable, "-P", "-m", "snakemake", *arguments]
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=300)

    def jobs(self, *arguments: str) -> dict[str, int]:
        """Jobs that would run: rule -> how many."""
        done = self.snakemake("-n", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        rules = re.findall(r"^(?:local)?rule (\w+):", done.stdout + done.stderr, re.MULTILINE)
        return {rule: count for rule, count in Counter(rules).items() if rule not in ("all", "default")}

    def edit(self, file: str, old: str, new: str) -> None:
        text = (self.folder / file).read_text()
        assert old in text
        (self.folder / file).write_text(text.replace(old, new, 1))

    def finish(self) -> None:
        """Make every declared output and let Snakemake record it as made by the present settings, methods and code."""
        plan = self.snakemake("-n")
        for line in re.findall(r"^    output: (.*)$", plan.stdout + plan.stderr, re.MULTILINE):
            for name in line.split(", "):
                path = self.folder / name
                if path.suffix:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text("{}")
                else:
                    path.mkdir(parents=True, exist_ok=True)
        done = self.snakemake("--touch", "--forceall", "--cores", "1", "--quiet")
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    tree = Tree(tmp_path_factory.mktemp("finished"))
    tree.finish()
    return tree


@pytest.fixture
def tree(finished: Tree, tmp_path: Path) -> Tree:
    """A copy of the finished tree, for one edit."""
    copy = Tree.__new__(Tree)
    copy.folder = tmp_path / "tree"
    shutil.copytree(finished.folder, copy.folder, symlinks=True)
    return copy


def test_a_fresh_tree_runs_every_stage_of_the_core_suite(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    assert tree.jobs() == {
        "data": 1,
        "checkpoint": 1,
        "calibrate": 1,
        "audit": 1,
        "parity": 1,
        "train": 5,
        "quantize": 1,
        "evaluate_start": 1,
        "evaluate": 6,
        "bench_rollout": 1,
        "summary": 1,
        "report": 1,
    }


def test_a_finished_tree_has_nothing_to_do_and_comments_change_nothing(tree: Tree) -> None:
    assert tree.jobs() == {}
    for file in tree.folder.glob("trace/**/*.py"):
        file.write_text(file.read_text() + "\n# a remark\n")
    tree.edit("config/methods/trace.yaml", "description: ", "description: Reworded, ")
    assert set(tree.jobs()) <= set(DOWNSTREAM)


def test_editing_a_plot_makes_only_the_report_again(tree: Tree) -> None:
    with (tree.folder / "trace/report/figures.py").open("a") as file:
        file.write("\nEDITED = 1\n")
    assert tree.jobs() == {"report": 1}


def test_editing_the_loss_trains_again_and_keeps_the_cold_start(tree: Tree) -> None:
    with (tree.folder / "trace/rl/losses/grpo.py").open("a") as file:
        file.write("\nEDITED = 1\n")
    jobs = tree.jobs()
    assert jobs["train"] == 5
    assert not {"data", "checkpoint", "calibrate", "evaluate_start", "bench_rollout"} & set(jobs)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ('evaluate={"limit":7}', {"evaluate_start": 1, "evaluate": 6, **DOWNSTREAM}),
        ('tracking={"experiment":"another"}', {}),
        ('suite={"seeds":[0,1]}', {"train": 5, "quantize": 1, "evaluate": 6, **DOWNSTREAM}),
        ('bench={"repeats":2}', {"bench_rollout": 1, "report": 1}),
        ('training={"steps":99}', {"train": 5, "quantize": 1, "evaluate": 6, **DOWNSTREAM}),
    ],
)
def test_a_setting_reruns_the_stages_that_read_it(finished: Tree, override: str, expected: dict[str, int]) -> None:
    assert finished.jobs("--config", override) == expected


def test_editing_a_method_trains_that_method_only(tree: Tree) -> None:
    tree.edit("config/methods/trace.yaml", "bits: 1", "bits: 2")
    assert tree.jobs() == {"train": 1, "evaluate": 1, **DOWNSTREAM}


def test_adding_a_method_runs_only_that_method(tree: Tree) -> None:
    method = (tree.folder / "config/methods/trace.yaml").read_text()
    (tree.folder / "config/methods/trace_again.yaml").write_text(method.replace("name: trace", "name: trace_again"))
    tree.edit("config/config.yaml", "trace_full,", "trace_full, trace_again,")
    assert tree.jobs() == {"train": 1, "evaluate": 1, **DOWNSTREAM}


def test_a_suite_of_some_methods_needs_only_their_jobs(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    jobs = tree.jobs("--config", 'suite={"methods":["bf16","trace"],"seeds":[0,1]}')
    assert jobs["train"] == 4
    assert jobs["evaluate"] == 4
    assert "quantize" not in jobs


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ('training={"stepz":5}', "training.stepz: unknown key; remove it or correct its spelling"),
        ('training={"steps":0}', "training.steps: Input should be greater than or equal to 1"),
        (
            'suite={"methods":["ptq_nvfp4"]}',
            "ptq_nvfp4 quantizes the policy of bf16, which is not in the suite; add it",
        ),
        ('suite={"methods":["absent"]}', "config/methods/absent.yaml: no such configuration file"),
    ],
)
def test_a_mistake_stops_the_workflow_before_any_job(finished: Tree, override: str, message: str) -> None:
    done = finished.snakemake("-n", "--config", override)
    output = done.stdout + done.stderr
    assert done.returncode != 0
    assert message in output
    assert "Traceback" not in output


def test_a_configuration_file_stands_alone(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    (tmp_path / "local.yaml").write_text("run: mine\ncheckpoint: {source: local, path: policy}\n")
    done = tree.snakemake("-n", "--configfile", "local.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "results/mine/checkpoint" in done.stdout + done.stderr


def test_every_shipped_experiment_and_method_is_valid(finished: Tree) -> None:
    from trace_rl.config.load import load_experiment, load_method, load_suite

    experiments = [file for file in (ROOT / "config").glob("*.yaml") if file.parent.name != "methods"]
    assert {file.name for file in experiments} >= {"config.yaml", "smoke.yaml"}
    for file in experiments:
        assert load_suite(load_experiment(file), root=ROOT)
    assert {load_method(file).name for file in (ROOT / "config/methods").glob("*.yaml")} >= set(METHODS)


def test_lint_finds_nothing(finished: Tree) -> None:
    done = finished.snakemake("--lint")
    assert done.returncode == 0, done.stdout + done.stderr
