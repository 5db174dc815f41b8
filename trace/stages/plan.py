"""Stage ``plan``: what guidance would cost, before anything runs.

The table of METHOD.md section 3 for a model's ``config.json`` or for an experiment's checkpoint. Every figure comes
from the record layout that the engines write.
"""

from pathlib import Path
from typing import Any

from trace_rl import formats
from trace_rl.config.checkpoint import ColdStart, LocalCheckpoint
from trace_rl.config.experiment import ExperimentConfig
from trace_rl.config.paths import RunPaths
from trace_rl.errors import UserError
from trace_rl.guidance.accounting import PlanRow, plan
from trace_rl.models.checkpoint_io import read_json


def run(config: ExperimentConfig) -> list[PlanRow]:
    """Print the table of the experiment's model: at the paper's batch, and at the experiment's."""
    model = model_config(config)
    training = config.training
    rows = plan(
        model,
        sequences=training.prompts_per_step * training.samples_per_prompt,
        tokens=config.engine.max_model_len,
        block_size=formats.block_sizes(config.format),
    )
    batch = f"{training.prompts_per_step} prompts x {training.samples_per_prompt} samples"
    length = f"at most {config.engine.max_model_len} tokens"
    print(plan_table(rows, title=f"{config.run} ({config.checkpoint.source}): {batch} of {length}"))
    return rows


def run_model(config_json: Path) -> list[PlanRow]:
    """Print the table of a model at the paper's batch: 4096 sequences of 256K tokens."""
    rows = plan(read_json(config_json))
    print(plan_table(rows, title=f"{config_json}: 4096 sequences of 262144 tokens"))
    return rows


def model_config(config: ExperimentConfig) -> dict[str, Any]:
    """The experiment's model as config.json values, without building it."""
    source = config.checkpoint
    if isinstance(source, ColdStart):
        model = source.model
        values = model.model_dump(exclude={"num_layers", "max_position_embeddings"})
        return values | {"model_type": "qwen3_moe", "num_hidden_layers": model.num_layers}
    if isinstance(source, LocalCheckpoint):
        return read_json(Path(source.path).expanduser() / "config.json")
    made = RunPaths(run=config.run).checkpoint / "config.json"
    if not made.is_file():
        raise UserError(
            f"plan: the model of source {source.source!r} is known once the checkpoint stage has run ({made}); run it, "
            "or give the model: trace-rl plan --model config.json"
        )
    return read_json(made)


def plan_table(rows: list[PlanRow], *, title: str) -> str:
    """Rows as text."""
    names, formulas = (max(len(getattr(row, field)) for row in rows) for field in ("name", "formula"))
    lines = [title] + [f"{row.name:{names}}  {row.formula:{formulas}}  {shown(row):>12}" for row in rows]
    return "\n".join(lines)


def shown(row: PlanRow) -> str:
    """The figure in a unit that shows it: a step of a small model is neither TiB nor seconds."""
    if row.unit == "TiB" and row.value < 0.1:
        return f"{row.num_bytes / 2**20:.1f} MiB" if row.num_bytes < 2**30 else f"{row.num_bytes / 2**30:.1f} GiB"
    if row.unit == "s" and row.value < 1:
        return f"{1000 * row.value:.2g} ms"
    return row.text
