"""Bit-exactness against vectors made by other implementations (tests/golden/README.md)."""

from pathlib import Path

import numpy as np
import pytest
import torch

from trace_rl import formats

GOLDEN = Path(__file__).parent / "golden"


def cases(file: str) -> list[str]:
    return sorted({key.split(".")[0] for key in np.load(GOLDEN / file).files})


def load(file: str, case: str) -> dict[str, torch.Tensor]:
    data = np.load(GOLDEN / file)
    return {
        key.split(".", 1)[1]: torch.from_numpy(data[key].copy()) for key in data.files if key.startswith(case + ".")
    }


def bf16(bits: torch.Tensor) -> torch.Tensor:
    return bits.view(torch.int16).view(torch.bfloat16)


def agree(x: torch.Tensor, fmt: formats.Format, encode_scale, code, block_scale) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        quantized = fmt.quantize(x.to(dtype), encode_scale)
        assert torch.equal(quantized.block_scale, block_scale)
        assert torch.equal(quantized.codes, code)
        xhat = fmt.fake_quant(x.to(dtype), encode_scale)
        assert torch.equal(xhat.view(torch.int32), quantized.dequantize().view(torch.int32))
        assert torch.equal(fmt.block_scales(x.to(dtype), encode_scale), block_scale)


@pytest.mark.parametrize("case", cases("nvfp4_reference.npz"))
def test_nvfp4_equals_the_reference(case):
    golden = load("nvfp4_reference.npz", case)
    x = bf16(golden["x_bf16"])
    for encode_scale in (golden["encode_scale"], float(golden["encode_scale"])):
        agree(x, formats.get("nvfp4"), encode_scale, golden["code"], golden["block_scale_e4m3"])


@pytest.mark.parametrize("rule", ["rceil", "floor", "even"])
@pytest.mark.parametrize("case", cases("mxfp4_rceil.npz"))
def test_mxfp4_equals_torchao(case, rule):
    golden = load(f"mxfp4_{rule}.npz", case)
    agree(bf16(golden["x_bf16"]), formats.get("mxfp4", rule=rule), None, golden["code"], golden["block_scale_e8m0"])


@pytest.mark.parametrize("rule", ["mse", "mae"])
@pytest.mark.parametrize("case", cases("fouroversix.npz"))
def test_fouroversix_equals_its_reference(case, rule):
    golden = load("fouroversix.npz", case)
    fmt = formats.get("fouroversix", rule=rule)
    encode_scale = fmt.encode_scale(golden["amax"])
    agree(bf16(golden["x_bf16"]), fmt, encode_scale, golden[f"{rule}.code"], golden[f"{rule}.block_scale_e4m3"])
