"""The analytic decode model: bytes by hand, weights counted by transformers, and limits that any roofline must keep."""

import json
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from transformers.models.mixtral import MixtralConfig
from transformers.models.qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

from trace_rl.errors import UserError
from trace_rl.stages import bench_model, decode_validation
from trace_rl.stages.decode_architecture import packaged, packaged_hardware, packaged_models, read_architecture
from trace_rl.stages.decode_limits import (
    at_capacity,
    batch_for_ratio,
    compute_bound_batch,
    devices_to_fit,
    fading_batch,
    kv_bound_batch,
    largest_batch,
    speedup,
    speedup_range,
)
from trace_rl.stages.decode_model import (
    BF16,
    FP4_PRECISIONS,
    W4A4_KV4,
    W4A16,
    Component,
    decode_step,
    distinct_experts,
    expert_part,
)
from trace_rl.stages.host_speed import ExpertShape, expert_layer, measure_host, random_routes

K128 = 131072
ARCHS = {item.name: read_architecture(item.name, item.config) for item in packaged_models()}
QWEN35 = ARCHS["Qwen3.5-35B-A3B"]
FLASH = ARCHS["Qwen3.8-Flash-Next"]
B200, H200 = packaged_hardware("B200"), packaged_hardware("H200")

archs = st.sampled_from(list(ARCHS.values()))
lines = st.sampled_from([B200, H200])
precisions = st.sampled_from([BF16, *FP4_PRECISIONS])
batches = st.integers(1, 4096)
contexts = st.integers(1, 262144)

TINY_LINEAR = {
    "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_num_value_heads": 4, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
TINY = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "vocab_size": 100,
    "tie_word_embeddings": False,
}  # fmt: skip


# --- bytes of Qwen3.5-35B-A3B, by hand


def test_kv_of_the_35b() -> None:
    assert QWEN35.kv_bytes_per_token(BF16) == 10 * 2 * 2 * 256 * 2 == 20480
    assert QWEN35.kv_bytes_per_token(W4A4_KV4) == 20480 * 4.5 / 16 == 5760
    assert QWEN35.kv_bytes_per_token(W4A16) == 20480


def test_routed_experts_of_the_35b() -> None:
    assert QWEN35.routed_weights == 40 * 256 * 3 * 2048 * 512
    bf16, fp4 = QWEN35.weight_bytes(BF16), QWEN35.weight_bytes(W4A4_KV4)
    assert bf16 == 2 * QWEN35.total_weights
    assert bf16 - fp4 == QWEN35.routed_weights * (16 - 4.5) / 8


def test_linear_state_of_the_35b() -> None:
    per_layer = 32 * 128 * 128 * 4 + (2 * 16 * 128 + 32 * 128) * 3 * 2
    assert QWEN35.state_bytes == 30 * per_layer


def test_linear_state_of_the_2_4t_is_what_a_serving_planner_states() -> None:
    assert ARCHS["Qwen3.8-2.4T-A95B"].state_bytes == 587_292_672  # github.com/ai-dynamo/aiconfigurator/pull/1573


def test_one_sequence_reads_the_active_weights() -> None:
    step = decode_step(QWEN35, BF16, batch=1, context=1000)
    read = step.part("dense").num_bytes + step.part("experts").num_bytes
    assert read == pytest.approx(2 * QWEN35.active_weights)
    assert step.part("KV").num_bytes == 1001 * 20480  # 1000 read, one written
    assert step.part("linear state").num_bytes == 2 * QWEN35.state_bytes


def test_flops_are_two_per_weight_and_four_per_attended_value() -> None:
    step = decode_step(QWEN35, BF16, batch=3, context=1000)
    assert step.part("dense").flops + step.part("experts").flops == 3 * 2 * QWEN35.active_weights
    assert step.part("KV").flops == 3 * 10 * 4 * 16 * 256 * 1000


