"""The RMS norm's operator against float64 and against PyTorch's composition, and the module that stands for a norm.

Both round to BF16 twice, the normalized value and its product with the weight, so a result is at most two half units
in the last place from the exact one; they differ from each other only where FP32's noise crosses a rounding boundary.
"""

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from trace_rl.kernels import compiled
from trace_rl.kernels import rms_norm as kernels
from trace_rl.kernels.dispatch import VARIABLE
from trace_rl.qat.norms import RMSNorm

needs_operator = pytest.mark.skipif(compiled.why_not() is not None, reason=f"no operator: {compiled.why_not()}")

EPS = 1e-6
BF16_HALF_ULP = 2.0**-8  # relative to the value
TWO_ROUNDINGS = 2 * BF16_HALF_ULP + 2.0**-15  # with their product and FP32's noise
SHAPES = [(1, 16), (7, 64), (3, 5, 4, 32), (2100, 128), (5, 2048)]  # 2100: three pieces of the weight's gradient


@pytest.fixture(autouse=True)
def no_setting(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


def make(*shape: int, size: float = 1.0) -> tuple[Tensor, Tensor]:
    """(x, weight) in BF16; the rows of x differ in size."""
    generator = torch.Generator().manual_seed(sum(shape))
    rows = torch.randn((*shape[:-1], 1), generator=generator).exp() * size
    x = torch.randn(shape, generator=generator) * rows
    return x.bfloat16(), (1 + 0.3 * torch.randn(shape[-1], generator=generator)).bfloat16()


def exact(x: Tensor, weight: Tensor) -> Tensor:
    """Without any rounding, in the dtype of the arguments."""
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def composed(x: Tensor, weight: Tensor) -> Tensor:
    """The definition: FP32 inside, rounded to BF16 in two places."""
    values = x.float()
    return weight * (values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + EPS)).to(weight.dtype)


def assert_near(y: Tensor, x: Tensor, weight: Tensor, *, definition: Tensor) -> None:
    reference = exact(x.double(), weight.double())
    assert ((y.double() - reference).abs() <= TWO_ROUNDINGS * reference.abs()).all()
    assert float((y == definition).float().mean()) > 0.99


@needs_operator
@pytest.mark.parametrize("size", [1.0, 1e-5, 1e6])
@pytest.mark.parametrize("shape", SHAPES)
def test_forward(shape, size):
    x, weight = make(*shape, size=size)
    y = kernels.rms_norm(x, weight, eps=EPS)
    assert (y.shape, y.dtype) == (x.shape, torch.bfloat16)
    assert_near(y, x, weight, definition=composed(x, weight))


@needs_operator
@pytest.mark.parametrize("shape", SHAPES)
def test_with_a_residual_the_sum_is_normalized_before_it_is_rounded(shape):
    x, weight = make(*shape)
    residual = make(*shape, size=3.0)[0].flip(0)
    y, total = kernels.add_rms_norm(x, residual, weight, eps=EPS)
    unrounded = x.float() + residual.float()
    assert torch.equal(total, unrounded.bfloat16())
    assert_near(y, unrounded, weight, definition=composed(unrounded, weight))


@needs_operator
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients(shape):
    x, weight = make(*shape)
    grad = make(*shape)[0].flip(-1)

    def gradients(norm, dtype: torch.dtype) -> list[Tensor]:
        leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in (x, weight)]
        norm(*leaves).backward(grad.to(dtype))
        return [leaf.grad.double() for leaf in leaves]

    def apart(left: Tensor, right: Tensor) -> float:
        return float((left - right).norm() / right.norm())

    wanted = gradients(exact, torch.float64)
    ours = gradients(lambda x, weight: kernels.rms_norm_with_gradient(x, weight, eps=EPS), torch.bfloat16)
    theirs = gradients(composed, torch.bfloat16)
    for got, plain, reference in zip(ours, theirs, wanted, strict=True):
        assert apart(got, reference) <= 1.2 * apart(plain, reference) + BF16_HALF_ULP / 4
        assert apart(got, reference) < 2 * BF16_HALF_ULP


