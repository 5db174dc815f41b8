"""The `trace` experts and attention functions against the stock Hugging Face implementations, forward and backward."""

import copy

import pytest
import torch
from transformers import (
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from trace_rl.config.quant import BF16, QuantSpec
from trace_rl.errors import UserError
from trace_rl.formats.static_scales import StaticScales
from trace_rl.models.families import cast_parameters, family_of, moe_layers, quantized_parameters
from trace_rl.qat.attach import attach
from trace_rl.qat.attention import attend
from trace_rl.qat.experts import Dispatch
from trace_rl.qat.norms import RMSNorm

COMMON = {
    "vocab_size": 40,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "eos_token_id": 1,
}


EXPERTS = {"num_experts": 8, "moe_intermediate_size": 32}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 32}
HYBRID = SHARED | {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
FAMILIES = {
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, EXPERTS | {"head_dim": 16, "norm_topk_prob": True}),
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 8, "intermediate_size": 32, "head_dim": 16}),
    "olmoe": (OlmoeForCausalLM, OlmoeConfig, {"num_experts": 8, "intermediate_size": 32, "norm_topk_prob": False}),
    "qwen2_moe": (Qwen2MoeForCausalLM, Qwen2MoeConfig, SHARED),
    "granitemoe": (GraniteMoeForCausalLM, GraniteMoeConfig, {"num_local_experts": 8, "intermediate_size": 32}),
    "qwen3_next": (Qwen3NextForCausalLM, Qwen3NextConfig, HYBRID),
    "qwen3_5_moe": (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, HYBRID),
}


def build(family: str, dtype=torch.float32):
    torch.manual_seed(0)
    model_class, config_class, extra = FAMILIES[family]
    return cast_parameters(model_class(config_class(**COMMON | extra)), dtype).eval()


def scales(num_layers: int = 2) -> StaticScales:
    one = dict.fromkeys(range(num_layers), 64.0)
    return StaticScales(fc1=one, fc2=one, k=one, v=one)


def batch():
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 40, (5, 16), generator=g)
    mask = torch.ones(5, 16, dtype=torch.int64)
    mask[1, 9:] = 0
    mask[3, 4:] = 0
    return ids, mask


@pytest.mark.parametrize("family", FAMILIES)
def test_off_mode_equals_stock_eager(family):
    stock, ours = build(family), build(family)
    stock.set_attn_implementation("eager")
    stock.set_experts_implementation("eager")
    qat = attach(ours, quant=BF16)
    ids, mask = batch()
    expected = stock(input_ids=ids, attention_mask=mask, use_cache=False).logits
    with qat.forward(mode="off"):
        got = ours(input_ids=ids, attention_mask=mask, use_cache=False).logits
    keep = mask.bool()
    torch.testing.assert_close(got[keep], expected[keep], rtol=2e-4, atol=2e-4)
    expected[keep].pow(2).sum().backward()
    got[keep].pow(2).sum().backward()
    grads = dict(stock.named_parameters())
    for name, p in ours.named_parameters():
        reference = grads[name].grad
        torch.testing.assert_close(p.grad, reference, rtol=2e-3, atol=2e-4 * float(reference.abs().max()) + 1e-6)


def test_bfloat16_off_mode_stays_within_rounding_noise():
    stock, ours = build("qwen3_moe", torch.bfloat16), build("qwen3_moe", torch.bfloat16)
    stock.set_attn_implementation("eager")
    stock.set_experts_implementation("eager")
    qat = attach(ours, quant=BF16)
    ids, mask = batch()
    with torch.no_grad(), qat.forward(mode="off"):
        got = ours(input_ids=ids, attention_mask=mask, use_cache=False).logits.float().log_softmax(-1)
        expected = stock(input_ids=ids, attention_mask=mask, use_cache=False).logits.float().log_softmax(-1)
    assert (got - expected)[mask.bool()].abs().mean() < 0.03


@pytest.mark.parametrize("family", FAMILIES)
def test_replaying_the_live_choice_changes_nothing(family):
    model = build(family)
    qat = attach(model, quant=BF16)
    ids, mask = batch()
    chosen = []
    for moe in moe_layers(model):
        moe.experts.register_forward_pre_hook(lambda _, args: chosen.append(args[1]))
    with torch.no_grad(), qat.forward(mode="off"):
        live = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    recorded = torch.stack(chosen, dim=1).view(*ids.shape, len(chosen), -1).to(torch.int16)
    with torch.no_grad(), qat.forward(mode="off", expert_ids=recorded, valid=mask.bool()):
        replayed = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(replayed[mask.bool()], live[mask.bool()], rtol=1e-4, atol=1e-4)
    assert qat.replayed_fraction == 1.0


@pytest.mark.parametrize("family", FAMILIES)
def test_replacing_norms_leaves_parameters_and_their_names_as_they_were(family):
    model = build(family, torch.bfloat16)
    stock = family_of(model.config).norm_class
    parameters, state = dict(model.named_parameters()), list(model.state_dict())
    replaced = [name for name, module in model.named_modules() if type(module).__name__ == stock]
    attach(model, quant=BF16)
    attach(model, quant=BF16)  # the second time there is nothing to replace
    assert list(model.state_dict()) == state
    now = dict(model.named_parameters())
    assert list(now) == list(parameters) and all(now[name] is parameter for name, parameter in parameters.items())
    assert [name for name, module in model.named_modules() if isinstance(module, RMSNorm)] == replaced
    # Families that multiply by 1 + weight keep their own class.
    assert bool(replaced) == (family not in ("qwen3_next", "qwen3_5_moe"))