def test_recording_is_one_more_component() -> None:
    plain, recorded = (decode_step(QWEN35, W4A4_KV4, batch=4, context=9, recording_bytes=n) for n in (0, 8640))
    assert recorded.num_bytes - plain.num_bytes == pytest.approx(2 * 4 * 8640)


# --- the models


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("Qwen3.5-35B-A3B", 35e9, 3e9),
        ("Qwen3.5-122B-A10B", 122e9, 10e9),
        ("Qwen3.8-2.4T-A95B", 2.4e12, 95e9),
        ("Qwen3.8-Flash-Next", 176e9, 6e9),  # its name has no sizes; the card says 125B and a 51B table
    ],
)
def test_weights_agree_with_the_name(name: str, total: float, active: float) -> None:
    arch = ARCHS[name]
    assert arch.total_weights == pytest.approx(total, rel=0.02)
    assert arch.active_weights + arch.embedding_weights == pytest.approx(active, rel=0.25)


def test_every_packaged_entry_has_a_source() -> None:
    for section in ("models", "hardware"):
        for name, item in packaged()[section].items():
            assert item["source"], name


def test_the_35b_is_the_one_of_the_report(repository) -> None:
    report = json.loads((repository / "trace/report/qwen3_5_35b_a3b.json").read_text())
    config = packaged()["models"]["Qwen3.5-35B-A3B"]["config"]
    assert {key: config[key] for key in report} == report


