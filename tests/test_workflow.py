"""What runs again after what: dry runs on a copy of the tree whose artifacts exist and are recorded as up to date."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from trace_rl.config.load import load_experiment
from trace_rl.config.targets import TABLES, TARGETS, target_names

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
METHODS = ("bf16", "fp4_naive", "qat", "trace", "trace_full", "ptq_nvfp4")
DOWNSTREAM = {"summary": 1, "report": 1}

# Small tables with what names can hold: variants with commas, two changes, a base that is not listed, a grid.
LAST, KV, MXFP4 = (
    "trace@guidance.layers=last_quarter",
    "trace@guidance.tensors=k,v",
    "qat@format=mxfp4+loss.tis_cap=null",
)
PAPER = {
    "run": "mini",
    "suite": {"methods": ["bf16", "trace"], "seeds": [0, 1]},
    "tables": {
        "table1": ["bf16", "qat", "trace"],
        "table4": [MXFP4],
        "table5": ["trace", LAST, KV],
        "table6": [],
        "table7": ["ptq_nvfp4"],
        "mismatch": ["qat"],
        "dynamics": [],
        "storage": ["trace", LAST],
        "ablations": [],
        "staleness": ["trace"],
        "staleness_only": [],
        "staleness_levels": [0, 1],
        "staleness_learning_rates": [0.0003],
        "staleness_steps": None,
    },
    "stability": {
        "methods": ["qat"],
        "learning_rates": [0.0003, 0.001],
        "problems": [None],
        "updates_per_rollout": [1, 4],
        "steps": 50,
        "seeds": [5],
    },
}
PAGES = ("table1", "table4", "table5", "table7", "mismatch", "storage", "staleness", "paper")
EVALUATED = ("bf16", "qat", "trace", MXFP4, LAST, KV)
TRAININGS = (*EVALUATED, "trace@training.staleness=1")


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
        return {rule: count for rule, count in Counter(rules).items() if rule not in ("all", "default", *TARGETS)}

    def wildcards(self, rule: str, *arguments: str) -> set[str]:
        """Wildcards of the jobs of one rule that would run."""
        done = self.snakemake("-n", *arguments)
        blocks = re.split(r"^(?:local)?rule ", done.stdout + done.stderr, flags=re.MULTILINE)
        return {
            re.search(r"^    wildcards: (.*)$", block, re.MULTILINE)[1]
            for block in blocks
            if block.startswith(f"{rule}:")
        }

    def edit(self, file: str, old: str, new: str) -> None:
        text = (self.folder / file).read_text()
        assert old in text
        (self.folder / file).write_text(text.replace(old, new, 1))

    def finish(self, *arguments: str) -> None:
        """Make every declared output and let Snakemake record it as made by the present settings, methods and code."""
        plan = self.snakemake("-n", *arguments)
        for line in re.findall(r"^    output: (.*)$", plan.stdout + plan.stderr, re.MULTILINE):
            for name in line.split(", "):
                path = self.folder / name
                if path.suffix:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text("{}")
                else:
                    path.mkdir(parents=True, exist_ok=True)
        done = self.snakemake("--touch", "--forceall", "--cores", "1", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    tree = Tree(tmp_path_factory.mktemp("finished"))
    tree.finish()
    return tree


def copy_of(finished: Tree, folder: Path) -> Tree:
    copy = Tree.__new__(Tree)
    copy.folder = folder
    shutil.copytree(finished.folder, copy.folder, symlinks=True)
    return copy


@pytest.fixture
def tree(finished: Tree, tmp_path: Path) -> Tree:
    """A copy of the finished tree, for one edit."""
    return copy_of(finished, tmp_path / "tree")


def paper(*arguments: str, pages: tuple[str, ...] = PAGES) -> tuple[str, ...]:
    return (*pages, "--configfile", "paper.yaml", *arguments)


@pytest.fixture(scope="module")
def fresh_paper(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    tree = Tree(tmp_path_factory.mktemp("fresh"))
    (tree.folder / "paper.yaml").write_text(yaml.safe_dump(PAPER))
    return tree


@pytest.fixture(scope="module")
def finished_paper(fresh_paper: Tree, tmp_path_factory: pytest.TempPathFactory) -> Tree:
    tree = copy_of(fresh_paper, tmp_path_factory.mktemp("paper") / "tree")
    tree.finish(*paper(pages=(*PAGES, "all")))
    return tree


@pytest.fixture
def paper_tree(finished_paper: Tree, tmp_path: Path) -> Tree:
    return copy_of(finished_paper, tmp_path / "tree")


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
    with (tree.folder / "trace/report/figures/canvas.py").open("a") as file:
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
        ('suite={"seeds":[0,1]}', {}),
        ('suite={"seeds":[1,0]}', {"train": 5, "quantize": 1, "evaluate": 6, **DOWNSTREAM}),
        ('tables={"table6":["qat"]}', {}),
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
    assert jobs["train"] == 2
    assert jobs["evaluate"] == 2
    assert "quantize" not in jobs


def test_tables_share_their_runs(fresh_paper: Tree) -> None:
    jobs = fresh_paper.jobs(*paper())
    once = ("data", "checkpoint", "calibrate", "evaluate_start")
    assert jobs == {
        **dict.fromkeys(once, 1),
        **dict.fromkeys(("audit", "parity"), 2),  # NVFP4 and MXFP4
        "train": 2 * len(TRAININGS),
        "quantize": 2,
        "evaluate": 2 * (len(EVALUATED) + 1),  # ptq_nvfp4 too
        "gap_sources": 2,
        "ratio": 2,
        "tables": len(PAGES),
    }


@pytest.mark.parametrize(
    ("target", "train", "evaluate"),
    [
        ("table1", {"bf16", "qat", "trace"}, {"bf16", "qat", "trace"}),
        ("table4", {MXFP4}, {MXFP4}),
        ("table7", {"bf16"}, {"ptq_nvfp4"}),
        ("storage", {"trace", LAST}, set()),
        ("mismatch", {"qat", "trace"}, {"qat"}),  # the sources of the gap are measured on a trained `trace` policy
        ("staleness", {"trace", "trace@training.staleness=1"}, set()),
    ],
)
def test_a_target_asks_for_its_own_methods_over_all_seeds(
    fresh_paper: Tree, target: str, train: set[str], evaluate: set[str]
) -> None:
    for rule, methods in (("train", train), ("evaluate", evaluate)):
        expected = {f"method={method}, seed={seed}" for method in methods for seed in (0, 1)}
        assert fresh_paper.wildcards(rule, *paper(pages=(target,))) == expected


@pytest.mark.parametrize(("page", "format_name"), [("table4", "mxfp4"), ("table5", "nvfp4")])
def test_training_waits_for_the_gates_of_its_own_format(fresh_paper: Tree, page: str, format_name: str) -> None:
    for rule in ("audit", "parity"):
        assert fresh_paper.wildcards(rule, *paper(pages=(page,))) == {f"format={format_name}"}


def test_stability_has_a_grid_and_seeds_of_its_own(fresh_paper: Tree) -> None:
    changes = (
        "updates_per_rollout=4+",
        "learning_rate=0.001+",
        "learning_rate=0.001+training.updates_per_rollout=4+",
        "",
    )
    assert fresh_paper.wildcards("train", *paper(pages=("stability",))) == {
        f"method=qat@{'training.' * bool(change)}{change}training.steps=50, seed=5" for change in changes
    }


def test_a_job_is_told_the_whole_name_of_its_variant(fresh_paper: Tree) -> None:
    plan = fresh_paper.snakemake("-n", "--printshellcmds", *paper(pages=("table5",)))
    commands = [line for line in (plan.stdout + plan.stderr).splitlines() if "trace-rl train" in line]
    words = [shlex.split(command) for command in commands]
    assert {word[word.index("--method") + 1] for word in words} == {"trace", LAST, KV}


def test_every_job_leaves_its_time(fresh_paper: Tree) -> None:
    plan = fresh_paper.snakemake("-n", *paper(pages=(*PAGES, "all")))
    blocks = re.split(r"^(?:local)?rule ", plan.stdout + plan.stderr, flags=re.MULTILINE)[1:]
    assert {block.partition(":")[0] for block in blocks if "\n    benchmark: " not in block} == {"all", *PAGES}


def test_finished_tables_have_nothing_to_do(finished_paper: Tree) -> None:
    assert finished_paper.jobs(*paper(pages=(*PAGES, "all"))) == {}


@pytest.mark.parametrize(
    ("method", "expected", "pages"),
    [
        ("qat", {"train": 2, "evaluate": 2}, {"table1", "mismatch", "paper"}),
        (KV, {"train": 2, "evaluate": 2}, {"table5", "paper"}),
        ("bf16", {"train": 2, "evaluate": 4, "quantize": 2, **DOWNSTREAM}, {"table1", "table7", "paper"}),
        (
            "trace",
            {"train": 2, "evaluate": 2, "gap_sources": 2, **DOWNSTREAM},
            {"table1", "table5", "mismatch", "storage", "staleness", "paper"},
        ),
    ],
)
def test_a_deleted_run_is_made_again_with_what_depends_on_it(
    paper_tree: Tree, method: str, expected: dict[str, int], pages: set[str]
) -> None:
    shutil.rmtree(paper_tree.folder / "results/mini/train" / method)
    targets = paper(pages=(*PAGES, "all"))
    assert paper_tree.jobs(*targets) == {**expected, "tables": len(pages)}
    assert paper_tree.wildcards("train", *targets) == {f"method={method}, seed={seed}" for seed in (0, 1)}
    assert paper_tree.wildcards("tables", *targets) == {f"target={page}" for page in pages}


def test_a_deleted_base_is_trained_again_for_the_table_of_what_quantizes_it(paper_tree: Tree) -> None:
    shutil.rmtree(paper_tree.folder / "results/mini/train/bf16")
    assert paper_tree.jobs(*paper(pages=("table7",))) == {"train": 2, "quantize": 2, "evaluate": 2, "tables": 1}
    assert paper_tree.jobs(*paper(pages=("table5",))) == {}


def test_adding_a_seed_trains_that_seed_only(finished_paper: Tree) -> None:
    override = ("--config", 'suite={"seeds":[0,1,2]}')
    assert finished_paper.jobs(*paper(*override)) == {
        "train": len(TRAININGS),
        "quantize": 1,
        "evaluate": len(EVALUATED) + 1,
        "gap_sources": 1,
        "ratio": 1,
        "tables": len(PAGES),
    }
    for rule in ("train", "evaluate"):
        assert all(job.endswith("seed=2") for job in finished_paper.wildcards(rule, *paper(*override)))
    assert finished_paper.jobs(*paper(*override, pages=("all",))) == {}


def test_adding_a_method_to_a_table_runs_that_method_and_pages_only(finished_paper: Tree) -> None:
    override = ("--config", 'tables={"table6":["sc","qat"]}')
    jobs = finished_paper.jobs(*paper(*override, pages=("table6", *PAGES)))
    assert {rule: count for rule, count in jobs.items() if rule != "tables"} == {"train": 2, "evaluate": 2}
    assert finished_paper.wildcards("train", *paper(*override, pages=("table6",))) == {
        "method=sc, seed=0",
        "method=sc, seed=1",
    }


def test_editing_a_page_retrains_nothing(paper_tree: Tree) -> None:
    with (paper_tree.folder / "trace/stages/tables.py").open("a") as file:
        file.write("\nEDITED = 1\n")
    assert paper_tree.jobs(*paper(pages=(*PAGES, "all"))) == {"tables": len(PAGES)}


def test_editing_a_method_retrains_its_variants(paper_tree: Tree) -> None:
    paper_tree.edit("config/methods/trace.yaml", "bits: 1", "bits: 2")
    trained = {job.partition(",")[0].split("=", 1)[1] for job in paper_tree.wildcards("train", *paper())}
    assert {name.partition("@")[0] for name in trained} == {"trace"}


def test_the_paper_of_the_default_experiment_is_the_union_of_its_tables() -> None:
    experiment = load_experiment(ROOT / "config/config.yaml")
    names = target_names(experiment, "paper")
    assert len(set(names)) == len(names)
    assert set(names) == {name for table in TABLES for name in target_names(experiment, table)}
    assert set(experiment.suite.methods) <= set(names)


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


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "table6: no methods; name some under tables.table6"),
        (["absent"], "config/methods/absent.yaml: no such configuration file"),
        (["trace@guidance.bit=2"], "variant trace@guidance.bit=2: rl.guidance.bit: unknown key"),
        (["trace@guidance.bits=1"], "changes nothing in config/methods/trace.yaml; ask for trace"),
        (["trace@training.staleness=9"], "raise max_version_diff or lower staleness"),
        (
            ["trace_full", "trace@guidance.bits=4+guidance.layers=all"],
            "trace@guidance.bits=4+guidance.layers=all is the same run as trace_full; ask for trace_full",
        ),
    ],
)
def test_a_mistake_in_a_table_stops_its_target_before_any_job(finished: Tree, names: list[str], message: str) -> None:
    override = ("--config", f"tables={json.dumps({'table6': names})}")
    done = finished.snakemake("-n", "table6", *override)
    output = done.stdout + done.stderr
    assert done.returncode != 0
    assert message in output
    assert "Traceback (most recent" not in output
    assert finished.jobs(*override) == {}


def test_a_configuration_file_stands_alone(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    (tmp_path / "local.yaml").write_text("run: mine\ncheckpoint: {source: local, path: policy}\n")
    done = tree.snakemake("-n", "--configfile", "local.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "results/mine/checkpoint" in done.stdout + done.stderr


def test_every_shipped_experiment_and_method_is_valid(finished: Tree) -> None:
    from trace_rl.config.load import load_method, load_suite

    experiments = [file for file in (ROOT / "config").glob("*.yaml") if file.parent.name != "methods"]
    assert {file.name for file in experiments} >= {"config.yaml", "smoke.yaml"}
    for file in experiments:
        assert load_suite(load_experiment(file), root=ROOT)
    assert {load_method(file).name for file in (ROOT / "config/methods").glob("*.yaml")} >= set(METHODS)


def test_lint_finds_nothing(finished: Tree) -> None:
    done = finished.snakemake("--lint")
    assert done.returncode == 0, done.stdout + done.stderr
