"""Hugging Face checkpoint directories: validated before use, written whole or not at all.

A checkpoint that cannot work is refused before anything is written, with one sentence that says what is wrong, where,
and what to do: a missing file or shard, an architecture whose router rule is not known, a tokenizer without eos, a
tokenizer larger than the model's vocabulary, an FP4 dimension that is not a multiple of the format's block.

The *weights digest* is over tensors (name, dtype, shape, bytes; sorted by name), not over files: resharding keeps it,
changing one value or one name does not.
"""

import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from trace_rl.config.blocks import check_blocks
from trace_rl.config.quant import QuantSpec
from trace_rl.errors import UserError
from trace_rl.models.families import family_of

MANIFEST = "manifest.json"
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class CheckpointInfo:
    """What the validation learnt about a checkpoint."""

    directory: Path
    model_type: str
    dims: dict[str, int]
    """The FP4 dimensions: hidden_size, head_dim, expert_width."""
    vocab_size: int
    tokenizer_size: int
    eos_token_id: int
    weight_files: tuple[str, ...]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; UserError when the file is missing or damaged."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; a Hugging Face checkpoint directory needs it")
    try:
        value = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); fetch the file again") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def weight_map(directory: Path) -> dict[str, str]:
    """Tensor name -> file name of a checkpoint's safetensors; UserError for missing or damaged files."""
    index = directory / INDEX
    if index.is_file():
        mapping = read_json(index).get("weight_map")
        if not isinstance(mapping, dict) or not mapping:
            raise UserError(f"{index}: no weight_map; fetch the file again")
        files = sorted(set(mapping.values()))
        missing = [name for name in files if not (directory / name).is_file()]
        if missing:
            raise UserError(
                f"{directory}: {len(missing)} of {len(files)} weight files missing, first {missing[0]}; fetch them"
            )
    else:
        files = sorted(path.name for path in directory.glob("*.safetensors"))
        if not files:
            raise UserError(f"{directory}: no *.safetensors weights; convert the checkpoint with save_pretrained")
        mapping = None
    held: dict[str, str] = {}
    for name in files:
        try:
            with safe_open(directory / name, framework="pt") as file:
                held.update(dict.fromkeys(file.keys(), name))
        except SafetensorError as error:
            raise UserError(
                f"{directory / name}: damaged or incomplete safetensors file ({error}); fetch it again"
            ) from error
    if mapping is not None:
        lost = sorted(set(mapping) - set(held))
        if lost:
            raise UserError(
                f"{directory}: {len(lost)} tensors of {INDEX} are in no file, first {lost[0]}; fetch the shards again"
            )
    return held


def iterate_tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a checkpoint sorted by name, one in memory at a time."""
    mapping = weight_map(directory)
    files = {name: safe_open(directory / name, framework="pt") for name in sorted(set(mapping.values()))}
    for name in sorted(mapping):
        yield name, files[mapping[name]].get_tensor(name)


def tensor_digest(tensors: Iterator[tuple[str, Tensor]]) -> str:
    """XXH3-128 over (name, dtype, shape, bytes) in the order given."""
    digest = xxhash.xxh3_128()
    for name, tensor in tensors:
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def weights_digest(directory: Path) -> str:
    """The digest that names a checkpoint's weights, independent of sharding."""
    return tensor_digest(iterate_tensors(directory))


def fp4_dimensions(config: Any) -> dict[str, int]:
    """Reduction dimensions of the FP4 operands: FC1 input, FC2 input, one head of K and V."""
    heads = config.num_attention_heads
    return {
        "hidden_size": config.hidden_size,
        "expert_width": getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
    }


def check_tokenizer(directory: Path, *, vocab_size: int) -> tuple[int, int]:
    """(number of tokens, eos id) of the directory's tokenizer, which must end and fit into ``vocab_size``."""
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(f"{directory}: no tokenizer ({' or '.join(TOKENIZER_FILES)}); copy it beside the weights")
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"{directory}: the tokenizer has no eos token, so no response could end; set eos_token in "
            "tokenizer_config.json"
        )
    # Not len(tokenizer): ids may have holes, and the largest id is what must have an embedding row.
    vocabulary = tokenizer.get_vocab()
    largest = max(vocabulary.values())
    if largest >= vocab_size:
        token = next(token for token, index in vocabulary.items() if index == largest)
        raise UserError(
            f"{directory}: vocabulary mismatch: the tokenizer's token {token!r} has id {largest}, the model has "
            f"{vocab_size} embeddings; use the tokenizer the model was trained with"
        )
    return len(tokenizer), int(tokenizer.eos_token_id)


