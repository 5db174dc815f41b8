"""Inputs that find a wrong bit, and what "equal" means: the same bits, so +0 and -0 differ."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trace_rl import formats
from trace_rl.formats import e2m1

GOLDEN = Path(__file__).parents[1] / "golden"
FORMATS = {
    "nvfp4": formats.get("nvfp4"),
    "rceil": formats.get("mxfp4", rule="rceil"),
    "floor": formats.get("mxfp4", rule="floor"),
    "even": formats.get("mxfp4", rule="even"),
}
GOLDEN_FILES = {
    "nvfp4": "nvfp4_reference.npz",
    "rceil": "mxfp4_rceil.npz",
    "floor": "mxfp4_floor.npz",
    "even": "mxfp4_even.npz",
}


def same(left: Tensor, right: Tensor) -> bool:
    """Same shape, dtype and bits."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[left.element_size()]
    return torch.equal(left.contiguous().view(integer), right.contiguous().view(integer))


def row_bytes(start: int, size: int) -> int:
    """A record row longer than its field; groups of 2 and 4 bytes are aligned where the field starts a row."""
    return -(-(start + size) // 8) * 8 if start == 0 else start + size + 5


def golden(name: str) -> dict[str, dict[str, Tensor]]:
    """Arrays of each golden case of a format, x as bfloat16."""
    data = np.load(GOLDEN / GOLDEN_FILES[name])
    cases: dict[str, dict[str, Tensor]] = {}
    for key in data.files:
        case, array = key.split(".", 1)
        cases.setdefault(case, {})[array] = torch.from_numpy(data[key].copy())
    for case in cases.values():
        case["x"] = case.pop("x_bf16").view(torch.int16).view(torch.bfloat16)
    return cases


def boundary_grid(fmt: formats.Format) -> Tensor:
    """float32 [R, 64]: every E2M1 value and rounding boundary, +-, with its float neighbours, at scales 2^-3, 1 and 24.

    Each block begins with 6 units, which fixes its scale; with encode scale 1 nvfp4 stores the unit exactly.
    """
    values = torch.tensor(e2m1.MAGNITUDES)
    points = torch.cat((values, (values[1:] + values[:-1]) / 2, torch.tensor([5.5, 6.5])))
    points = torch.cat((points, -points))
    infinity = torch.full_like(points, float("inf"))
    points = torch.cat((points, torch.nextafter(points, infinity), torch.nextafter(points, -infinity)))
    points = points[points.abs() <= e2m1.MAX]
    per_block = fmt.block_size - 1
    points = torch.nn.functional.pad(points, (0, -len(points) % per_block)).view(-1, per_block)
    blocks = torch.cat((torch.full((len(points), 1), e2m1.MAX), points), dim=1)
    x = torch.cat([blocks * unit for unit in (0.125, 1.0, 24.0)]).reshape(-1)
    return torch.nn.functional.pad(x, (0, -len(x) % 64)).view(-1, 64)


def hard_rows(cols: int, *, seed: int = 0) -> Tensor:
    """float32 [9, cols]: an ordinary row, a x512 outlier, zeros, -0, subnormals of float32 (twice), small values, six
    decades in a row, large values."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((9, cols), generator=generator)
    x[1, cols // 3] *= 512
    x[2] = 0
    x[3, :32] = -0.0
    x[4] *= 1e-39
    x[5] *= 2.0**-140
    x[6] *= 1e-5
    x[7] *= torch.logspace(-3, 3, cols)
    x[8] *= 1e30
    return x
