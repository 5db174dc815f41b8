"""The routed experts' operator, forward and backward, against float64 with derived bounds and the composed version.

The bounds follow every rounding that the definition makes (trace_rl/kernels/experts.py): BF16 after each product, after
SiLU and after the gate, FP32 sums in any order. They are rigorous, hence loose; so the operator's distance from float64
is also compared with that of the composition of PyTorch operations, which rounds in the same places.

Legend: N tokens, K experts per token, P = N*K pairs, E experts, H hidden, I expert width.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, silu
from triton_interpret.cases import FORMATS, same

from trace_rl import formats
from trace_rl.config.quant import QuantSpec
from trace_rl.errors import UserError
from trace_rl.formats.static_scales import StaticScales
from trace_rl.kernels import compiled, experts, reference
from trace_rl.kernels.dispatch import VARIABLE
from trace_rl.kernels.experts import ExpertMatrices, routed_experts, routed_experts_with_gradient
from trace_rl.models.families import cast_parameters
from trace_rl.models.miniature import build_model, miniature_config
from trace_rl.models.observed_formats import activation_format
from trace_rl.models.operands import operand_tap, storage_values
from trace_rl.models.tokenizer import build_tokenizer
from trace_rl.qat.attach import attach
from trace_rl.qat.experts import Dispatch, _Gather, _Scatter

if reason := compiled.why_not():
    pytest.skip(f"no compiled kernels here: {reason}", allow_module_level=True)

needs_bf16 = pytest.mark.skipif(
    not compiled.operator().experts_supported(), reason="oneDNN has no BF16 products for this processor"
)

BF16_HALF_ULP = 2.0**-8  # relative to the value; its significand has 8 bits
FP32_ULP = 2.0**-23
ELEMENTARY = 16 * FP32_ULP  # exp, a division and a few products in FP32
TINY = 1e-35  # where e^x leaves FP32's range, sigmoid is only known to be this small
FC2_SCALE = 700.0


@dataclass(frozen=True)
class Case:
    """One layer and its tokens; `grad` is the gradient of the output."""

    x: Tensor
    weights: Tensor
    ids: Tensor
    gate_up: Tensor
    down: Tensor
    grad: Tensor

    @property
    def num_experts(self) -> int:
        return len(self.down)

    @property
    def order(self) -> Tensor:
        """Pair of each row of the operator's hidden vectors: sorted by expert, pairs of one expert in their order."""
        return self.ids.reshape(-1).long().argsort(stable=True)


def make(
    num_tokens: int,
    *,
    top_k: int = 2,
    num_experts: int = 8,
    hidden: int = 64,
    width: int = 32,
    routing: str = "spread",
    gate_dtype: torch.dtype = torch.bfloat16,
    size: float = 1.0,
) -> Case:
    """routing: spread | unused (the first and last expert idle) | one (all tokens to one expert, top_k 1)."""
    generator = torch.Generator().manual_seed(num_tokens + hidden)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    if routing == "one":
        ids = torch.full((num_tokens, 1), num_experts - 2)
    else:
        idle = int(routing == "unused")
        order = torch.rand((num_tokens, num_experts - 2 * idle), generator=generator).argsort(dim=1)
        ids = order[:, :top_k] + idle
    return Case(
        x=(normal(num_tokens, hidden) * size).bfloat16(),
        weights=torch.rand(ids.shape, generator=generator).to(gate_dtype),
        ids=ids,
        gate_up=(normal(num_experts, 2 * width, hidden) * hidden**-0.5).bfloat16(),
        down=(normal(num_experts, hidden, width) * width**-0.5).bfloat16(),
        grad=normal(num_tokens, hidden).bfloat16(),
    )


CASES = {
    "one token": {"num_tokens": 1},
    "seven": {"num_tokens": 7, "gate_dtype": torch.float32},
    "many": {"num_tokens": 128},
    "many, FP32 gate values": {"num_tokens": 128, "gate_dtype": torch.float32, "top_k": 4},
    "unused experts": {"num_tokens": 37, "routing": "unused"},
    "one expert, a half tile": {"num_tokens": 16, "routing": "one"},
    "one expert, a tile and one": {"num_tokens": 33, "routing": "one", "gate_dtype": torch.float32},
    "one expert, four tiles": {"num_tokens": 128, "routing": "one"},
    "other sizes": {"num_tokens": 50, "hidden": 96, "width": 160, "num_experts": 5, "top_k": 3},
    "small sizes": {"num_tokens": 40, "hidden": 32, "width": 64, "num_experts": 4, "top_k": 4},
    "saturated gates": {"num_tokens": 40, "size": 40.0, "gate_dtype": torch.float32},
}
ROUNDINGS = {"bf16": None, "nvfp4": FORMATS["nvfp4"], "mxfp4": FORMATS["rceil"]}


