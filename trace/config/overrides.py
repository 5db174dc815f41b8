"""The experiment as one method runs it: with what a variant changes of budget and sampling."""

from trace_rl.config.experiment import ExperimentConfig
from trace_rl.config.load import parse_experiment
from trace_rl.config.method import RlMethod

SAMPLING = ("max_new_tokens",)
"""Overrides of ``sampling``; the others are of ``training``."""


def with_overrides(config: ExperimentConfig, method: RlMethod) -> ExperimentConfig:
    """``config`` with what ``method.training`` sets, validated again as a whole (UserError where it does not fit)."""
    changed = method.training.model_dump(exclude_none=True)
    if not changed:
        return config
    data = config.model_dump(mode="json", include=config.model_fields_set | {"sampling", "training"})
    for name, value in changed.items():
        data["sampling" if name in SAMPLING else "training"][name] = value
    return parse_experiment(data, source=f"method {method.name}", whole=False)
