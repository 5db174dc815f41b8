"""Pages of the paper's tables: complete, small, self-contained, and honest about what collapsed or is missing."""

import dataclasses
import itertools
import json
import re
from collections import Counter

import pytest
from report_runs import (
    METHODS,
    SEEDS,
    a_context,
    artifacts,
    gap_sources,
    over_seeds,
    ratio,
    record,
    score,
    section_text,
    steps_of,
    summary_of,
    with_methods,
)

from trace_rl.config.experiment import ExperimentConfig
from trace_rl.config.load import load_method, parse_experiment
from trace_rl.config.paths import RunPaths
from trace_rl.config.targets import TARGETS, target_methods, target_names
from trace_rl.errors import UserError
from trace_rl.report.claim import Claim, accuracy_difference
from trace_rl.report.context import Context
from trace_rl.report.document import Table, write
from trace_rl.report.labels import base, label, without
from trace_rl.report.sections.accuracy import accuracy_table
from trace_rl.report.sections.losses import loss_activity
from trace_rl.report.sections.ratios import ratio_blocks
from trace_rl.report.sections.stability import by_length, stability_grid, stability_table
from trace_rl.report.sections.tables import against_base
from trace_rl.report.sections.time import own_seconds
from trace_rl.report.target_page import build_target
from trace_rl.stages import tables

PAGE_LIMIT = 2_000_000
"""Bytes of a page with everything its Markdown needs."""


@pytest.fixture(scope="module")
def config() -> ExperimentConfig:
    return parse_experiment({"suite": {"seeds": list(SEEDS)}}, source="test")


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    """The page of the whole paper: every method of every table, three seeds, 270 steps, both analyses."""
    context = a_context(
        config,
        target_names(config, "paper"),
        analysis={"gap_sources": {s: gap_sources(layers=8) for s in SEEDS}, "ratio": {s: ratio() for s in SEEDS}},
    )
    out = tmp_path_factory.mktemp("paper")
    write(build_target(context, target="paper"), out)
    return context, out


def test_the_whole_paper_is_small(whole):
    context, out = whole
    assert len(context.summary["methods"]) >= 25
    assert (out / "index.html").stat().st_size < PAGE_LIMIT / 2
    assert sum(path.stat().st_size for path in out.iterdir()) < PAGE_LIMIT


def test_nothing_is_loaded_from_elsewhere(whole):
    html = (whole[1] / "index.html").read_text()
    assert not re.search(r"<(script|link|img|iframe|object|embed)\b", html)
    targets = re.findall(r"""(?:src|href)\s*=\s*["']([^"']*)""", html)
    assert targets and all(target.startswith("#") for target in targets)
    assert not re.search(r"@import|url\((?!#)", html)


def test_every_reference_inside_the_page_has_its_target(whole):
    html = (whole[1] / "index.html").read_text()
    ids = set(re.findall(r' id="([^"]+)"', html))
    used = set(re.findall(r'href="#([^"]+)"', html)) | set(re.findall(r"url\(#([^)]+)\)", html))
    assert used <= ids


def test_figures_and_anchors_are_named_once(whole, config):
    context, _ = whole
    document = build_target(context, target="paper")
    for names in ([f.name for f in document.figures()], [s.anchor for s in document.sections]):
        assert max(Counter(names).values()) == 1


def test_markdown_says_what_the_page_says(whole):
    context, out = whole
    document = build_target(context, target="paper")
    markdown = (out / "report.md").read_text()
    assert [line[3:] for line in markdown.splitlines() if line.startswith("## ")] == [
        section.title for section in document.sections
    ]
    for figure in document.figures():
        assert f"({figure.name}.svg)" in markdown and (out / f"{figure.name}.svg").is_file()
    for claim in context.claims:
        assert claim.statement.replace("|", "\\|") in markdown


def test_the_claims_come_first_and_every_table_is_there(whole):
    document = build_target(whole[0], target="paper")
    titles = [section.title for section in document.sections]
    assert titles[0] == "Paper beside here"
    for title in ("Table 1", "Table 4", "Table 5", "Table 6", "Table 7", "Dynamics", "Codeword", "Where the gap"):
        assert any(found.startswith(title) for found in titles), title
    assert {"Storage", "Staleness", "Ablations", "Time", "Provenance"} <= set(titles)


def test_every_number_of_the_paper_is_on_the_page(whole):
    context, out = whole
    markdown = (out / "report.md").read_text()

    def leaves(value):
        if isinstance(value, dict):
            for inner in value.values():
                yield from leaves(inner)
        elif isinstance(value, list):
            yield from value
        else:
            yield value

    missing = [
        value
        for part, numbers in context.paper.items()
        if part not in ("source", "settings")  # settings of the models that are not compared are left out
        for value in leaves(numbers)
        if str(value) not in markdown
    ]
    assert not missing


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_has_a_page(target, config, tmp_path):
    context = a_context(config, target_names(config, target), num_steps=12)
    write(build_target(context, target=target), tmp_path)
    assert (tmp_path / "index.html").stat().st_size < PAGE_LIMIT / 2