# The two ways to compute ----------------------------------------------------------------------------------------------


class StraightThrough(torch.autograd.Function):
    """Rounding to the format whose gradient is the identity."""

    @staticmethod
    def forward(ctx, hidden, fmt):
        return reference.fake_quant(hidden, FC2_SCALE, fmt=fmt)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def composed(x, weights, gate_up, down, case, fmt):
    """What trace_rl.qat.experts does without the operator."""
    dispatch = Dispatch.plan(case.ids, num_experts=case.num_experts)
    both = grouped_mm(_Scatter.apply(x, dispatch), gate_up.transpose(1, 2), offs=dispatch.ends)
    gate, up = both.chunk(2, dim=-1)
    hidden = silu(gate) * up
    if fmt is not None:
        hidden = StraightThrough.apply(hidden, fmt)
    return _Gather.apply(grouped_mm(hidden, down.transpose(1, 2), offs=dispatch.ends), weights, dispatch)


def operator(x, weights, gate_up, down, case, fmt):
    matrices = ExpertMatrices.pack(gate_up, down, backward=True)
    return routed_experts_with_gradient(
        x, weights, gate_up, down, case.ids, matrices, fmt=fmt, fc2_scale=FC2_SCALE if fmt else 1.0
    )


NAMES = ("out", "x", "weights", "gate_up", "down")


def results(function, case, fmt) -> dict[str, Tensor]:
    """Output and four gradients."""
    leaves = [t.clone().requires_grad_() for t in (case.x, case.weights, case.gate_up, case.down)]
    out = function(*leaves, case, fmt)
    out.backward(case.grad)
    return dict(zip(NAMES, (out.detach(), *(leaf.grad for leaf in leaves)), strict=True))


def hidden_vectors(case, fmt) -> Tensor:
    """FC2 inputs of the operator [P, I], in the order of the pairs."""
    seen = []
    with experts.observed(lambda *operands: seen.append(operands[2])):
        matrices = ExpertMatrices.pack(case.gate_up, case.down, backward=False)
        routed_experts(case.x, case.weights, case.ids, matrices, fmt=fmt, fc2_scale=FC2_SCALE if fmt else 1.0)
    hidden = torch.empty_like(seen[0])
    hidden[case.order] = seen[0]
    return hidden


# Float64 with bounds --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bounded:
    """A float64 value and how far the computed one may lie from it."""

    value: Tensor
    error: Tensor

    @staticmethod
    def exact(value: Tensor) -> "Bounded":
        return Bounded(value.double(), torch.zeros_like(value, dtype=torch.float64))

    @property
    def largest(self) -> Tensor:
        return self.value.abs() + self.error

    def __matmul__(self, other: "Bounded") -> "Bounded":
        # A sum of n terms in any order is off by at most n roundings of the sum of magnitudes.
        error = self.error @ other.largest + self.value.abs() @ other.error
        roundings = (self.value.shape[-1] + 1) * FP32_ULP * (self.largest @ other.largest)
        return Bounded(self.value @ other.value, error + roundings)

    def __mul__(self, other: "Bounded") -> "Bounded":
        error = self.error * other.largest + self.value.abs() * other.error
        return Bounded(self.value * other.value, error + FP32_ULP * self.largest * other.largest)

    def rounded(self, dtype: torch.dtype = torch.bfloat16) -> "Bounded":
        half_ulp = BF16_HALF_ULP if dtype == torch.bfloat16 else FP32_ULP
        return Bounded(self.value, self.error + half_ulp * self.largest)

    def silu(self) -> "Bounded":
        value = silu(self.value)
        return Bounded(value, 1.1 * self.error + ELEMENTARY * value.abs() + TINY)  # |silu'| < 1.1

    def silu_slope(self) -> "Bounded":
        sigma = self.value.sigmoid()
        value = sigma * (1 + self.value * (1 - sigma))
        scale = 1 + self.value.abs() * (1 - sigma)  # of the terms, which cancel where the slope is zero
        return Bounded(value, 0.5 * self.error + ELEMENTARY * scale + TINY)  # |silu''| <= 0.5

    def __getitem__(self, index) -> "Bounded":
        return Bounded(self.value[index], self.error[index])

    @property
    def T(self) -> "Bounded":
        return Bounded(self.value.T, self.error.T)

    @staticmethod
    def cat(parts: list["Bounded"], dim: int) -> "Bounded":
        return Bounded(torch.cat([p.value for p in parts], dim), torch.cat([p.error for p in parts], dim))


