"""Stage ``checkpoint``: the policy before RL, whatever its source, as one validated directory with a manifest.

    cold_start        trained here from scratch (resumable: its state lies outside the output)
    local             a directory, hard-linked or copied
    hub               downloaded at a pinned revision
    smollm2_upcycled  SmolLM2 from an installed package, upcycled to a mixture of experts

The checkpoint is validated before the output appears, and the output appears whole or not at all. ``manifest.json``
holds source, digest of the weights, sizes and dimensions; later stages compare it.
"""

import time
from pathlib import Path

from trace_rl import tracking
from trace_rl.config.checkpoint import ColdStart, HubCheckpoint, LocalCheckpoint, UpcycledCheckpoint
from trace_rl.config.experiment import ExperimentConfig
from trace_rl.config.paths import RunPaths
from trace_rl.config.quant import QuantSpec
from trace_rl.models.checkpoint_io import (
    MANIFEST,
    build_manifest,
    copy_checkpoint,
    replaced_directory,
    validate_checkpoint,
    write_json,
)
from trace_rl.stages import cold_start

QUANT = QuantSpec()
"""Blocks of 16, the smallest; `calibrate` checks the experiment's own format."""


def run(config: ExperimentConfig, paths: RunPaths) -> dict[str, object]:
    """Write the checkpoint directory; returns its manifest. UserError for an unsuitable checkpoint."""
    started = time.perf_counter()
    with tracking.stage_run(config, stage="checkpoint", paths=paths) as tracker:
        found = fetch(config, paths)
        validate_checkpoint(found, quant=QUANT)
        with replaced_directory(paths.checkpoint) as target:
            copy_checkpoint(found, target=target)
            info = validate_checkpoint(target, quant=QUANT)
            manifest = build_manifest(info, source=config.checkpoint.model_dump(mode="json"))
            write_json(target / MANIFEST, manifest)
        tracker.log_metrics({name: manifest[name] for name in ("num_parameters", "weight_bytes")})
        tracker.set_tags({"weights_digest": manifest["weights_digest"]})
    print(
        f"checkpoint: {manifest['model_type']}, {manifest['num_parameters'] / 1e6:.2f} M parameters, weights "
        f"{manifest['weights_digest'][:16]}, {time.perf_counter() - started:.0f} s"
    )
    return manifest


def fetch(config: ExperimentConfig, paths: RunPaths) -> Path:
    """Make or find the checkpoint; returns a directory outside the output."""
    source = config.checkpoint
    if isinstance(source, LocalCheckpoint):
        return Path(source.path).expanduser()
    if isinstance(source, ColdStart):
        # It tells its own unfinished states apart, by recipe and data.
        work = paths.state("checkpoint", source.source)
        work.parent.mkdir(parents=True, exist_ok=True)
        cold_start.run(config, work)
        return work
    work = paths.state("checkpoint", source.source, source.digest())
    if isinstance(source, HubCheckpoint):
        # Imported here: the hub client is needed by this source only.
        from trace_rl.models import hub

        return hub.download(source, target=work)
    assert isinstance(source, UpcycledCheckpoint)
    # Imported here: reads a model package that other sources do without.
    from trace_rl.stages import upcycling

    upcycling.run(source, work, data=paths.data)
    return work