def test_an_unknown_target_is_refused(config):
    with pytest.raises(UserError, match="table3"):
        build_target(a_context(config, ("bf16",), num_steps=3), target="table3")


def test_a_section_opens_with_the_disagreement_and_its_evidence(config):
    context = a_context(config, ("bf16", "qat", "trace"), num_steps=12)
    context.summary["methods"]["trace"] = over_seeds(fp4=[0.30, 0.31, 0.29], bf16=[0.3] * 3)
    text = section_text(context, "table1", "Table 1")
    assert text.startswith("This run disagrees with the paper, in direction or in size: ")
    first = text.splitlines()[0]
    assert "TRACE beats plain QAT (paper 75.3 vs 59.6; here 30.0 ± 0.6 vs" in first


def test_agreement_and_what_is_open_are_told_apart(config):
    context = a_context(config, ("bf16", "qat", "trace"), num_steps=12)
    context.summary["methods"] |= {
        "bf16": over_seeds(fp4=[0.6] * 3, bf16=[0.75, 0.76, 0.74]),
        "qat": over_seeds(fp4=[0.60, 0.61, 0.59], bf16=[0.6] * 3),
        "trace": over_seeds(fp4=[0.75, 0.70, 0.80], bf16=[0.6] * 3),
    }
    text = section_text(context, "table1", "Table 1")
    assert text.startswith("Of 3 claims measured here: same direction 2, disagreeing 0, not resolved 1.")
    unresolved = next(line for line in text.splitlines() if line.startswith("Not resolved"))
    assert "on par" in unresolved and "loses accuracy" not in unresolved


def test_a_collapsed_run_is_counted_and_kept(config):
    context = a_context(config, ("bf16", "qat", "trace"), num_steps=12)
    context.summary["methods"]["qat"]["1"]["collapsed"] = True
    text = section_text(context, "table1", "Table 1")
    assert "Collapsed runs, shown like all others: qat 1 of 3." in text
    assert "'1 of 3'" in text  # the row is there, with all three seeds in its mean
    assert not any("not" in line and "qat" in line and "dropped" in line for line in text.splitlines())


def test_a_missing_method_leaves_its_claims_out(config):
    text = section_text(a_context(config, ("bf16", "trace"), num_steps=12), "table1", "Table 1")
    assert "QUADS" not in text and "plain QAT" not in text
    assert "on par" in text


def test_a_cell_the_paper_does_not_report_is_not_guessed(config):
    context = a_context(config, ("bf16", "qarl", "trace"), num_steps=12)
    document = build_target(context, target="table1")
    section = next(section for section in document.sections if section.title.startswith("Table 1"))
    table = next(block for block in section.blocks if isinstance(block, Table) and block.header[0] == "policy")
    assert {row[0]: row[1] for row in table.rows} == {
        "before RL": "–",
        "bf16": "74.9",
        "qarl": "not reported",
        "trace": "75.3",
    }


def test_a_table_names_fp4_executions_that_differ(config):
    names = ("bf16", "trace", "quads", "resq", "ptq_4over6", "qat@format=mxfp4_w4a8")
    methods = {name: load_method(METHODS / f"{name}.yaml") for name in names}
    context = dataclasses.replace(a_context(config, names), methods=methods)
    caption = accuracy_table(context, names).caption
    assert "weights, activations and KV in nvfp4; different for quads" in caption
    for words in (
        "quads (nvfp4, with channels residual compensation)",
        "resq (nvfp4, with sparse residual compensation)",
        "ptq_4over6 (weights fouroversix, activations fouroversix, kv nvfp4)",
        "qat, MXFP4 W4A8 (mxfp4_w4a8)",
    ):
        assert words in caption
    assert not re.search(r"\b(bf16|trace) \(", caption)


def test_the_ratio_is_also_held_against_an_engine_without_flips(config):
    """Its correlation with the FP4 engine's is partly of the sampled log-prob that both subtract."""
    context = dataclasses.replace(a_context(config, ()), analysis={"ratio": {s: ratio() for s in SEEDS}})
    reading, estimates, *_ = ratio_blocks(context)
    assert "both subtract the log-prob the rollout sampled with" in reading
    assert "TRACE, 1 bit, deeper half 0.71" in reading
    column = estimates.header.index("slope on a BF16 engine's")
    assert {row[column] for row in estimates.rows} == {"0.710 ± 0.030"}
    assert "QAT, without R3" in {row[0] for row in estimates.rows}