def bounds(case: Case, hidden: Tensor | None) -> dict[str, Bounded]:
    """Output and gradients with their bounds; `hidden` [P, I]: FC2 inputs to go on from where these were rounded."""
    (num_tokens, top_k), width = case.ids.shape, case.down.shape[2]
    zeros = {name: torch.zeros_like(getattr(case, name), dtype=torch.float64) for name in ("x", "gate_up", "down")}
    total = {name: Bounded(value, value.clone()) for name, value in zeros.items()}
    total["out"] = Bounded(zeros["x"].clone(), zeros["x"].clone())
    total["weights"] = Bounded.exact(torch.zeros((num_tokens, top_k)))
    for expert in case.ids.unique().tolist():
        token, k = (case.ids == expert).nonzero(as_tuple=True)
        x, grad = Bounded.exact(case.x[token]), Bounded.exact(case.grad[token])
        first, second = Bounded.exact(case.gate_up[expert]), Bounded.exact(case.down[expert])
        both = (x @ first.T).rounded()
        gate, up = both[:, :width], both[:, width:]
        act = gate.silu().rounded()
        inner = (act * up).rounded() if hidden is None else Bounded.exact(hidden[token * top_k + k])
        result = (inner @ second.T).rounded()
        gate_value = case.weights[token, k, None]
        pairs = {"out": result * Bounded.exact(gate_value)}

        dot = result.value * grad.value
        error = (result.error * grad.value.abs()).sum(1) + dot.shape[1] * FP32_ULP * (result * grad).largest.sum(1)
        exact_dot = Bounded(dot.sum(1), error).rounded(case.weights.dtype)
        total["weights"].value[token, k], total["weights"].error[token, k] = exact_dot.value, exact_dot.error

        rows = (grad * Bounded.exact(gate_value.bfloat16())).rounded()
        grad_inner = (rows @ second).rounded()
        grad_gate = ((grad_inner * up).rounded() * gate.silu_slope()).rounded()
        grad_both = Bounded.cat([grad_gate, (grad_inner * act).rounded()], 1)
        pairs["x"] = (grad_both @ first).rounded()
        for name, product in (("gate_up", grad_both.T @ x), ("down", rows.T @ inner)):
            product = product.rounded()
            total[name].value[expert], total[name].error[expert] = product.value, product.error
        for name, pair in pairs.items():
            total[name].value.index_add_(0, token, pair.value)
            total[name].error.index_add_(0, token, pair.error + top_k * FP32_ULP * pair.largest)
    return total | {name: total[name].rounded() for name in ("out", "x")}


def check_within(name: str, got: Tensor, bound: Bounded) -> None:
    excess = (got.double() - bound.value).abs() - bound.error
    assert got.isfinite().all() and (excess <= 0).all(), f"{name}: {float(excess.max())} outside"


def distance(got: Tensor, bound: Bounded) -> float:
    """Relative to the norm."""
    return float((got.double() - bound.value).norm() / bound.value.norm().clamp_min(1e-30))


# Tests ----------------------------------------------------------------------------------------------------------------


@needs_bf16
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", CASES)
def test_forward_and_gradients(name, rounding):
    case, fmt = make(**CASES[name]), ROUNDINGS[rounding]
    ours, theirs = results(operator, case, fmt), results(composed, case, fmt)
    exact = bounds(case, None if fmt is None else hidden_vectors(case, fmt))
    for result in NAMES:
        assert (ours[result].dtype, ours[result].shape) == (theirs[result].dtype, theirs[result].shape), result
        check_within(result, ours[result], exact[result])
        if fmt is None:  # rounded hidden vectors of the two may differ by whole codewords
            check_within(result, theirs[result], exact[result])
        # The codewords' noise is the composition's alone, for `exact` goes on from the operator's.
        assert distance(ours[result], exact[result]) <= 1.15 * distance(theirs[result], exact[result]) + 1e-4, result
        assert distance(ours[result], exact[result]) < 2.5 * BF16_HALF_ULP, result  # a few roundings each


