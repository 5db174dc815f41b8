"""What every section of the report may look at: one run's summary, curves, analysis and settings, and the claims."""

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trace_rl.config.experiment import ExperimentConfig
from trace_rl.config.method import PtqMethod, RlMethod
from trace_rl.report.claim import Claim
from trace_rl.report.claims import claims
from trace_rl.report.figures.curves import Runs, moving_average, series
from trace_rl.report.labels import label
from trace_rl.report.mechanism_claims import parity_step_claim
from trace_rl.report.paper import paper_numbers

COLLAPSE_RULE = (
    "Collapsed: the reward of the last steps is below half of the best that as many steps in a row reached, or one of "
    "their updates had a gradient that was not finite."
)
Methods = dict[str, RlMethod | PtqMethod]
Analysis = dict[str, dict[int, dict[str, Any]]]
"""{``gap_sources`` or ``ratio``: {seed: artifact}}."""


@dataclass(frozen=True)
class Context:
    """One page's material.

    ``artifacts``: calibration and bench, audit and parity by format, where they exist; ``seconds`` by job.
    """

    summary: dict[str, Any]
    config: ExperimentConfig
    methods: Methods
    runs: Runs
    artifacts: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    analysis: Analysis = field(default_factory=dict)

    @functools.cached_property
    def paper(self) -> dict[str, Any]:
        """The paper's numbers."""
        return paper_numbers()

    @functools.cached_property
    def claims(self) -> list[Claim]:
        """Every claim that these methods can test."""
        curves = {}
        for name in ("trace", "bf16"):
            rewards = [moving_average(values, 10) for _, values in series(self.runs, name, "reward").values()]
            if rewards:
                length = min(map(len, rewards))
                curves[name] = list(np.mean([values[:length] for values in rewards], axis=0))
        return claims(self.summary, self.paper) + parity_step_claim(self.summary, curves, self.paper)

    def about(self, *topics: str) -> list[Claim]:
        """The claims of some sections."""
        return [claim for claim in self.claims if claim.topic in topics]

    def run_of(self, names: tuple[str, ...] | list[str]) -> list[str]:
        """Those of ``names`` that this page has runs of, in their order."""
        return [name for name in names if name in self.summary["methods"]]

    @property
    def num_seeds(self) -> int:
        """Seeds of the method that has most."""
        return max((len(seeds) for seeds in self.summary["methods"].values()), default=0)

    def collapsed(self, names: list[str] | None = None) -> list[str]:
        """``qat 1 of 3`` for every method with a collapsed run."""
        found = []
        for name in self.run_of(names) if names is not None else self.summary["methods"]:
            seeds = self.summary["methods"][name]
            count = sum(bool(record["collapsed"]) for record in seeds.values())
            if count:
                found.append(f"{label(name)} {count} of {len(seeds)}")
        return found
