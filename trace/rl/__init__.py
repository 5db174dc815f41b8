"""The RL step: advantages, importance weights, losses, staleness queue, trainer, checkpoints and metrics."""