def test_one_seed_resolves_no_gap(config):
    names = ["trace", "trace@guidance.bits=2"]
    method = over_seeds(fp4=[0.5], bf16=[0.5], gap=0.01)
    wider = over_seeds(fp4=[0.9], bf16=[0.5], gap=0.02)
    context = dataclasses.replace(
        a_context(config, ()), summary=summary_of(dict(zip(names, (method, wider), strict=True)))
    )
    (row,) = against_base(context, names).rows
    assert (row[2], row[4]) == ("yes", "error unknown")


def test_the_stability_map_says_with_which_length_it_was_evaluated():
    config = parse_experiment({"evaluate": {"max_new_tokens": 33}}, source="test")
    context = a_context(config, target_names(config, "stability"))
    assert "answers of up to 33 tokens" in section_text(context, "stability", "Stability")


def test_the_stability_map_shows_the_answers_it_was_trained_on(config):
    names = target_names(config, "stability")
    context = a_context(config, names, num_steps=12)
    for name, seeds in context.summary["methods"].items():
        for found in seeds.values():
            found |= {"response_length": 38.0 if "code" in name else 25.0, "truncated_responses": 0.02}
    (points,) = {tuple(sorted(by)) for by in stability_grid(context).values()}
    assert {point[1] for point in points} == {"math", "code"}
    for method in stability_grid(context).values():
        assert by_length(context, method) == {"math": 25.0, "code": 38.0}
    row = stability_table(context, stability_grid(context)).rows[0]
    assert row[2].startswith("programs") and row[3].startswith("38.0") and row[4].startswith("2.0")


def test_the_stability_map_says_whether_trace_widens_the_region(config):
    names = target_names(config, "stability")
    context = a_context(config, names, num_steps=12)
    assert "does not widen" in section_text(context, "stability", "Stability")
    fast = [name for name in names if base(name) in ("qat", "fp4_naive") and "0.003" in name]
    assert fast
    for name in fast:
        for seed in context.summary["methods"][name].values():
            seed["collapsed"] = True
    text = section_text(context, "stability", "Stability")
    assert "TRACE widens the stable region of qat by 4 of 12 cells" in text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("trace", "trace"),
        ("trace@guidance.layers=last_quarter", "trace, last quarter"),
        ("trace@guidance.layers=all+guidance.bits=2", "trace, all layers, 2 bits"),
        ("trace@guidance.scale_bits=2", "trace, 2-bit scales"),
        ("qat@format=mxfp4", "qat, MXFP4 W4A4"),
        ("trace@format=mxfp4_w4a8+guidance.tensors=k,v", "trace, MXFP4 W4A8, KV only"),
        ("qat@router_replay=none", "qat, without R3"),
        ("bf16@loss.tis_cap=null", "bf16, without TIS"),
        ("qat@training.learning_rate=0.001+training.staleness=3", "qat, lr 0.001, staleness 3"),
        ("qat@training.updates_per_rollout=1", "qat, 1 update per rollout"),
        ("sc@loss.top_k=64", "sc, loss.top_k = 64"),
    ],
)
def test_variants_have_readable_labels(name, words):
    assert label(name) == words


def test_labels_of_a_run_are_distinct(config):
    names = target_names(config, "paper")
    assert len({label(name) for name in names}) == len(names)
    assert without("trace@training.staleness=3+guidance.gate=0.05", "training.staleness") == "trace, gate 0.05"


def test_reward_parity_is_decided_by_the_pairs_of_seeds(config):
    statement = "TRACE's reward reaches that of BF16 RL during training (10-step means)"
    context = a_context(config, ("bf16", "trace"), num_steps=60)

    def claim_of(ends: list[float]) -> Claim:
        for seed, end in enumerate(ends):
            context.summary["methods"]["trace"][str(seed)]["reward_end"] = end
        changed = Context(summary=context.summary, config=config, methods={}, runs=context.runs)
        return next(claim for claim in changed.claims if claim.statement == statement)

    assert claim_of([0.700, 0.701, 0.702]).verdict == "same direction"
    assert claim_of([0.500, 0.501, 0.502]).verdict == "opposite direction"
    assert claim_of([0.65, 0.75, 0.70]).verdict == "not resolved"  # equal means, but a loss of 5 points is possible
    assert "step" in claim_of([0.7, 0.7, 0.7]).here


