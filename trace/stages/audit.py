"""Stage ``audit``: one table with the number format of every tensor in trainer, rollout engine and export.

Rows are all parameters, the experts' two inputs, and K and V. ``expected`` is METHOD.md section 2 as a rule on names
(`trace_rl.models.scopes`); the other columns are *observed*: the operands that trainer and engine multiply with, and
the tensors that an exported file holds (its activations and KV are what its quantization config prescribes). Any
difference fails the stage and prints the rows.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from trace_rl import tracking
from trace_rl.config.experiment import ExperimentConfig
from trace_rl.config.paths import RunPaths
from trace_rl.config.quant import FormatChoice, QuantSpec
from trace_rl.config.rollout import EngineConfig
from trace_rl.formats.static_scales import StaticScales
from trace_rl.guidance.record import ModelDims
from trace_rl.models.checkpoint_io import read_json, replaced_directory, validate_checkpoint, write_json
from trace_rl.models.export import export_packed, packed_scopes, quantization_of
from trace_rl.models.observed_formats import UNSEEN, FormatObserver, activation_format, resident_formats
from trace_rl.models.operands import operand_tap
from trace_rl.models.scopes import BF16_NAME, activation_names, expected_format
from trace_rl.qat.attach import attach
from trace_rl.rollout.engine import Sampling, open_engine
from trace_rl.rollout.torch_engine import TorchEngine
from trace_rl.stages.calibrated_scales import calibrated_scales
from trace_rl.stages.failure import StageFailure

SEED = 11
PROBE_TOKENS = 12
PROBE_SEQUENCES = 8
COLUMNS = ("expected", "trainer", "engine", "export")

Row = dict[str, str]


def run(config: ExperimentConfig, paths: RunPaths, *, formats: FormatChoice | None = None) -> dict[str, object]:
    """Compare all scopes with everything quantized to ``formats``, None for the experiment's.

    Writes ``paths.audit(...)``; StageFailure with the differing rows.
    """
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    started = time.perf_counter()
    quant = QuantSpec(format=formats or config.format)
    out = paths.audit(quant.format.slug)
    with tracking.stage_run(config, stage="audit", paths=paths, wildcards={"format": quant.format.slug}) as tracker:
        validate_checkpoint(paths.checkpoint, quant=quant)
        scales = calibrated_scales(config, paths, quant=quant)
        reference = reference_tensors(paths.checkpoint)
        with replaced_directory(paths.state("audit", quant.format.slug, "export")) as target:
            export_packed(paths.checkpoint, target=target, quant=quant, scales=scales)
            exported = export_formats(target, reference=reference)
        rows = audit_table(
            quant=quant,
            trainer=trainer_formats(paths.checkpoint, reference=reference, quant=quant, scales=scales),
            engine=engine_formats(
                paths.checkpoint, reference=reference, quant=quant, scales=scales, config=config.engine
            ),
            export=exported,
        )
        differences = differing_rows(rows)
        metrics = {
            "format": str(quant.format),
            "engine": config.engine.name,
            "num_checked": len(rows),
            "num_fp4": sum(row["expected"] != BF16_NAME for row in rows),
            "differences": differences,
            "rows": rows,
            "passed": not differences,
            "seconds": time.perf_counter() - started,
        }
        write_json(out, metrics)
        tracker.log_metrics({"num_checked": len(rows), "num_differences": len(differences)})
        tracker.log_artifact(out)
    require_agreement(rows)
    print(f"scope audit: {len(rows)} tensors, {metrics['num_fp4']} of them in {quant.format}, no difference")
    return metrics


def reference_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """The checkpoint's BF16 tensors under transformers' names (experts fused); a tied head is left out."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16, local_files_only=True)
    state = {name: tensor.detach() for name, tensor in model.named_parameters()}
    return dict(sorted(state.items()))


def probe_ids(vocab_size: int) -> list[list[int]]:
    """Random token ids that trainer and engine are run on."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(0, vocab_size, (PROBE_SEQUENCES, PROBE_TOKENS), generator=generator).tolist()


def trainer_formats(
    checkpoint: Path, *, reference: Mapping[str, Tensor], quant: QuantSpec, scales: StaticScales
) -> dict[str, str]:
    """What the trainer's forward multiplies with."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16, local_files_only=True).eval()
    qat = attach(model, quant=quant, scales=scales)
    return observe_trainer(model, qat, reference=reference, quant=quant)


def observe_trainer(model, qat, *, reference: Mapping[str, Tensor], quant: QuantSpec) -> dict[str, str]:
    """The observed formats of an attached model in a forward that rounds to nearest."""
    observer = FormatObserver(model, reference=reference, choice=quant.format)
    input_ids = torch.tensor(probe_ids(model.config.get_text_config().vocab_size))

    def forward() -> None:
        with torch.no_grad(), qat.forward(mode="rtn"):
            model(input_ids=input_ids, use_cache=False)

    observer.run(forward)
    return observer.formats()