@needs_bf16
@pytest.mark.parametrize("rounding", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("name", ["one token", "many", "other sizes", "unused experts"])
def test_the_rounded_hidden_vectors_are_the_quantizers(name, rounding):
    case, fmt = make(**CASES[name]), ROUNDINGS[rounding]
    plain = hidden_vectors(case, None)
    assert same(hidden_vectors(case, fmt), reference.fake_quant(plain, FC2_SCALE, fmt=fmt))


@needs_bf16
@pytest.mark.parametrize("rounding", ["bf16", "nvfp4"])
def test_with_and_without_gradient_and_any_number_of_threads_give_the_same_bits(rounding):
    case, fmt = make(128, num_experts=6), ROUNDINGS[rounding]
    matrices = ExpertMatrices.pack(case.gate_up, case.down, backward=False)
    every = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            every.append(results(operator, case, fmt))
            options = {"fmt": fmt, "fc2_scale": FC2_SCALE}
            assert same(routed_experts(case.x, case.weights, case.ids, matrices, **options), every[-1]["out"])
    finally:
        torch.set_num_threads(before)
    for name in NAMES:
        assert same(every[0][name], every[1][name]), name


@needs_bf16
def test_a_token_does_not_depend_on_the_others():
    case = make(100, hidden=96, width=64)
    matrices = ExpertMatrices.pack(case.gate_up, case.down, backward=False)
    options = {"fmt": FORMATS["nvfp4"], "fc2_scale": FC2_SCALE}
    out = routed_experts(case.x, case.weights, case.ids, matrices, **options)
    for rows in (slice(0, 1), slice(3, 20), slice(50, 100)):
        part = routed_experts(case.x[rows], case.weights[rows], case.ids[rows], matrices, **options)
        assert same(part, out[rows])


# 224.2: the largest NVFP4 step, 448/224.2, has a significand of ones down to where BF16 ends.
@needs_bf16
@pytest.mark.parametrize("fc2_scale", [FC2_SCALE, 224.2])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_nan_is_not_hidden(rounding, fc2_scale):
    case, options = make(40), {"fmt": ROUNDINGS[rounding], "fc2_scale": fc2_scale}
    matrices = ExpertMatrices.pack(case.gate_up, case.down, backward=False)
    expected = routed_experts(case.x, case.weights, case.ids, matrices, **options)
    x = case.x.clone()
    x[17, 3] = torch.nan
    out = routed_experts(x, case.weights, case.ids, matrices, **options)
    others = torch.arange(40) != 17
    assert out[17].isnan().all() and same(out[others], expected[others])
    case.gate_up[2, 5, 7] = torch.nan
    matrices = ExpertMatrices.pack(case.gate_up, case.down, backward=False)
    out = routed_experts(case.x, case.weights, case.ids, matrices, **options)
    touched = (case.ids == 2).any(1)
    assert out[touched].isnan().all() and same(out[~touched], expected[~touched])


@needs_bf16
def test_no_tokens():
    case = make(0)
    ours = results(operator, case, FORMATS["nvfp4"])
    assert ours["out"].shape == (0, 64)
    for name in ("gate_up", "down"):
        assert ours[name].shape == getattr(case, name).shape and not ours[name].any()


@needs_bf16
def test_layouts_and_integer_types():
    case = make(20)
    matrices = ExpertMatrices.pack(case.gate_up, case.down, backward=True)
    expected = routed_experts(case.x, case.weights, case.ids, matrices, fmt=None)
    turned = ExpertMatrices.pack(
        case.gate_up.transpose(1, 2).contiguous().transpose(1, 2), case.down.repeat(1, 1, 2)[..., :32], backward=True
    )
    for x, weights, ids in (
        (case.x.T.contiguous().T, case.weights.T.contiguous().T, case.ids.int()),
        (case.x.repeat(1, 2)[:, :64], case.weights.float(), case.ids.to(torch.int16)),
    ):
        assert same(routed_experts(x, weights, ids, turned, fmt=None), expected)
    x = case.x.clone().requires_grad_()
    arguments = (x, case.weights, case.gate_up, case.down, case.ids, turned)
    routed_experts_with_gradient(*arguments, fmt=None).backward(case.grad.T.contiguous().T)
    assert same(x.grad, results(operator, case, None)["x"])
    x.grad = None
    routed_experts_with_gradient(*arguments, fmt=None).sum().backward()  # a gradient of strides 0
    ones = Case(**{**vars(case), "grad": torch.ones_like(case.grad)})
    assert same(x.grad, results(operator, ones, None)["x"])


@needs_bf16
def test_a_change_in_place_before_the_backward_is_refused():
    case = make(9)
    matrices = ExpertMatrices.pack(case.gate_up, case.down, backward=True)
    for changed in ("x", "weights"):
        given = {name: getattr(case, name).clone().requires_grad_() * 1 for name in ("x", "weights", "gate_up", "down")}
        out = routed_experts_with_gradient(*given.values(), case.ids, matrices, fmt=None)
        given[changed].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@needs_bf16
def test_observed_reports_the_operands_of_each_forward_while_it_lasts():
    case, fmt = make(30), FORMATS["nvfp4"]
    matrices = ExpertMatrices.pack(case.gate_up, case.down, backward=True)
    seen, nested = [], []

    def run():
        return routed_experts(case.x, case.weights, case.ids, matrices, fmt=fmt, fc2_scale=FC2_SCALE)

    unobserved = run()
    with experts.observed(lambda *operands: seen.append(operands)):
        out = run()
        with experts.observed(lambda *operands: nested.append(operands)):
            results(operator, case, fmt)
    with pytest.raises(ZeroDivisionError), experts.observed(lambda *operands: seen.append(operands)):
        _ = 1 / 0
    run()
    assert same(out, unobserved) and (len(seen), len(nested)) == (2, 1)
    for x, gate_up, hidden, down in seen:
        assert same(x, case.x) and same(gate_up, case.gate_up) and same(down, case.down)
        assert hidden.shape == (60, 32)
        # What was reported as multiplied gives the output.
        per_pair = torch.empty((60, 64))
        per_pair[case.order] = torch.stack(
            [row.float() @ down[e].float().T for row, e in zip(hidden, case.ids.reshape(-1)[case.order], strict=True)]
        )
        total = (per_pair.bfloat16().float().view(30, 2, 64) * case.weights.float()[..., None]).sum(1)
        torch.testing.assert_close(total, out.float(), rtol=2**-7, atol=2**-7)


@needs_bf16
@pytest.mark.parametrize("mode", ["off", "rtn"])
def test_the_operand_tap_sees_inside_the_operator(mode):
    model, qat, tokens = small_trainer()
    products = {}

    def forward(*, fused):
        seen = []
        qat.fused_experts = fused

        def on_product(module, index, left, right):
            if module.endswith(".experts"):
                seen.append((module, index))
                products[fused, module, index] = (left, storage_values(right))

        with torch.no_grad(), qat.forward(mode=mode), operand_tap(model, on_product):
            model(input_ids=tokens, use_cache=False)
        return seen

    names = [f"model.layers.{layer}.mlp.experts" for layer in range(2)]
    assert forward(fused=True) == forward(fused=False) == [(name, index) for name in names for index in (0, 1)]
    for name in names:
        for index in (0, 1):
            (ours, weight), (composed, same_weight) = (products[fused, name, index] for fused in (True, False))
            assert same(weight, same_weight)
            assert activation_format(ours, format_name="nvfp4") == ("bf16" if mode == "off" else "nvfp4")
            # A hidden vector per pair here and there, in the same order; there with rows of zeros between experts.
            if index == 1:
                rows = composed[composed.any(1)]
                assert float((ours.float() - rows.float()).norm() / rows.float().norm()) < 0.1


@needs_bf16
@pytest.mark.parametrize("which", ["gate_up", "down"])
def test_stale_matrices_are_noticed_under_observation(which):
    case = make(5)
    matrices = ExpertMatrices.pack(case.gate_up, case.down, backward=False)
    getattr(case, which)[3, 1, 2] += 1
    with experts.observed(lambda *_: None), pytest.raises(AssertionError, match="stale matrices"):
        routed_experts(case.x, case.weights, case.ids, matrices, fmt=None)


def small_trainer():
    """(model of two layers in BF16, its handle, tokens [2, 12])."""
    config = miniature_config(
        build_tokenizer(), num_layers=2, hidden_size=64, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    )
    model = cast_parameters(build_model(config, seed=0), torch.bfloat16)
    scales = dict.fromkeys(range(2), 256.0)
    qat = attach(model, quant=QuantSpec(), scales=StaticScales(fc1=scales, fc2=scales, k=scales, v=scales))
    assert qat.fused_experts
    return model, qat, (torch.arange(24) % config.vocab_size).view(2, 12)


@needs_bf16
@pytest.mark.parametrize("mode", ["off", "rtn"])
def test_the_trainer_packs_again_after_an_update_and_agrees_with_the_composition(mode):
    model, qat, tokens = small_trainer()
    weights = [layer.mlp.experts.down_proj for layer in model.model.layers]

    def logits_and_gradient(*, fused):
        model.zero_grad(set_to_none=True)
        qat.fused_experts = fused
        with qat.forward(mode=mode):
            logits = model(input_ids=tokens, use_cache=False).logits.float()
        logits.logsumexp(-1).sum().backward()
        return torch.cat((logits.detach().reshape(-1), *(w.grad.float().reshape(-1) for w in weights)))

    def apart(left, right):
        return float((left - right).norm() / right.norm())

    with torch.no_grad(), qat.forward(mode=mode), experts.observed(lambda *_: None):
        model(input_ids=tokens, use_cache=False)  # packed without the backward's matrices
    before = logits_and_gradient(fused=True)
    with torch.no_grad():
        for weight in weights:
            weight.neg_()
    after, composed_after = logits_and_gradient(fused=True), logits_and_gradient(fused=False)
    assert apart(before, after) > 0.1
    assert apart(after, composed_after) < 0.05
    with torch.no_grad(), qat.forward(mode=mode), experts.observed(lambda *_: None):
        model(input_ids=tokens, use_cache=False)  # an observer compares with the parameters


@needs_bf16
def test_what_does_not_fit_is_refused():
    case = make(5)
    matrices = ExpertMatrices.pack(case.gate_up, case.down, backward=False)

    def run(x=case.x, weights=case.weights, ids=case.ids, matrices=matrices):
        return routed_experts(x, weights, ids, matrices, fmt=None)

    for options, message in (
        ({"x": case.x.float()}, "bfloat16"),
        ({"x": case.x[:, :32]}, "do not fit x"),
        ({"ids": case.ids + 6}, "expert id"),
        ({"ids": case.ids - 6}, "expert id"),
        ({"ids": case.ids[:, :1]}, "a gate value and an id"),
        ({"weights": case.weights[:4]}, "a gate value and an id"),
        ({"ids": case.ids[:4], "weights": case.weights[:4]}, "a gate value and an id"),
    ):
        with pytest.raises(RuntimeError, match=message):
            run(**options)
    leaf = case.x.clone().requires_grad_()
    out = routed_experts_with_gradient(leaf, case.weights, case.gate_up, case.down, case.ids, matrices, fmt=None)
    with pytest.raises(TypeError):  # packed without what the backward needs
        out.sum().backward()


@needs_bf16
def test_what_the_operator_accepts():
    for fmt in (None, FORMATS["nvfp4"], FORMATS["even"]):
        for hidden_size, width in ((64, 32), (96, 160), (2048, 768)):
            assert refusal(fmt=fmt, hidden_size=hidden_size, expert_width=width) is None


def refusal(*, hidden_size=64, expert_width=32, device="cpu", fmt=None):
    return experts.refusal(hidden_size=hidden_size, expert_width=expert_width, device=torch.device(device), fmt=fmt)


def test_reasons_of_a_refusal(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert refusal(hidden_size=48) == "hidden size 48 and expert width 32 must be multiples of 32"
    assert refusal(expert_width=16) == "hidden size 64 and expert width 16 must be multiples of 32"
    assert refusal(fmt=formats.get("fouroversix")) == "it does not know fouroversix"
    assert refusal(fmt=formats.get("hif4")) == "it does not know hif4"
    assert refusal(device="cuda") == "the kernel backend is triton"
    monkeypatch.setenv(VARIABLE, "torch")
    assert refusal() == "the kernel backend is torch"


def test_a_layer_that_runs_composed_is_named_once_where_the_operator_was_to_be_had(monkeypatch, capsys):
    layer = {"hidden_size": 64, "expert_width": 48, "device": torch.device("cpu"), "fmt": None}
    experts._say.cache_clear()
    monkeypatch.delenv(VARIABLE, raising=False)
    assert not experts.can_run(**layer) and not experts.can_run(**layer)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("trace_rl: ") and line.endswith("expert width 48 must be multiples of 32")
    monkeypatch.setenv(VARIABLE, "torch")  # asked for, so nothing to say
    assert not experts.can_run(**layer) and not capsys.readouterr().err
    monkeypatch.setenv(VARIABLE, "compiled")  # named: refused, not replaced
    with pytest.raises(UserError, match="expert width 48 must be multiples of 32; set TRACE_RL_KERNELS=auto"):
        experts.can_run(**layer)
