"""Gradients: identity through every quantizer, and through replayed routing to the live router."""

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from trace_rl.config.guidance import GuidanceSpec
from trace_rl.config.quant import BF16, QuantSpec
from trace_rl.formats.static_scales import StaticScales
from trace_rl.guidance.record import RecordLayout
from trace_rl.models.families import cast_parameters
from trace_rl.qat.attach import attach
from trace_rl.qat.routing_replay import gate_values
from trace_rl.qat.straight_through import straight_through


def build(*, norm_topk_prob=True, dtype=torch.float32):
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=24,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        max_position_embeddings=64,
        norm_topk_prob=norm_topk_prob,
        initializer_range=0.3,
        eos_token_id=1,
    )
    return cast_parameters(Qwen3MoeForCausalLM(config), dtype)


def scales() -> StaticScales:
    one = dict.fromkeys(range(2), 50.0)
    return StaticScales(fc1=one, fc2=one, k=one, v=one)


def test_straight_through_uses_xhat_and_passes_the_gradient():
    x = torch.randn(4, 16, requires_grad=True)
    xhat = torch.zeros(4, 16)
    y = straight_through(x, xhat)
    assert torch.equal(y, xhat)
    weight = torch.randn(4, 16)
    (y * weight).sum().backward()
    assert torch.equal(x.grad, weight)


@pytest.mark.parametrize("mode", ["rtn", "guided"])
def test_quantizers_pass_gradients_unchanged_even_where_they_saturate(mode):
    model = build()
    qat = attach(model, quant=QuantSpec(), scales=scales())
    layout = RecordLayout.build(GuidanceSpec(layers="all"), qat.dims)
    g = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 127, (1, 6, layout.row_bytes), generator=g, dtype=torch.uint8)
    valid = torch.tensor([[True] * 5 + [False]])
    kwargs = {"guidance": (rows, layout), "valid": valid} if mode == "guided" else {}
    x = (torch.randn(6, 32, generator=g) * 100).requires_grad_()
    with qat.forward(mode=mode, **kwargs):
        y = qat.quantize(x, layer=1, tensor="fc1")
    assert not torch.equal(y, x)
    upstream = torch.randn(6, 32, generator=g)
    (y * upstream).sum().backward()
    assert torch.equal(x.grad, upstream)


def test_weight_gradient_is_that_of_the_quantized_weight():
    model = build()
    quant = QuantSpec(activations=False, kv=False)
    qat = attach(model, quant=quant)
    ids = torch.tensor([[3, 4, 5, 6]])
    with qat.forward(mode="rtn"):
        logits = model(input_ids=ids, use_cache=False).logits
    logits.pow(2).sum().backward()
    twin = build()
    off = attach(twin, quant=BF16)
    with torch.no_grad():
        for layer in twin.model.layers:
            for p in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
                p.copy_(qat.fake_quant_weight(p))
    with off.forward(mode="off"):
        expected = twin(input_ids=ids, use_cache=False).logits
    assert torch.equal(logits, expected)
    expected.pow(2).sum().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_cached_weights_follow_the_parameter():
    model = build()
    qat = attach(model, quant=QuantSpec(), scales=scales())
    ids = torch.tensor([[3, 4, 5]])

    def logits():
        with torch.no_grad(), qat.forward(mode="rtn"):
            return model(input_ids=ids, use_cache=False).logits

    before = logits()
    assert torch.equal(before, logits())
    torch.optim.SGD([model.model.layers[1].mlp.experts.down_proj], lr=1.0)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj.mul_(-1.5)
    changed = logits()
    assert not torch.equal(before, changed)
    model.model.layers[1].mlp.experts.down_proj.data.mul_(2.0)
    qat.invalidate_weights()
    assert not torch.equal(changed, logits())


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_replayed_routing_reaches_the_router_as_computed_by_hand(norm_topk_prob):
    model = build(norm_topk_prob=norm_topk_prob)
    qat = attach(model, quant=BF16)
    router = model.model.layers[0].mlp.gate
    g = torch.Generator().manual_seed(2)
    x = torch.randn(5, 32, generator=g)
    ids = torch.tensor([[0, 3], [1, 2], [3, 1], [2, 0], [0, 1]])
    recorded = ids.view(1, 5, 1, 2).expand(1, 5, 2, 2)
    upstream = torch.randn(5, 2, generator=g)
    with qat.forward(mode="off", expert_ids=recorded, valid=torch.ones(1, 5, dtype=torch.bool)) as state:
        _, weights, chosen = router(x)
        state.replayed_layers.update({0, 1})
    assert torch.equal(chosen, ids)
    (weights * upstream).sum().backward()
    logits = (x @ router.weight.detach().T).requires_grad_()
    probs = torch.softmax(logits, dim=-1).gather(1, ids)
    expected = probs / probs.sum(-1, keepdim=True) if norm_topk_prob else probs
    torch.testing.assert_close(weights, expected)
    (expected * upstream).sum().backward()
    torch.testing.assert_close(router.weight.grad, logits.grad.T @ x, rtol=1e-4, atol=1e-5)


def test_gate_values_of_the_live_choice_equal_the_routers_own():
    logits = torch.randn(7, 8)
    values, ids = torch.softmax(logits, -1).topk(3)
    torch.testing.assert_close(gate_values(logits, ids, renormalizes=False), values)
    torch.testing.assert_close(gate_values(logits, ids, renormalizes=True), values / values.sum(-1, keepdim=True))


def test_guided_training_step_moves_every_scope():
    model = build(dtype=torch.bfloat16)
    qat = attach(model, quant=QuantSpec(), scales=scales())
    layout = RecordLayout.build(GuidanceSpec(layers="all"), qat.dims)
    rows = torch.randint(0, 120, (2, 8, layout.row_bytes), dtype=torch.uint8)
    valid = torch.ones(2, 8, dtype=torch.bool)
    valid[:, -1] = False
    with qat.forward(mode="guided", guidance=(rows, layout), valid=valid):
        model(input_ids=torch.randint(2, 24, (2, 8)), use_cache=False).logits.float().logsumexp(-1).sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert bool(torch.isfinite(p.grad).all()), name
