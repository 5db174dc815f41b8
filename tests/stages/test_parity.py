"""The parity gate is green on engines that agree, and red when one expert of one layer is damaged."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from trace_rl.config.experiment import ParityConfig
from trace_rl.config.quant import BF16, FormatChoice, QuantSpec
from trace_rl.formats.static_scales import StaticScales
from trace_rl.models.checkpoint_io import finite_or_none
from trace_rl.qat.attach import attach
from trace_rl.rollout.engine import Sampling, open_engine
from trace_rl.stages import audit, calibrate, parity
from trace_rl.stages.failure import StageFailure
from trace_rl.stages.rl_prompts import rl_prompts

DAMAGED = "model.layers.1.mlp.experts.down_proj"


def test_the_gate_is_green_fresh_and_after_a_refit(tiny_run):
    metrics = parity.run(tiny_run.config, tiny_run.paths)
    assert metrics == json.loads(tiny_run.paths.parity("nvfp4").read_text())
    assert metrics["passed"]
    for moment in ("start", "refit"):
        gaps = {mode: value["gap_mean"] for mode, value in metrics["gaps"]["fp4"][moment].items()}
        # This engine runs the trainer's own kernels, so hardly any code differs; a BF16 trainer is far away.
        assert gaps["guided"] <= gaps["rtn"] < 0.01
        assert gaps["off"] > 0.1
        assert metrics["gaps"]["bf16"][moment]["off"]["gap_mean"] < 0.02
    assert metrics["gaps"]["fp4"]["refit"]["off"] != metrics["gaps"]["fp4"]["start"]["off"]


def test_the_gate_and_the_audit_hold_for_blocks_of_32(new_run):
    run = new_run()
    config = run.config.model_copy(update={"format": FormatChoice.model_validate("mxfp4")})
    calibrate.run(config, run.paths)
    assert parity.run(config, run.paths)["passed"]
    assert audit.run(config, run.paths)["num_fp4"] == 18


def test_formats_by_scope_pass_both_gates_and_what_is_not_pinned_is_judged_by_the_bf16_trainer(new_run):
    run = new_run()
    config = run.config.model_copy(update={"format": FormatChoice.model_validate("mxfp4_w4a8")})
    calibrate.run(config, run.paths)
    metrics = parity.run(config, run.paths)
    verdicts = {row["mode"]: row["verdict"] for row in metrics["rows"]}
    assert verdicts["bf16 rollout, BF16 trainer"] == "passed"
    assert verdicts["fp4 rollout, QAT trainer"] == verdicts["fp4 rollout, guided trainer"] == "passed"
    assert verdicts["fp4 rollout, BF16 trainer"] == "reported"
    written = json.loads(run.paths.parity("mxfp4_w4a8").read_text())["rows"]
    for row in (row for row in written if row["mode"].startswith("fp4") and row["threshold"] is not None):
        assert row["threshold"] == metrics["gaps"]["fp4"][row["phase"]]["off"]["gap_mean"]
    rows = {row["name"]: row for row in audit.run(config, run.paths)["rows"]}
    found = {name.rpartition(".")[2]: row for name, row in rows.items() if ".layers.1." in name}
    expected = {"gate_up_proj": "mxfp4", "fc1_input": "mxfp8", "fc2_input": "mxfp8", "v_cache": "mxfp4"}
    for name, format_name in expected.items():
        assert {found[name][column] for column in audit.COLUMNS} == {format_name}


def test_both_gates_check_the_formats_of_a_method_with_scales_of_its_own(new_run):
    """The run is calibrated for NVFP4; MXFP4 has no global scale, and with NVFP4's nothing would agree."""
    run, formats = new_run(), FormatChoice.model_validate("mxfp4")
    calibrate.run(run.config, run.paths)
    metrics = parity.run(run.config, run.paths, formats=formats)
    assert metrics["passed"]
    assert metrics == json.loads(run.paths.parity("mxfp4").read_text())
    rows = audit.run(run.config, run.paths, formats=formats)["rows"]
    assert {row["engine"] for row in rows} == {row["trainer"] for row in rows} == {"mxfp4", "bf16"}
    assert run.paths.audit("mxfp4").is_file() and not run.paths.audit("nvfp4").exists()


