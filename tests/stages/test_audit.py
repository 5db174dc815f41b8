"""The scope audit observes formats; every way of quantizing the wrong tensor, or not the right one, is named."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from trace_rl import formats
from trace_rl.config.quant import BF16, QuantSpec
from trace_rl.formats.static_scales import StaticScales
from trace_rl.models.export import export_packed
from trace_rl.models.observed_formats import on_fp4_grid, on_grid, quantized_weight, resident_formats
from trace_rl.models.scopes import expected_format
from trace_rl.qat.attach import attach
from trace_rl.rollout.engine import open_engine
from trace_rl.stages import audit
from trace_rl.stages.failure import StageFailure

QUANT = QuantSpec()
ROUTERS = [f"model.layers.{layer}.mlp.gate.weight" for layer in range(3)]


def careless(name: str) -> bool:
    """The commonest fault: `mlp.gate` was meant for dense MLPs' gate_proj and catches the router."""
    return re.search(r"mlp\.gate|mlp\.experts", name) is not None


def differing(rows: list[dict[str, str]], column: str) -> dict[str, str]:
    return {row["name"]: row[column] for row in rows if row[column] != row["expected"]}


def table(reference, **columns) -> list[dict[str, str]]:
    """An audit table in which the columns not given are as they should be."""
    names = next(iter(columns.values()))
    right = {name: expected_format(name, quant=QUANT) for name in names}
    return audit.audit_table(quant=QUANT, **({"trainer": right, "engine": right, "export": right} | columns))


@pytest.fixture(scope="module")
def reference(tiny_run):
    return audit.reference_tensors(tiny_run.paths.checkpoint)


@pytest.fixture(scope="module")
def scales(tiny_run):
    return StaticScales.load(tiny_run.paths.scales)


def test_the_audit_of_the_shipped_code_is_empty(tiny_run):
    metrics = audit.run(tiny_run.config, tiny_run.paths)
    assert metrics["passed"]
    assert metrics["differences"] == []
    rows = {row["name"]: row for row in json.loads(tiny_run.paths.audit("nvfp4").read_text())["rows"]}
    # Per layer: gate_up, down, two expert inputs, K, V; everything else is BF16 and was really looked at.
    assert sum(row["trainer"] == "nvfp4" for row in rows.values()) == 3 * 6 == metrics["num_fp4"]
    assert {row["engine"] for row in rows.values()} == {"nvfp4", "bf16"}
    assert rows["model.layers.1.mlp.gate.weight"] == {
        "name": "model.layers.1.mlp.gate.weight",
        **dict.fromkeys(audit.COLUMNS, "bf16"),
    }
    assert rows["model.layers.2.self_attn.k_cache"]["engine"] == "nvfp4"


def test_a_router_quantized_in_the_trainer_is_named(tiny_run, reference, scales):
    model = AutoModelForCausalLM.from_pretrained(tiny_run.paths.checkpoint, dtype=torch.bfloat16).eval()
    qat = attach(model, quant=QUANT, scales=scales)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if careless(name) and "experts" not in name:
                parameter.copy_(quantized_weight(parameter, format_name="nvfp4"))
    found = audit.observe_trainer(model, qat, reference=reference, quant=QUANT)
    assert differing(table(reference, trainer=found), "trainer") == dict.fromkeys(ROUTERS, "nvfp4")


def test_a_router_quantized_on_the_fly_is_named(tiny_run, reference, scales):
    """As fake quantization does it: the parameter stays BF16, the product uses another tensor."""
    model = AutoModelForCausalLM.from_pretrained(tiny_run.paths.checkpoint, dtype=torch.bfloat16).eval()
    qat = attach(model, quant=QUANT, scales=scales)
    router = model.model.layers[1].mlp.gate
    stored = router.weight.data

    def swap(module, args):
        module.weight.data = quantized_weight(stored, format_name="nvfp4")

    def restore(module, args, output):
        module.weight.data = stored

    router.register_forward_pre_hook(swap)
    router.register_forward_hook(restore)
    found = audit.observe_trainer(model, qat, reference=reference, quant=QUANT)
    assert differing(table(reference, trainer=found), "trainer") == {ROUTERS[1]: "nvfp4"}