def engine_formats(
    checkpoint: Path,
    *,
    reference: Mapping[str, Tensor],
    quant: QuantSpec,
    scales: StaticScales,
    config: EngineConfig,
) -> dict[str, str]:
    """What the rollout engine multiplies with while it generates."""
    engine = open_engine(checkpoint, quant=quant, scales=scales, config=config, capture=True)
    try:
        if isinstance(engine, TorchEngine):
            return observe_torch_engine(engine, reference=reference)
        return observe_vllm_engine(engine, reference=reference)
    finally:
        engine.close()


def generate_probe(engine, *, vocab_size: int) -> None:
    """Prefill and a few decoding steps."""
    engine.generate(
        probe_ids(vocab_size), Sampling(temperature=1.0, max_new_tokens=4, seed=SEED, ignore_eos=True), None
    )


def observe_torch_engine(engine: TorchEngine, *, reference: Mapping[str, Tensor]) -> dict[str, str]:
    """The engine runs a transformers model, so the operand tap sees everything."""
    observer = FormatObserver(engine.model, reference=reference, choice=engine.quant.format)
    observer.run(lambda: generate_probe(engine, vocab_size=engine.model.config.get_text_config().vocab_size))
    return observer.formats()


def observe_vllm_engine(engine, *, reference: Mapping[str, Tensor]) -> dict[str, str]:
    """Weights as resident; FC1 inputs, K and V as captured; FC2 inputs from products with a resident FC2 weight."""
    choice, dims = engine.quant.format, engine.dims
    resident = engine.resident_weights()
    found = resident_formats(resident, reference=reference, format_name=choice.weights)
    names = activation_names(reference, attention_layers=dims.attention_layers)
    by_layer = {(_layer(name), name.rpartition(".")[2]): name for name in names}
    fc2_layers = {
        tensor.untyped_storage().data_ptr(): layer
        for layer, tensor in zip(dims.moe_layers, fc2_weights(resident), strict=True)
    }
    fc2: dict[int, set[str]] = {}

    def on_product(module: str, index: int, left: Tensor, right: Tensor) -> None:
        layer = fc2_layers.get(right.untyped_storage().data_ptr())
        if layer is not None:
            fc2.setdefault(layer, set()).add(activation_format(left, format_name=choice.activations))

    with operand_tap(None, on_product):
        generate_probe(engine, vocab_size=reference[embedding_name(reference)].shape[0])
    for layer in dims.moe_layers:
        found[by_layer[layer, "fc2_input"]] = "/".join(sorted(fc2.get(layer, {UNSEEN})))
    kinds = {"fc1": "fc1_input", "k": "k_cache", "v": "v_cache"}
    for layer, tensor in engine.captured[0]:
        values = torch.cat([operands[layer, tensor] for operands in engine.captured])
        found[by_layer[layer, kinds[tensor]]] = activation_format(values, format_name=choice.of(tensor))
    return found


def _layer(name: str) -> int:
    return int(name.partition(".layers.")[2].partition(".")[0])


def fc2_weights(resident: list[tuple[str, Tensor]]) -> list[Tensor]:
    """The routed experts' second matrices in the order of the layers."""
    return [tensor for name, tensor in resident if name.endswith("w2_weight")]


def embedding_name(reference: Mapping[str, Tensor]) -> str:
    """The token embedding's name."""
    return next(name for name in reference if name.endswith("embed_tokens.weight"))


def export_formats(directory: Path, *, reference: Mapping[str, Tensor]) -> dict[str, str]:
    """Formats of an exported checkpoint: parameters from its files, activations and KV from its config."""
    quant = QuantSpec.model_validate(quantization_of(directory)["quant"])
    dims = ModelDims.from_config(read_json(directory / "config.json"))
    names = activation_names(reference, attention_layers=dims.attention_layers)
    return packed_scopes(directory) | {name: expected_format(name, quant=quant) for name in names}


def audit_table(
    *, quant: QuantSpec, trainer: Mapping[str, str], engine: Mapping[str, str], export: Mapping[str, str]
) -> list[Row]:
    """One row per tensor that any of the three has; ``missing`` where one lacks it."""
    rows = []
    for name in sorted({*trainer, *engine, *export}):
        row = {"name": name, "expected": expected_format(name, quant=quant)}
        for column, found in (("trainer", trainer), ("engine", engine), ("export", export)):
            row[column] = found.get(name, "missing")
        rows.append(row)
    return rows


def differing_rows(rows: list[Row]) -> list[Row]:
    """Rows whose columns are not all equal."""
    return [row for row in rows if len({row[column] for column in COLUMNS}) > 1]


def require_agreement(rows: list[Row]) -> None:
    """Raise StageFailure with the rows that differ."""
    differences = differing_rows(rows)
    if differences:
        raise StageFailure(f"scope audit: {len(differences)} of {len(rows)} tensors differ:\n{row_table(differences)}")


def row_table(rows: list[Row]) -> str:
    """Rows as text."""
    width = max(len(row["name"]) for row in rows)
    lines = [f"{'tensor':{width}}  " + "  ".join(f"{column:9}" for column in COLUMNS)]
    for row in rows:
        lines.append(f"{row['name']:{width}}  " + "  ".join(f"{row[column]:9}" for column in COLUMNS))
    return "\n".join(lines)