def matrices(config) -> int:
    """Elements of all parameters with at least two dimensions, on no memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in model.parameters() if p.ndim > 1)


@pytest.mark.parametrize(
    "config",
    [
        Qwen3MoeConfig(**TINY, intermediate_size=96, mlp_only_layers=[0]),
        Qwen3MoeConfig(**(TINY | {"tie_word_embeddings": True})),
        Qwen3_5MoeTextConfig(**TINY, **TINY_LINEAR, shared_expert_intermediate_size=40),
        MixtralConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
            vocab_size=100, num_local_experts=4, num_experts_per_tok=2, sliding_window=None,
        ),
    ],
    ids=["dense layer", "tied", "linear and shared", "mixtral"],
)  # fmt: skip
def test_weights_are_those_transformers_builds(config) -> None:
    assert read_architecture("tiny", config.to_dict()).total_weights == matrices(config)


def test_weights_of_residual_streams_and_indexers_are_those_transformers_builds() -> None:
    config = Qwen4ExpTextConfig(
        **TINY, **TINY_LINEAR, shared_expert_intermediate_size=40, hc_count=2, hc_lowrank=5, ple_layer_ids=[2],
        ple_embed_dim=32, ngram_size=3, heads_per_ngram=2, ngram_vocab_size_base=1000, eos_token_id=1,
        make_ngram_vocab_size_divisible_by=1, indexer_n_heads=3, indexer_kv_heads=1, indexer_head_dim=16,
        indexer_budget=64, indexer_compress_ratio=4, full_attention_interval=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
    )  # fmt: skip
    values = config.to_dict() | {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}  # as checkpoints say it
    arch = read_architecture("tiny", values)
    assert arch.lookup_weights == 1000 * 32
    primes = 1009 + 1013 + 1019 + 1021  # rows of the four heads: the next primes, 8 columns each
    assert arch.total_weights - arch.lookup_weights == matrices(config) - primes * 8


# --- distinct experts


@pytest.mark.parametrize(("num_experts", "top_k", "batch"), [(256, 8, 1), (256, 8, 16), (64, 8, 5), (16, 2, 40)])
def test_distinct_experts_against_monte_carlo(num_experts: int, top_k: int, batch: int) -> None:
    draw = random.Random(0)
    trials = 2000
    counts = [
        len({expert for _ in range(batch) for expert in draw.sample(range(num_experts), top_k)}) for _ in range(trials)
    ]
    mean = sum(counts) / trials
    deviation = (sum((count - mean) ** 2 for count in counts) / trials / trials) ** 0.5
    assert distinct_experts(num_experts, top_k, batch) == pytest.approx(mean, abs=4 * deviation + 1e-9)


@given(num_experts=st.integers(1, 1024), batch=batches, data=st.data())
def test_distinct_experts_stay_between_their_limits(num_experts: int, batch: int, data) -> None:
    top_k = data.draw(st.integers(1, num_experts))
    found = distinct_experts(num_experts, top_k, batch)
    assert top_k * (1 - 1e-9) <= found <= min(num_experts, batch * top_k) * (1 + 1e-9)
    assert found <= distinct_experts(num_experts, top_k, batch + 1) * (1 + 1e-12)


# --- properties of the roofline


@given(arch=archs, hardware=lines, precision=precisions, batch=batches, context=contexts)
def test_more_work_is_never_faster(arch, hardware, precision, batch: int, context: int) -> None:
    seconds = decode_step(arch, precision, batch=batch, context=context).seconds(hardware)
    assert decode_step(arch, precision, batch=batch, context=context + 1).seconds(hardware) >= seconds
    assert decode_step(arch, precision, batch=batch + 1, context=context).seconds(hardware) > seconds
    assert decode_step(arch, precision, batch=batch, context=context).seconds(hardware.times(2)) < seconds


@given(arch=archs, hardware=lines, precision=precisions, batch=batches, context=contexts)
def test_a_larger_batch_never_lowers_tokens_per_second(arch, hardware, precision, batch: int, context: int) -> None:
    small, large = (decode_step(arch, precision, batch=b, context=context) for b in (batch, batch + 1))
    assert large.tokens_per_s(hardware) >= small.tokens_per_s(hardware) * (1 - 1e-12)


@given(arch=archs, hardware=lines, precision=st.sampled_from(FP4_PRECISIONS), batch=batches, context=contexts)
def test_speedup_at_equal_batch_has_a_ceiling(arch, hardware, precision, batch: int, context: int) -> None:
    ceiling = 16 / precision.weight_bits
    if precision is W4A4_KV4 and hardware.fp4_flops:
        ceiling = max(ceiling, hardware.fp4_flops / hardware.bf16_flops)
    assert 1 <= speedup(arch, hardware, precision, batch=batch, context=context) <= ceiling


@given(arch=archs, hardware=lines, batch=batches, context=contexts)
def test_shares_add_up(arch, hardware, batch: int, context: int) -> None:
    assert sum(decode_step(arch, BF16, batch=batch, context=context).shares(hardware).values()) == pytest.approx(1)


def test_a_component_takes_the_slower_of_memory_and_compute() -> None:
    hardware = B200.times(2)
    memory = Component("memory", num_bytes=1e9, flops=1.0)
    compute = Component("compute", num_bytes=1.0, flops=1e15, math="fp4")
    assert memory.seconds(hardware) == 1e9 / (2 * 8e12 * 0.8)
    assert compute.seconds(hardware) == 1e15 / (2 * 9e15 * 0.7)
    assert compute.seconds(H200) == 1e15 / (989e12 * 0.7)  # no FP4 units: the BF16 rate


def test_sparse_attention_reads_its_budget_but_stores_the_context() -> None:
    short, long = (decode_step(FLASH, BF16, batch=1, context=c).part("KV").num_bytes for c in (2048, 262144))
    index_keys = 12 * 2 * 128 * (262144 - 2048) / 4
    assert long - short == index_keys
    stored = FLASH.sequence_bytes(262144, BF16) - FLASH.sequence_bytes(2048, BF16)
    assert stored == (262144 - 2048) * 12 * (2 * 2 * 256 * 2 + 2 * 128 / 4)


# --- what fits, and where the gain ends


def test_largest_batch_is_the_last_that_fits() -> None:
    batch = largest_batch(QWEN35, B200, BF16, context=K128)
    assert batch == int((180e9 * 0.9 - QWEN35.weight_bytes(BF16)) // (K128 * 20480 + QWEN35.state_bytes)) == 33
    for fits in (batch, batch + 1):
        needed = QWEN35.weight_bytes(BF16) + fits * QWEN35.sequence_bytes(K128, BF16)
        assert (needed <= B200.capacity) == (fits == batch)


def test_nothing_fits_where_the_weights_do_not() -> None:
    arch = ARCHS["Qwen3.5-122B-A10B"]
    assert largest_batch(arch, H200, BF16, context=1) == 0
    assert at_capacity(arch, H200, W4A4_KV4, context=1024) is None
    assert devices_to_fit(arch, H200, BF16, context=K128) == 2


def test_capacity_raises_the_ratio_above_that_of_equal_batch() -> None:
    both = at_capacity(QWEN35, B200, W4A4_KV4, context=K128)
    assert both is not None and (both.batch_bf16, both.batch) == (33, 169)
    equal = speedup(QWEN35, B200, W4A4_KV4, batch=33, context=K128)
    assert equal < 16 / 4.5 < both.ratio


def test_the_memory_that_reaches_a_ratio_is_the_last_that_does() -> None:
    found = batch_for_ratio(QWEN35, B200, W4A4_KV4, context=K128, target=4.5, most=64)
    assert found is not None
    batch, memory = found

    def ratio_with(bf16_batch: int) -> float:
        room = QWEN35.weight_bytes(BF16) + bf16_batch * QWEN35.sequence_bytes(K128, BF16)
        fp4 = int((room - QWEN35.weight_bytes(W4A4_KV4)) // QWEN35.sequence_bytes(K128, W4A4_KV4))
        plain = decode_step(QWEN35, BF16, batch=bf16_batch, context=K128).tokens_per_s(B200)
        return decode_step(QWEN35, W4A4_KV4, batch=fp4, context=K128).tokens_per_s(B200) / plain

    assert ratio_with(batch) >= 4.5
    assert all(ratio_with(larger) < 4.5 for larger in range(batch + 1, 65))
    assert memory == QWEN35.weight_bytes(BF16) + batch * QWEN35.sequence_bytes(K128, BF16)
    assert batch_for_ratio(QWEN35, B200, W4A4_KV4, context=K128, target=1000.0, most=64) is None


@pytest.mark.parametrize("hardware", [B200, H200], ids=lambda line: line.name)
@pytest.mark.parametrize("precision", [BF16, W4A16, W4A4_KV4], ids=lambda precision: precision.name)
def test_compute_bound_batch_is_the_first(hardware, precision) -> None:
    batch = compute_bound_batch(QWEN35, hardware, precision, most=65536)
    assert batch is not None

    def bound(batch: int) -> bool:
        part = decode_step(QWEN35, precision, batch=batch, context=0).part("experts")
        return part.compute_seconds(hardware) >= part.memory_seconds(hardware)

    assert bound(batch) and not bound(batch - 1)
    assert compute_bound_batch(QWEN35, hardware, precision, most=batch - 1) is None


def test_weights_alone_stop_paying_where_bf16_units_are_the_limit() -> None:
    # Past the crossover the experts take the same time in both, so w4a16 gains less at 4x the crossover than before it.
    batch = compute_bound_batch(QWEN35, H200, W4A16, most=65536)
    assert speedup(QWEN35, H200, W4A16, batch=4 * batch, context=16) < speedup(
        QWEN35, H200, W4A16, batch=batch // 8, context=16
    )


def test_crossovers_are_where_they_say() -> None:
    batch = kv_bound_batch(QWEN35, W4A4_KV4, context=16384, most=65536)
    for at, dominates in ((batch, True), (batch // 2, False)):
        step = decode_step(QWEN35, W4A4_KV4, batch=at, context=16384)
        assert (step.part("KV").num_bytes > step.part("experts").num_bytes) == dominates
    fading = fading_batch(QWEN35, B200, W4A4_KV4, context=1024, below=2.0, most=65536)
    _, _, largest, best = speedup_range(QWEN35, B200, W4A4_KV4, context=1024, most=65536)
    assert largest > 2 and fading > best
    assert speedup(QWEN35, B200, W4A4_KV4, batch=fading, context=1024) < 2
    assert speedup(QWEN35, B200, W4A4_KV4, batch=fading // 2, context=1024) >= 2


# --- input that a user can get wrong


def test_unknown_hardware_is_refused() -> None:
    for name in ("A100", "B200x0", "B200xmany", ""):
        with pytest.raises(UserError, match="give one of B200, H200"):
            packaged_hardware(name)
    assert packaged_hardware("B200x8").devices == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": None}, "mixture-of-experts"),
        ({"moe_intermediate_size": None}, "no moe_intermediate_size"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
        ({"vocab_size": None}, "no vocab_size"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"sliding_window": 128}, "sliding-window"),
        ({"layer_types": ["mamba"] * 3 + ["full_attention"]}, "not modelled"),
        ({"layer_types": ["linear_attention"] * 3 + ["full_attention"]}, "no linear_num_key_heads"),
        (
            TINY_LINEAR | {"mamba_ssm_dtype": "int8", "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
            "int8",
        ),
    ],
)
def test_configs_the_model_would_get_wrong_are_refused(change: dict, message: str) -> None:
    config = {key: value for key, value in (TINY | change).items() if value is not None}
    with pytest.raises(UserError, match=message):
        read_architecture("tiny", config)


# --- the stage


def test_the_stage_predicts_a_model_of_ones_own(tmp_path, capsys) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY | {"model_type": "qwen3_moe"}))
    result = bench_model.run([config], ["H200x2"], tmp_path / "model.json", [])
    assert json.loads((tmp_path / "model.json").read_text())["kind"] == "prediction"
    (prediction,) = result["predictions"]
    assert prediction["devices"] == 2 and not prediction["fp4_units"]
    fp4 = prediction["precisions"][0]
    arch = read_architecture("tiny", TINY)
    cell = next(cell for cell in fp4["cells"] if cell["batch"] == 16 and cell["context"] == K128)
    assert cell["speedup"] == pytest.approx(speedup(arch, H200, W4A4_KV4, batch=16, context=K128))
    assert cell["fits"] and cell["fits_bf16"]
    printed = capsys.readouterr().out
    assert "PREDICTED" in printed and "no FP4 units" in printed and "3.56x" in printed
    assert result["host"] == {} and result["validation"] == []


def test_the_stage_prints_what_the_paper_reports(capsys) -> None:
    result = bench_model.run(None, ["B200"], None, [])
    assert [model["name"] for model in result["models"]] == list(ARCHS)
    assert result["paper_decode_speedup_128k"] == 5.4
    for prediction in result["predictions"]:
        equal = prediction["precisions"][0]["equal_batch_128k"]
        assert 1 < equal["smallest"] <= equal["largest"] < 16 / 4.5
    printed = capsys.readouterr().out
    assert "5.4x is out of reach" in printed
    assert "Qwen3.5-35B-A3B, 1 x B200: equal batch at most 3.15x" in printed


def test_unknown_hardware_stops_the_stage_before_anything_is_measured() -> None:
    with pytest.raises(UserError, match="A100"):
        bench_model.run(None, ["CPU", "A100"], None, [])


# --- measured points


SMALL = ExpertShape(num_experts=8, hidden=64, inter=32, top_k=2)


@pytest.fixture(scope="module")
def host():
    return measure_host(shape=SMALL, tokens=(1, 3), copy_bytes=2**20, rounds=2)


def test_host_points_are_predicted_from_the_measured_line(host) -> None:
    hardware = decode_validation.host_hardware(host)
    first, second = decode_validation.host_points(host)
    expected = expert_part(layers=1, num_experts=8, top_k=2, hidden=64, inter=32, batch=1, precision=BF16)
    assert first.predicted == pytest.approx(1e3 * expected.seconds(hardware))
    assert first.measured == pytest.approx(1e3 * host.experts_s[1]["median"])
    assert second.error_percent == pytest.approx(100 * (second.predicted - second.measured) / second.measured)


def test_the_timed_experts_compute_what_experts_compute() -> None:
    torch.manual_seed(0)
    gate_up, down = torch.randn(8, 64, 64), torch.randn(8, 64, 32)
    x = torch.randn(5, 64)
    routes = random_routes(random.Random(0), SMALL, tokens=5)
    assert sorted(token for rows in routes.values() for token in rows) == sorted(list(range(5)) * 2)
    expected = torch.zeros(5, 64, dtype=torch.float64)
    for expert, rows in routes.items():
        for token in rows:
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            expected[token] += down[expert].double() @ (gate / (1 + (-gate).exp()) * up)
    torch.testing.assert_close(expert_layer(x, routes, gate_up, down).double(), expected, rtol=1e-4, atol=1e-3)


def moe_row(precision: str, seconds: object, **more: object) -> dict:
    shape = {"num_experts": 64, "hidden": 2048, "inter": 768, "top_k": 8}
    return shape | {"tokens": 4, "precision": precision, "seconds": seconds} | more


def test_expert_rows_give_seconds_and_ratios(host, tmp_path) -> None:
    path = tmp_path / "moe.json"
    path.write_text(json.dumps({"rows": [moe_row("bf16", 0.04), moe_row("mxfp4", {"median": 0.02})]}))
    bf16, fp4, ratio = decode_validation.file_points(path, lambda threads: host)
    assert (bf16.measured, fp4.measured) == (40, 20)
    assert ratio.measured == 2
    assert ratio.predicted == pytest.approx(bf16.predicted / fp4.predicted)


def test_bytes_that_a_row_says_it_read_count(host, tmp_path) -> None:
    path = tmp_path / "moe.json"
    read = 1e12  # so many that memory decides on any host
    path.write_text(json.dumps({"rows": [moe_row("bf16", 1.0, weight_bytes_read=read)]}))
    (point,) = decode_validation.file_points(path, lambda threads: host)
    assert point.predicted == pytest.approx(1e3 * read / host.copy_bytes_per_s["median"])


def test_only_the_bf16_rows_of_a_rollout_count(host, tmp_path) -> None:
    run = tmp_path / "run"
    (run / "checkpoint").mkdir(parents=True)
    (run / "bench").mkdir()
    (run / "checkpoint" / "config.json").write_text(json.dumps(TINY))
    sizes = {"num_sequences": 8, "prompt_tokens": 160, "output_length": 64}
    rows = [sizes | {"mode": mode, "tokens_per_s": {"median": 100.0}} for mode in ("bf16", "fp4", "fp4 + full")]
    path = run / "bench" / "rollout.json"
    path.write_text(json.dumps({"rows": rows, "environment": {"threads": 1}}))
    (point,) = decode_validation.file_points(path, lambda threads: host)
    step = decode_step(read_architecture("tiny", TINY), BF16, batch=8, context=20 + 32)
    assert point.predicted == pytest.approx(step.tokens_per_s(decode_validation.host_hardware(host)))
    (run / "checkpoint" / "config.json").unlink()
    with pytest.raises(UserError, match="inside its run's folder"):
        decode_validation.file_points(path, lambda threads: host)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"rows": []}, "bench moe"),
        ({"rows": [{"x": 1}]}, "bench moe"),
        ({"rows": [moe_row("int4", 1.0)]}, "int4"),
        ({"rows": [moe_row("bf16", 0.0)]}, "more than 0"),
        ({"rows": [{key: v for key, v in moe_row("bf16", 1.0).items() if key != "hidden"}]}, "hidden"),
    ],
)
def test_files_without_points_are_refused(content: dict, message: str, host, tmp_path) -> None:
    path = tmp_path / "points.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        decode_validation.file_points(path, lambda threads: host)


def test_the_arithmetic_needs_no_tensors(repository) -> None:
    allowed = {"collections.abc", "dataclasses", "typing", "trace_rl.stages.decode_model"}
    for name in ("decode_model", "decode_limits"):
        text = (repository / f"trace/stages/{name}.py").read_text()
        imported = {line.split()[1] for line in text.splitlines() if line.startswith(("import ", "from "))}
        assert imported <= allowed, name