def test_a_router_quantized_in_the_engine_is_named(tiny_run, reference, scales):
    engine = open_engine(tiny_run.paths.checkpoint, quant=QUANT, scales=scales, config=tiny_run.config.engine)
    careless_policy = {
        name: quantized_weight(tensor, format_name="nvfp4") if name in ROUTERS else tensor
        for name, tensor in reference.items()
    }
    engine.load_policy(careless_policy.items(), 1)
    found = audit.observe_torch_engine(engine, reference=reference)
    assert differing(table(reference, engine=found), "engine") == dict.fromkeys(ROUTERS, "nvfp4")


def test_a_router_quantized_in_the_export_is_named(tiny_run, reference, scales, tmp_path):
    export_packed(tiny_run.paths.checkpoint, target=tmp_path, quant=QUANT, scales=scales, select=careless)
    found = audit.export_formats(tmp_path, reference=reference)
    rows = table(reference, export=found)
    assert differing(rows, "export") == dict.fromkeys(ROUTERS, "nvfp4")
    assert ROUTERS[0] in audit.row_table(rows)


@pytest.mark.parametrize("left_out", ["weights", "activations", "kv"])
def test_a_scope_left_in_bf16_is_named(tiny_run, reference, scales, left_out):
    partial = QUANT.model_copy(update={left_out: False})
    model = AutoModelForCausalLM.from_pretrained(tiny_run.paths.checkpoint, dtype=torch.bfloat16).eval()
    found = audit.observe_trainer(model, attach(model, quant=partial, scales=scales), reference=reference, quant=QUANT)
    missed = differing(table(reference, trainer=found), "trainer")
    suffixes = {"weights": {"gate_up_proj", "down_proj"}, "activations": {"fc1_input", "fc2_input"},
                "kv": {"k_cache", "v_cache"}}[left_out]  # fmt: skip
    assert {name.rpartition(".")[2] for name in missed} == suffixes
    assert len(missed) == 6
    assert set(missed.values()) == {"bf16"}


def test_a_difference_fails_with_the_rows(tiny_run, reference, scales, policy_factory, tmp_path):
    """The engine runs another policy than the trainer: none of its matrices is in the checkpoint."""
    other = policy_factory(tmp_path / "other", seed=5)
    found = audit.engine_formats(other, reference=reference, quant=QUANT, scales=scales, config=tiny_run.config.engine)
    rows = table(reference, engine=found)
    with pytest.raises(StageFailure, match=r"scope audit: \d+ of \d+ tensors differ") as failure:
        audit.require_agreement(rows)
    assert re.search(r"model\.layers\.0\.self_attn\.q_proj\.weight +bf16 +bf16 +unknown +bf16", str(failure.value))
    audit.require_agreement([row for row in rows if row["engine"] == row["expected"]])


