"""Somebody else's NVFP4: the quantizers that `bench kernels` times ours beside, and how often their codes differ.

All do the same work, BF16 in and dequantized BF16 out, on the same static global scale. torchao is an optional package
(extra `bench`); what is not installed or does not run on a host is named with the reason and left out.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trace_rl import formats
from trace_rl.formats import e2m1
from trace_rl.formats.nvfp4 import e4m3_values

FMT = formats.get("nvfp4")
PLAIN, TORCHAO, VLLM = "torch.compile", "torchao", "vllm reference"
OTHERS = (PLAIN, TORCHAO, VLLM)


@dataclass(frozen=True)
class Foreign:
    """Somebody else's NVFP4 quantizer."""

    fake_quant: Callable[[Tensor], Tensor]
    """BF16 [rows, cols] -> BF16 xhat."""
    parts: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    """x -> (codeword values, block scales), float32."""


def foreign(encode_scale: float, *, device: str) -> tuple[dict[str, Foreign], dict[str, str]]:
    """The quantizers to compare with that are installed, and why the others are not there."""
    found: dict[str, Foreign] = {}
    refused: dict[str, str] = {}
    for name, load in ((PLAIN, _compiled_plain), (TORCHAO, _torchao), (VLLM, _vllm)):
        try:
            found[name] = load(torch.tensor(encode_scale, device=device))
        except ModuleNotFoundError as error:
            refused[name] = f"not installed: {error}"
        except (ImportError, torch._dynamo.exc.TorchDynamoException) as error:
            refused[name] = f"does not run here: {str(error).strip().splitlines()[0]}"
    return found, refused


def _compiled_plain(encode_scale: Tensor) -> Foreign:
    # `fake_quant` cuts large tensors into pieces that fit the cache, which only eager code needs; compiled, the loop
    # would be unrolled. Its body is the same arithmetic.
    compiled = torch.compile(lambda x: FMT._fake_quant(x, encode_scale).to(x.dtype), dynamic=False)
    compiled(torch.ones(2, FMT.block_size, dtype=torch.bfloat16, device=encode_scale.device))
    return Foreign(compiled)


def _torchao(encode_scale: Tensor) -> Foreign:
    module = importlib.import_module("torchao.prototype.mx_formats.nvfp4_tensor")
    tensor_scale = encode_scale.reciprocal()

    def fake_quant(x: Tensor) -> Tensor:
        return module.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=tensor_scale).dequantize(x.dtype)

    def parts(x: Tensor) -> tuple[Tensor, Tensor]:
        scales, packed = module.nvfp4_quantize(x, per_tensor_scale=tensor_scale)
        return e2m1.values(formats.unpack_codes(packed.view(torch.uint8))), scales.float().view(len(x), -1)

    return Foreign(fake_quant, parts=parts)


def _vllm(encode_scale: Tensor) -> Foreign:
    module = importlib.import_module("vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils")
    return Foreign(
        lambda x: module.ref_nvfp4_quant_dequant(x, encode_scale, FMT.block_size),
        parts=lambda x: module.ref_nvfp4_quant(x, encode_scale, FMT.block_size),
    )


def agreement(other: Foreign, x: Tensor, encode_scale: float) -> dict[str, float]:
    """Shares of the BF16 results, and of codes and block scales where they are to be had, that differ from ours."""
    xhat = FMT.fake_quant(x, encode_scale).to(x.dtype)
    shares = {"values": _share(other.fake_quant(x) != xhat)}
    if other.parts is not None:
        codes, block_scale, _ = FMT.quantize_codes(x, encode_scale)
        q, scale = other.parts(x)
        shares["codes"] = _share(q != e2m1.values(codes))
        shares["block_scales"] = _share(scale != e4m3_values(block_scale))
    return shares


def _share(differs: Tensor) -> float:
    return float(differs.float().mean())