@needs_operator
def test_layouts_threads_and_gradient_mode_give_the_same_bits():
    x, weight = make(2100, 64)
    y = kernels.rms_norm(x, weight, eps=EPS)
    wide = torch.zeros(2100, 96, dtype=torch.bfloat16)
    wide[:, 16:80] = x
    transposed = x.view(30, 70, 64).transpose(0, 1).contiguous().transpose(0, 1)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert torch.equal(kernels.rms_norm(wide[:, 16:80], weight, eps=EPS), y)
            assert torch.equal(kernels.rms_norm(transposed, weight, eps=EPS).reshape(2100, 64), y)
            leaves = [tensor.clone().requires_grad_() for tensor in (wide, weight)]
            out = kernels.rms_norm_with_gradient(leaves[0][:, 16:80], leaves[1], eps=EPS)
            assert torch.equal(out, y)
            out.sum().backward()  # a gradient of strides 0
            if count == 1:
                first = [leaf.grad for leaf in leaves]
        assert all(torch.equal(leaf.grad, before) for leaf, before in zip(leaves, first, strict=True))
    finally:
        torch.set_num_threads(threads)
    with torch.no_grad():
        assert torch.equal(kernels.rms_norm_with_gradient(*leaves_of(x, weight), eps=EPS), y)


def leaves_of(*tensors: Tensor) -> list[Tensor]:
    return [tensor.clone().requires_grad_() for tensor in tensors]


@needs_operator
@pytest.mark.parametrize("trained", ["x", "weight"])
def test_a_gradient_goes_only_where_it_is_asked_for(trained):
    x, weight = make(6, 32)
    both = leaves_of(x, weight)
    kernels.rms_norm_with_gradient(*both, eps=EPS).sum().backward()
    one = leaves_of(x, weight)
    index = ("x", "weight").index(trained)
    one[1 - index].requires_grad_(False)
    kernels.rms_norm_with_gradient(*one, eps=EPS).sum().backward()
    assert one[1 - index].grad is None
    assert torch.equal(one[index].grad, both[index].grad)


@needs_operator
def test_nan_and_inf_are_not_hidden_and_stay_in_their_row():
    x, weight = make(5, 64)
    expected = kernels.rms_norm(x, weight, eps=EPS)
    x[1, 3], x[3, 5] = torch.nan, torch.inf
    y = kernels.rms_norm(x, weight, eps=EPS)
    assert y[1].isnan().all() and y[3, 5].isnan()
    assert torch.equal(y[[0, 2, 4]], expected[[0, 2, 4]])


def test_no_rows():
    x = torch.empty(2, 0, 32, dtype=torch.bfloat16, requires_grad=True)
    norm = norm_of(32, torch.bfloat16)
    norm(x).sum().backward()
    assert x.grad.shape == x.shape and not norm.weight.grad.any()


def norm_of(columns: int, dtype: torch.dtype) -> RMSNorm:
    stock = Qwen3MoeRMSNorm(columns, eps=EPS)
    stock.weight = nn.Parameter(make(1, columns)[1].to(dtype))
    return RMSNorm(stock)


@pytest.mark.parametrize(
    ("columns", "x_dtype", "weight_dtype", "setting"),
    [
        (64, torch.float32, torch.float32, None),
        (64, torch.bfloat16, torch.float32, None),
        (40, torch.bfloat16, torch.bfloat16, None),
        (64, torch.bfloat16, torch.bfloat16, "torch"),
    ],
)
def test_where_the_operator_cannot_run_the_module_is_transformers_norm(
    columns, x_dtype, weight_dtype, setting, monkeypatch
):
    if setting is not None:
        monkeypatch.setenv(VARIABLE, setting)
    x = make(9, columns)[0].to(x_dtype)
    ours = norm_of(columns, weight_dtype)
    stock = Qwen3MoeRMSNorm(columns, eps=EPS)
    stock.weight = ours.weight
    assert not kernels.supported(x, ours.weight)
    got, expected = ours(x), stock(x)
    assert got.dtype == expected.dtype and torch.equal(got, expected)


@needs_operator
def test_the_module_uses_the_operator_where_it_can():
    norm, (x, _) = norm_of(64, torch.bfloat16), make(9, 64)
    assert kernels.supported(x, norm.weight)
    assert torch.equal(norm(x), kernels.rms_norm(x, norm.weight, eps=EPS))
    assert norm(x).grad_fn.name() == "_RMSNormBackward"