@pytest.mark.parametrize("quant", [BF16, QuantSpec()], ids=["bf16", "fp4"])
def test_a_damaged_expert_in_the_engine_is_red(tiny_run, quant):
    config, paths = tiny_run.config, tiny_run.paths
    scales = StaticScales.load(paths.scales)
    prompts = rl_prompts(paths.checkpoint, data=paths.data, count=12, setting="parity.num_prompts")
    sampling = Sampling(temperature=1.0, max_new_tokens=12, seed=3)
    model = AutoModelForCausalLM.from_pretrained(paths.checkpoint, dtype=torch.bfloat16).eval()
    qat = attach(model, quant=quant, scales=scales)
    engine = open_engine(paths.checkpoint, quant=quant, scales=scales, config=config.engine)
    sound = parity.measure_gaps(engine, model, qat, prompts=prompts, sampling=sampling, pad=0)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state[DAMAGED][2] = state[DAMAGED][2].roll(1, dims=0)
    engine.load_policy(state.items(), 1)
    damaged = parity.measure_gaps(engine, model, qat, prompts=prompts, sampling=sampling, pad=0)
    mode = "guided" if quant.enabled else "off"
    assert damaged[mode]["gap_mean"] > 10 * sound[mode]["gap_mean"]
    precision = "fp4" if quant.enabled else "bf16"
    forwards = {"bf16": ("off",), "fp4": ("guided", "rtn", "off")}
    gaps = {
        name: {moment: dict.fromkeys(modes, sound[mode]) for moment in parity.MOMENTS}
        for name, modes in forwards.items()
    }
    parity.require_parity(parity.judge(gaps, thresholds=config.parity))
    gaps[precision]["refit"] = damaged
    rows = parity.judge(gaps, thresholds=config.parity)
    failed = [row for row in rows if row["verdict"] == "FAILED"]
    assert [(row["phase"], row["mode"].split()[0]) for row in failed] == [("refit", precision)]
    with pytest.raises(StageFailure) as failure:
        parity.require_parity(rows)
    for number in (damaged[mode]["gap_mean"], failed[0]["bf16_control"], failed[0]["threshold"]):
        assert f"{number:.5f}" in str(failure.value)


def _gap(mean, **changes):
    return {"gap_mean": mean, "gap_p99": 3 * mean, "gap_max": 9 * mean, **changes}


def _gaps(modes=("guided", "rtn", "off"), **means):
    """Both moments alike: BF16 0.001, FP4 0.002 guided, 0.01 rounded to nearest, 0.1 not rounded, unless said."""
    means = {"guided": 0.002, "rtn": 0.01, "off": 0.1} | means
    gaps = {"bf16": {"off": _gap(0.001)}, "fp4": {mode: _gap(means[mode]) for mode in modes}}
    return {precision: {moment: dict(rows) for moment in parity.MOMENTS} for precision, rows in gaps.items()}


def _failed(gaps, **options):
    rows = parity.judge(gaps, thresholds=ParityConfig(), **options)
    return [(row["phase"], row["mode"]) for row in rows if row["verdict"] == "FAILED"]


@pytest.mark.parametrize("modes", [("guided", "rtn", "off"), ("rtn", "off")], ids=["w4a8", "hif4"])
def test_where_not_all_is_pinned_a_trainer_that_rounds_must_be_nearer_than_one_that_does_not(modes):
    assert not _failed(_gaps(modes), pinned=False)
    both = [(moment, "fp4 rollout, QAT trainer") for moment in parity.MOMENTS]
    assert _failed(_gaps(modes, rtn=0.11), pinned=False) == both
    thresholds = {row["threshold"] for row in parity.judge(_gaps(modes), thresholds=ParityConfig(), pinned=False)}
    assert thresholds == {ParityConfig().max_gap_bf16, 0.1, None}
    assert not _failed(_gaps(rtn=0.11))  # with all pinned, guidance is what is judged


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", parity.GAPS)
@pytest.mark.parametrize("pinned", [True, False])
def test_a_gap_that_is_no_number_is_a_failure_wherever_it_is(pinned, name, bad):
    for precision, mode in (("bf16", "off"), ("fp4", "guided"), ("fp4", "rtn"), ("fp4", "off")):
        gaps = _gaps()
        gaps[precision]["refit"][mode] = gaps[precision]["refit"][mode] | {name: bad}
        assert ("refit", f"{precision} rollout, {parity.FORWARDS[mode]} trainer") in _failed(gaps, pinned=pinned)


def test_a_failed_gate_can_be_written_and_printed_with_its_nan():
    gaps = _gaps(rtn=float("nan"))
    rows = parity.judge(gaps, thresholds=ParityConfig())
    with pytest.raises(StageFailure, match="nan"):
        parity.require_parity(rows)
    written = json.loads(json.dumps(finite_or_none({"gaps": gaps, "rows": rows}), allow_nan=False))
    assert written["gaps"]["fp4"]["start"]["rtn"] == {"gap_mean": None, "gap_p99": None, "gap_max": None}
    assert written["rows"][0] == rows[0]