def test_attention_masks_as_with_minus_infinity_and_padding_stays_finite():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((2, heads, 5, 8), generator=generator).requires_grad_() for heads in (4, 2, 2))
    mask = torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 1, 5, 5).clone()
    mask[1, :, :, :2] = False  # the second sequence begins with two padded positions
    given = mask.clone()
    out = attend(q, k, v, mask=mask, scaling=0.3)
    assert torch.equal(mask, given) and out.isfinite().all()

    wide = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    scores = 0.3 * wide[0] @ wide[1].repeat_interleave(2, dim=1).mT
    probs = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    expected = (probs @ wide[2].repeat_interleave(2, dim=1)).transpose(1, 2)
    read = mask.any(-1)[:, 0]  # [B, T]: not the rows of pure padding
    torch.testing.assert_close(out[read].double(), expected[read], rtol=1e-5, atol=1e-6)
    weight = torch.randn(out.shape, generator=generator)
    (out * weight)[read].sum().backward()
    (probs.nan_to_num() @ wide[2].repeat_interleave(2, dim=1)).transpose(1, 2)[read].mul(
        weight[read].double()
    ).sum().backward()
    for tensor, reference in zip((q, k, v), wide, strict=True):
        torch.testing.assert_close(tensor.grad.double(), reference.grad.nan_to_num(), rtol=1e-4, atol=1e-6)
        assert not tensor.grad[1, :, :2].any()


def test_dispatch_places_every_pair_in_its_experts_rows():
    ids = torch.tensor([[0, 3], [3, 1], [3, 0], [3, 1]])
    plan = Dispatch.plan(ids, num_experts=5)
    assert plan.ends.tolist() == [16, 32, 32, 48, 48]
    starts = [0, 16, 32, 32, 48]
    for pair, expert in enumerate(ids.reshape(-1).tolist()):
        row = int(plan.slot[pair])
        assert starts[expert] <= row < int(plan.ends[expert])
        assert int(plan.pair[row]) == pair
    assert int((plan.pair == ids.numel()).sum()) == 48 - ids.numel()


def test_idle_experts_get_zero_gradient_not_garbage():
    model = build("qwen3_moe")
    qat = attach(model, quant=QuantSpec(), scales=scales())
    ids = torch.zeros(1, 1, 1, 2, dtype=torch.int16) + torch.tensor([0, 1], dtype=torch.int16)
    ids = ids.expand(1, 3, 2, 2)
    with qat.forward(mode="rtn", expert_ids=ids, valid=torch.ones(1, 3, dtype=torch.bool)):
        model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False).logits.sum().backward()
    grad = model.model.layers[0].mlp.experts.gate_up_proj.grad
    assert bool((grad[2:] == 0).all())
    assert bool((grad[:2] != 0).any())


def test_calls_outside_a_forward_block_are_refused():
    model = build("qwen3_moe")
    qat = attach(model, quant=BF16)
    with pytest.raises(UserError, match="inside"):
        model(input_ids=torch.tensor([[1, 2]]))
    with qat.forward(mode="off"), pytest.raises(UserError, match="already active"):
        with qat.forward(mode="off"):
            pass


def test_deep_copies_have_their_own_handle():
    model = build("qwen3_moe")
    attach(model, quant=QuantSpec(), scales=scales())
    twin = copy.deepcopy(model)
    assert twin.trace_qat is not model.trace_qat
    assert twin.model.layers[0].mlp.experts.trace_qat is twin.trace_qat
    with twin.trace_qat.forward(mode="rtn"):
        twin(input_ids=torch.tensor([[1, 2]]))


def test_unknown_families_missing_scales_and_bad_dimensions_are_named():
    model = build("qwen3_moe")
    with pytest.raises(UserError, match="calibrate"):
        attach(model, quant=QuantSpec())
    with pytest.raises(UserError, match=r"layers \[1\]"):
        attach(model, quant=QuantSpec(), scales=scales(1))
    model.config.model_type = "no_such_moe"
    with pytest.raises(UserError, match="no_such_moe"):
        family_of(model.config)
    narrow = OlmoeForCausalLM(OlmoeConfig(**{**COMMON, "hidden_size": 72}, num_experts=4, intermediate_size=32))
    with pytest.raises(UserError, match="72 is not a multiple"):
        attach(narrow, quant=QuantSpec(kv=False), scales=scales())
    with pytest.raises(UserError, match="the format of kv; set format.kv: nvfp4"):
        attach(build("qwen3_moe"), quant=QuantSpec(format={"kv": "hif4"}), scales=scales())
    with pytest.raises(UserError, match="finished policy"):
        attach(build("qwen3_moe"), quant=QuantSpec(format="hscale"), scales=scales())


def test_rounded_rotary_frequencies_are_refused():
    with pytest.raises(UserError, match="inv_freq"):
        attach(build("qwen3_moe").to(torch.bfloat16), quant=BF16)


def test_weight_scope_names_routed_experts_only():
    names = quantized_parameters(build("mixtral"))
    assert names[0] == "model.layers.0.mlp.experts.gate_up_proj"
    assert len(names) == 4
