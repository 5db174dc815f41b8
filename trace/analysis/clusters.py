"""Statistics of tokens that come in trajectories.

Tokens of one response are not independent (an early flip moves everything after it), so every standard error here is
over trajectories. With s_j the sum and n_j the number of the values of trajectory j of J, N = sum n_j:

    mean  m = sum s_j / N           var(m) = J/(J-1) * sum (s_j - m n_j)^2 / N^2      (ratio estimator)

Correlation and slope are resampled: a resample draws J trajectories with replacement, and since both are functions of
sums (n, x, y, xx, xy, yy) it is one product of the resample's counts with the trajectories' sums. All in float64.
"""

from typing import Any

import torch
from torch import Tensor


def clustered_mean(values: Tensor, clusters: Tensor) -> dict[str, float | None]:
    """``mean`` and ``stderr`` of values [N] in clusters int64 [N] (any ids); stderr is None for one cluster."""
    values = values.double()
    _, index = torch.unique(clusters, return_inverse=True)
    num = int(index.max()) + 1
    mean = values.mean()
    residual = torch.zeros(num, dtype=torch.float64).index_add_(0, index, values - mean)
    variance = residual.square().sum() / values.numel() ** 2
    stderr = float((variance * num / (num - 1)).sqrt()) if num > 1 else None
    return {"mean": float(mean), "stderr": stderr}


def association(x: Tensor, y: Tensor, clusters: Tensor, *, resamples: int, seed: int) -> dict[str, float | None]:
    """Correlation of x and y [N] and slope of y on x, each with its bootstrap standard error.

    None where x or y is constant; resamples in which they are do not count.
    """
    x, y = x.double(), y.double()
    _, index = torch.unique(clusters, return_inverse=True)
    num = int(index.max()) + 1
    # About the overall means, so that the sums of squares do not cancel.
    x, y = x - x.mean(), y - y.mean()
    terms = torch.stack([torch.ones_like(x), x, y, x * x, x * y, y * y], dim=1)
    sums = torch.zeros(num, 6, dtype=torch.float64).index_add_(0, index, terms)
    correlation, slope = _fit(sums.sum(0, keepdim=True))
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(num, (resamples, num), generator=generator)
    counts = torch.zeros(resamples, num, dtype=torch.float64).scatter_add_(1, drawn, torch.ones(drawn.shape).double())
    correlations, slopes = _fit(counts @ sums)
    return {
        "correlation": _finite(correlation[0]),
        "correlation_stderr": _spread(correlations),
        "slope": _finite(slope[0]),
        "slope_stderr": _spread(slopes),
    }


def _fit(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Correlation and slope of every row of sums [R, 6] of 1, x, y, xx, xy, yy."""
    n, sx, sy, sxx, sxy, syy = sums.unbind(1)
    xx, xy, yy = sxx - sx * sx / n, sxy - sx * sy / n, syy - sy * sy / n
    return xy / (xx * yy).sqrt(), xy / xx


def _finite(value: Tensor) -> float | None:
    return float(value) if bool(torch.isfinite(value)) else None


def _spread(values: Tensor) -> float | None:
    values = values[torch.isfinite(values)]
    return float(values.std()) if values.numel() > 1 else None


def binned_means(values: Tensor, bins: Tensor, clusters: Tensor, *, num_bins: int) -> list[dict[str, Any]]:
    """Per bin (int64 [N], from 0): number of values, mean with standard error, and the bin's share of the total."""
    total = float(values.double().sum())
    rows = []
    for bin_index in range(num_bins):
        chosen = bins == bin_index
        row: dict[str, Any] = {"bin": bin_index, "tokens": int(chosen.sum())}
        if row["tokens"]:
            row |= clustered_mean(values[chosen], clusters[chosen])
            row["share"] = float(values[chosen].double().sum()) / total if total else 0.0
        rows.append(row)
    return rows
