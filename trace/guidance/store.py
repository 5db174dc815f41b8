"""Guidance shards: records on disk, for rollouts that a trainer reads later or on another machine.

A shard is a safetensors file (readable by other tools). Its metadata carries the policy version, the quantization hash
and an xxHash of everything: names, dtypes, shapes, bytes and the other metadata. It appears by write-to-temp, fsync,
rename, so a reader sees a whole shard or none. Reading one that is damaged, or from another policy version or
quantization, is an error: guidance of one quantization applied to another would train silently wrong.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from trace_rl.errors import UserError

SHARD_FORMAT = "trace_rl-guidance-1"


@dataclass(frozen=True)
class GuidanceShard:
    """Named tensors (record rows, token counts, ...) and what they belong to."""

    tensors: dict[str, Tensor]
    policy_version: int
    quant_hash: str


def write_shard(path: str | Path, tensors: dict[str, Tensor], *, policy_version: int, quant_hash: str) -> None:
    """Write tensors atomically; an existing shard of this name is replaced."""
    path = Path(path)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {"format": SHARD_FORMAT, "policy_version": str(policy_version), "quant_hash": quant_hash}
    metadata["xxh3_128"] = _checksum(tensors, metadata)
    temporary = path.with_name(f"{path.name}.partial-{os.getpid()}")
    with open(temporary, "wb") as handle:
        handle.write(save(tensors, metadata=metadata))
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(temporary, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read_shard(path: str | Path, *, policy_version: int | None = None, quant_hash: str | None = None) -> GuidanceShard:
    """Read and verify a shard; policy_version and quant_hash, where given, must match."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no guidance shard at {path}: the rollout that writes it has not finished; run it again")
    try:
        with safe_open(path, framework="pt") as handle:
            metadata = dict(handle.metadata() or {})
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 (not a dict)
    except SafetensorError as error:
        raise UserError(f"guidance shard {path} is damaged ({error}): delete it and run the rollout again") from error
    checksum = metadata.pop("xxh3_128", None)
    if metadata.get("format") != SHARD_FORMAT:
        raise UserError(f"{path} is not a guidance shard of this version ({SHARD_FORMAT}): run the rollout again")
    if checksum != _checksum(tensors, metadata):
        raise UserError(f"guidance shard {path} is damaged (checksum differs): delete it and run the rollout again")
    shard = GuidanceShard(tensors, int(metadata["policy_version"]), metadata["quant_hash"])
    if policy_version is not None and shard.policy_version != policy_version:
        raise UserError(
            f"guidance shard {path} was recorded by policy version {shard.policy_version}, expected {policy_version}: "
            "use the shard of this step, or run the rollout again"
        )
    if quant_hash is not None and shard.quant_hash != quant_hash:
        raise UserError(
            f"guidance shard {path} was recorded under quantization {shard.quant_hash}, the trainer uses {quant_hash}: "
            "two quantizations must not mix; run the rollout again with this configuration"
        )
    return shard


def _checksum(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    digest = xxhash.xxh3_128()
    digest.update(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