def test_a_tied_head_is_one_tensor_with_the_embedding(policy_factory, scales, tiny_run, tmp_path):
    policy = policy_factory(tmp_path / "tied")
    config = json.loads((policy / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = load_file(policy / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, policy / "model.safetensors", metadata={"format": "pt"})
    tied = audit.reference_tensors(policy)
    target = tmp_path / "export"
    target.mkdir()
    export_packed(policy, target=target, quant=QUANT, scales=scales)
    rows = audit.audit_table(
        quant=QUANT,
        trainer=audit.trainer_formats(policy, reference=tied, quant=QUANT, scales=scales),
        engine=audit.engine_formats(policy, reference=tied, quant=QUANT, scales=scales, config=tiny_run.config.engine),
        export=audit.export_formats(target, reference=tied),
    )
    audit.require_agreement(rows)
    assert "lm_head.weight" not in {row["name"] for row in rows}


@pytest.mark.parametrize(
    ("name", "fp4"),
    [
        ("model.layers.3.mlp.experts.gate_up_proj", True),
        ("model.layers.3.mlp.experts.12.down_proj.weight", True),
        ("model.layers.3.block_sparse_moe.experts.0.w2.weight", True),
        ("model.layers.3.mlp.gate.weight", False),
        ("model.layers.3.mlp.gate_proj.weight", False),
        ("model.layers.3.mlp.shared_expert.gate_proj.weight", False),
        ("model.layers.3.mlp.shared_experts.down_proj.weight", False),
        ("model.layers.3.mlp.shared_expert_gate.weight", False),
        ("model.layers.3.self_attn.k_proj.weight", False),
        ("model.layers.3.self_attn.k_cache", True),
        ("lm_head.weight", False),
    ],
)
def test_the_rule_on_names(name, fp4):
    assert (expected_format(name, quant=QUANT) == "nvfp4") is fp4
    assert expected_format(name, quant=BF16) == "bf16"


@pytest.mark.parametrize("format_name", ["nvfp4", "mxfp4", "fouroversix"])
def test_the_grid_tells_fp4_from_bf16(format_name):
    fmt = formats.get(format_name)
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert on_fp4_grid(x, block_size=fmt.block_size) == 0.0
    assert on_fp4_grid(fmt.fake_quant(x, 60.0).bfloat16(), block_size=fmt.block_size) == 1.0
    assert on_fp4_grid(torch.zeros(4, 64), block_size=fmt.block_size) == 0.0


@pytest.mark.parametrize("format_name", ["mxfp8", "hif4"])
def test_the_grids_of_other_formats_are_told_from_bf16(format_name):
    fmt = formats.get(format_name)
    x = (torch.randn(64, 128, generator=torch.Generator().manual_seed(0)) ** 3).bfloat16()
    assert on_grid(x, format_name=format_name) == 0.0
    assert on_grid(fmt.fake_quant(x).bfloat16(), format_name=format_name) == 1.0
    assert on_grid(formats.get("mxfp4").fake_quant(x.roll(5, dims=1)).bfloat16(), format_name="hif4") < 0.5
    assert on_grid(torch.zeros(4, 64).bfloat16(), format_name=format_name) == 0.0


def test_merged_and_reordered_parameters_are_found_by_their_rows():
    generator = torch.Generator().manual_seed(1)
    q, k, router = (torch.randn(rows, 32, generator=generator).bfloat16() for rows in (32, 16, 4))
    experts = torch.randn(4, 32, 32, generator=generator).bfloat16()
    reference = {
        "model.layers.0.self_attn.q_proj.weight": q,
        "model.layers.0.self_attn.k_proj.weight": k,
        "model.layers.0.mlp.gate.weight": router,
        "model.layers.0.mlp.experts.gate_up_proj": experts,
    }
    resident = [
        ("model.layers.0.self_attn.qkv_proj.weight", torch.cat([k, q])),
        ("model.layers.0.mlp.gate.weight", quantized_weight(router, format_name="nvfp4")),
        ("model.layers.0.mlp.experts.w13_weight", quantized_weight(experts, format_name="nvfp4").flip(1)),
    ]
    assert resident_formats(resident, reference=reference, format_name="nvfp4") == {
        "model.layers.0.self_attn.q_proj.weight": "bf16",
        "model.layers.0.self_attn.k_proj.weight": "bf16",
        "model.layers.0.mlp.gate.weight": "nvfp4",
        "model.layers.0.mlp.experts.gate_up_proj": "nvfp4",
    }
    elsewhere = [(name.replace("layers.0", "layers.1"), tensor) for name, tensor in resident]
    assert set(resident_formats(elsewhere, reference=reference, format_name="nvfp4").values()) == {"unknown"}