def test_a_method_whose_mechanism_never_acts_is_named(config):
    context = with_methods(a_context(config, ("qat", "qarl", "triage"), num_steps=12))
    for (name, _), rows in context.runs.items():
        for row in rows:
            row |= {"is_truncated": 0.001, "clip_fraction": 0.0}
            row |= {"loss/dropped_positive": 0.0, "loss/dropped_negative": 0.0} if name == "qarl" else {}
            row |= {"loss/gated": 0.02, "loss/repaired": 0.0} if name == "triage" else {}
    text = section_text(context, "table1", "Table 1")
    assert "so that the method is QAT but for its cap: qarl (trust band)." in text
    assert "triage (gates" not in text
    table = loss_activity(context, list(context.summary["methods"]))[-1]
    assert {row[0]: row[table.header.index("gated (%)")] for row in table.rows} == {
        "qat": "–",
        "qarl": "–",
        "triage": "2.0000",
    }


def test_a_page_says_when_nothing_of_the_paper_was_measured(config):
    context = a_context(config, ("qat",), num_steps=12)
    assert "methods or tasks that it compares were not run" in section_text(context, "table6", "Table 6")
    assert "The public accounts of the paper give no number" in section_text(context, "ablations", "Ablations")


def test_time_counts_the_jobs_of_the_page(config):
    context = a_context(config, ("qat",), num_steps=12)
    jobs = {"train/qat/seed0": 10.0, "train/trace/seed0": 1000.0, "evaluate/start": 1.0, "checkpoint": 5.0}
    assert own_seconds(dataclasses.replace(context, seconds=jobs)) == {
        job: value for job, value in jobs.items() if "trace" not in job
    }


def test_the_stage_reads_a_run_and_writes_its_page(tmp_path):
    config = parse_experiment({"suite": {"seeds": [0, 1]}, "tracking": {"enabled": False}}, source="test")
    paths = RunPaths("made-up", root=tmp_path)
    methods = target_methods(config, "table6")

    def put(path, content):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)

    scores = {e: {task: score(0.5) for task in ("mini_math", "mini_code")} for e in ("fp4", "bf16")}
    put(paths.evaluation_start, json.dumps({"executions": scores}))
    put(paths.parity("nvfp4"), json.dumps(artifacts()["parity"]["nvfp4"]))
    for name in methods:
        for seed in (0, 1):
            put(paths.evaluation(name, seed), json.dumps({"executions": scores}))
            run = record(fp4=0.5, bf16=0.5)
            put(paths.train(name, seed) / "metrics.json", json.dumps(run))
            put(paths.train(name, seed) / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in steps_of(seed=0)))
            put(paths.base / f"benchmarks/train/{name}/seed{seed}.tsv", f"s\th:m:s\n{300 + 10 * seed}.0\t-\n")
    put(paths.target_report("table6") / "left_over.svg", "<svg/>")
    tables.run(config, paths, target="table6", methods=methods, seeds=(0, 1))
    out = paths.target_report("table6")
    markdown = (out / "report.md").read_text()
    assert "| train | 6 | 305 | 1830 |" in markdown  # three methods, two seeds: median and total seconds
    assert "| sc | 1.60 | 24 | 2 |" in markdown  # two seeds: median step, all steps
    assert "Parity of trainer and engine on the same tokens in nvfp4" in markdown
    assert list(json.loads((out / "summary.json").read_text())["methods"]) == list(methods)
    assert not (out / "left_over.svg").exists()


def test_storage_needs_no_evaluation(config):
    context = a_context(config, target_names(config, "storage"), num_steps=12)
    context.summary["start"]["accuracy"] = {}
    for seeds in context.summary["methods"].values():
        for entry in seeds.values():
            entry["accuracy"] = {}
    text = section_text(context, "storage", "Storage")
    for number in ("45.0 KiB", "5.625 KiB", "7.5 KiB", "6.0x", "50.6 TiB", "186 s"):
        assert number in text


def test_markdown_tables_have_as_many_cells_in_every_row(whole):
    lines = (whole[1] / "report.md").read_text().splitlines()
    rows = [line if line.startswith(("| ", "|--")) else "" for line in lines]
    widths = [len(re.findall(r"(?<!\\)\|", row)) for row in rows]
    assert all(a == b for a, b in itertools.pairwise(widths) if a and b)


def test_variants_are_compared_in_the_execution_of_their_base():
    methods = {
        "bf16": over_seeds(fp4=[0.2, 0.3], bf16=[0.70, 0.72]),
        "bf16@loss.tis_cap=null": over_seeds(fp4=[0.9, 0.9], bf16=[0.60, 0.62]),
        "qat": over_seeds(fp4=[0.5, 0.6], bf16=[0.9, 0.9]),
    }
    text, gap = accuracy_difference(summary_of(methods), "bf16@loss.tis_cap=null", "bf16")
    assert gap.mean == pytest.approx(-0.1)
    assert text.startswith("61.0")
    assert accuracy_difference(summary_of(methods), "qat", "bf16")[1].mean == pytest.approx(-0.16)
