"""A tiny random policy with data in the places of a run: what the stage tests start from."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from trace_rl.config.experiment import BenchConfig, CalibrateConfig, ExperimentConfig, ParityConfig, TrackingConfig
from trace_rl.config.paths import RunPaths
from trace_rl.config.quant import QuantSpec
from trace_rl.config.rollout import EngineConfig, SamplingConfig
from trace_rl.models.checkpoint_io import MANIFEST, build_manifest, validate_checkpoint, write_json
from trace_rl.models.miniature import build_model, miniature_config, save_checkpoint
from trace_rl.models.tokenizer import build_tokenizer
from trace_rl.stages import calibrate
from trace_rl.tasks.dataset import build_splits
from trace_rl.tasks.problem import write_jsonl

SIZES = {
    "num_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "max_position_embeddings": 128,
}


@dataclass(frozen=True)
class TinyRun:
    """A run before calibration, or after it when the fixture says so."""

    config: ExperimentConfig
    paths: RunPaths


def make_policy(directory: Path, *, seed: int = 0) -> Path:
    """A random Qwen3-MoE checkpoint directory. Its experts are enlarged, so that they matter in a random model."""
    tokenizer = build_tokenizer(model_max_length=128)
    config = miniature_config(tokenizer, **SIZES)
    state = build_model(config, seed=seed).state_dict()
    state = {name: tensor * (4.0 if "down_proj" in name else 1.0) for name, tensor in state.items()}
    save_checkpoint(directory, config=config, state=state, tokenizer=tokenizer)
    return directory


def make_run(root: Path, *, engine: str = "torch") -> TinyRun:
    """Checkpoint, data and configuration under ``root``."""
    config = ExperimentConfig(
        run="tiny",
        engine=EngineConfig(name=engine, max_model_len=64, max_num_seqs=64, kv_cache_gib=0.1),
        sampling=SamplingConfig(max_new_tokens=12),
        calibrate=CalibrateConfig(num_prompts=12),
        parity=ParityConfig(num_prompts=12),
        bench=BenchConfig(batch_sizes=(4,), output_lengths=(4, 8), repeats=2, num_sequences=4, cost_repeats=1),
        tracking=TrackingConfig(enabled=False),
    )
    paths = RunPaths(run="tiny", root=root)
    make_policy(paths.checkpoint)
    info = validate_checkpoint(paths.checkpoint, quant=QuantSpec())
    write_json(paths.checkpoint / MANIFEST, build_manifest(info, source={"source": "local", "path": "tiny"}))
    paths.data.mkdir()
    problems = build_splits(seed=0, train_problems=4, rl_problems=16, eval_problems=4, code_share=0.0)["rl"]
    write_jsonl(paths.data / "rl.jsonl", problems=problems)
    return TinyRun(config, paths)


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory) -> TinyRun:
    """A calibrated run on the PyTorch engine, shared; tests must not change its files."""
    run = make_run(tmp_path_factory.mktemp("tiny"))
    calibrate.run(run.config, run.paths)
    return run


@pytest.fixture
def new_run(tmp_path) -> Callable[..., TinyRun]:
    """Make a run of one's own, not calibrated."""
    return lambda **options: make_run(tmp_path, **options)


class Tracked:
    """MLflow in a folder of the test's."""

    def __call__(self, config: ExperimentConfig, folder: Path) -> ExperimentConfig:
        """The experiment, logged there."""
        return config.model_copy(update={"tracking": TrackingConfig(uri=f"sqlite:///{folder / 'mlflow.db'}")})

    def artifact(self, folder: Path, *, name: str) -> str:
        """The one file that the run of this name logged beside its settings."""
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
        (experiment,) = [found for found in client.search_experiments() if found.name == TrackingConfig().experiment]
        (run,) = client.search_runs([experiment.experiment_id], f"tags.`mlflow.runName` = '{name}'")
        (file,) = [item.path for item in client.list_artifacts(run.info.run_id) if item.path != "config.json"]
        return Path(client.download_artifacts(run.info.run_id, file, str(folder))).read_text()


@pytest.fixture(scope="session")
def tracked() -> Iterator[Tracked]:
    """Turns MLflow on for a stage, away from where the environment says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        yield Tracked()


@pytest.fixture(scope="session")
def run_factory() -> Callable[..., TinyRun]:
    """Make a run under a given root, not calibrated."""
    return make_run


@pytest.fixture(scope="session")
def policy_factory() -> Callable[..., Path]:
    """Write a random policy into a directory."""
    return make_policy
