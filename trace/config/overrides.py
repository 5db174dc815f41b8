"""The experiment as one method runs it: with what a variant changes of budget and sampling."""

from trace_rl.config.experiment import ExperimentConfig
from trace_rl.config.load import parse_experiment
from trace_rl.config.method import TrainingOverrides

SAMPLING = ("max_new_tokens",)
"""Overrides of ``sampling``; the others are of ``training``."""


def with_overrides(config: ExperimentConfig, overrides: TrainingOverrides) -> ExperimentConfig:
    """``config`` with the overrides that are set, validated again as a whole (UserError where they do not fit)."""
    changed = overrides.model_dump(exclude_none=True)
    if not changed:
        return config
    data = config.model_dump(mode="json")
    for name, value in changed.items():
        data["sampling" if name in SAMPLING else "training"][name] = value
    return parse_experiment(data, source="the method's `training`")