def validate_checkpoint(directory: Path, *, quant: QuantSpec) -> CheckpointInfo:
    """Check a checkpoint directory; UserError with one clear sentence for the first thing that is wrong."""
    if not directory.is_dir():
        raise UserError(f"{directory}: no such checkpoint directory; check the path")
    raw = read_json(directory / "config.json")
    if "model_type" not in raw:
        raise UserError(f"{directory / 'config.json'}: no model_type; not a Hugging Face model configuration")
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True).get_text_config()
    except ValueError as error:
        raise UserError(f"{directory / 'config.json'}: {str(error).splitlines()[0]}") from error
    family_of(config)
    mapping = weight_map(directory)
    dims = fp4_dimensions(config)
    check_blocks(dims, quant=quant, where=str(directory))
    rows = _embedding_rows(directory, mapping=mapping)
    if rows != config.vocab_size:
        raise UserError(
            f"{directory}: vocabulary mismatch: config.json says vocab_size {config.vocab_size}, the embedding has "
            f"{rows} rows; weights and config.json belong to different models"
        )
    size, eos = check_tokenizer(directory, vocab_size=config.vocab_size)
    return CheckpointInfo(
        directory=directory,
        model_type=config.model_type,
        dims=dims,
        vocab_size=config.vocab_size,
        tokenizer_size=size,
        eos_token_id=eos,
        weight_files=tuple(sorted(set(mapping.values()))),
    )


def _embedding_rows(directory: Path, *, mapping: dict[str, str]) -> int:
    names = [name for name in mapping if name.endswith("embed_tokens.weight")]
    if len(names) != 1:
        raise UserError(
            f"{directory}: expected one embed_tokens.weight among the tensors, found {len(names)}; fetch them again"
        )
    with safe_open(directory / mapping[names[0]], framework="pt") as file:
        return int(file.get_slice(names[0]).get_shape()[0])


def build_manifest(info: CheckpointInfo, *, source: dict[str, Any]) -> dict[str, Any]:
    """What ``manifest.json`` holds: where the weights come from, their digest, sizes and dimensions."""
    count, size = 0, 0
    for _, tensor in iterate_tensors(info.directory):
        count += tensor.numel()
        size += tensor.numel() * tensor.element_size()
    files = sorted(path for path in info.directory.iterdir() if path.is_file() and path.name != MANIFEST)
    return {
        "source": source,
        "weights_digest": weights_digest(info.directory),
        "model_type": info.model_type,
        "dims": info.dims,
        "num_parameters": count,
        "weight_bytes": size,
        "vocab_size": info.vocab_size,
        "tokenizer_size": info.tokenizer_size,
        "eos_token_id": info.eos_token_id,
        "files": {path.name: path.stat().st_size for path in files},
    }


def finite_or_none(value: Any) -> Any:
    """The value with None for every number that JSON has no word for: NaN and the infinities."""
    if isinstance(value, dict):
        return {key: finite_or_none(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite_or_none(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, value: Any, *, sort_keys: bool = True) -> None:
    """Write JSON to a temporary file, fsync, rename: readers see the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w") as file:
        json.dump(value, file, indent=1, sort_keys=sort_keys, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


@contextmanager
def replaced_directory(target: Path) -> Iterator[Path]:
    """A temporary directory that takes the place of ``target`` when the block succeeds and vanishes when it fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for path in temporary.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        old = target.with_name(f".{target.name}.{os.getpid()}.old")
        if target.exists():
            target.replace(old)
        temporary.replace(target)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def copy_checkpoint(source: Path, *, target: Path, link: bool = True) -> None:
    """Copy the files of ``source`` into ``target``; ``link`` hard-links where the file system allows it."""
    for path in sorted(source.iterdir()):
        if not path.is_file() or path.name == MANIFEST:
            continue
        if link:
            try:
                os.link(path.resolve(), target / path.name)
                continue
            except OSError:  # another file system, or links not permitted
                pass
        shutil.copyfile(path, target / path.name)
