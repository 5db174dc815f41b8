"""Any forward of the trainer over one recorded batch.

The rollout keeps whole codes of all layers (`FULL`) and the routing; what a lesser method would have recorded is cut
out of that, so that bits, layers, tensors, scales and routing replay are varied on the very same tokens, and what two
forwards differ in is what was varied. Nothing here computes gradients or touches weights.

Rounding to nearest *on the rollout's scale* is not a mode of its own: it is guidance whose gate is closed
(`RECORDED_SCALE`), which separates choosing the scale from choosing the code. A tiny gate will not do: it still follows
values exactly on a rounding boundary, and with MXFP4's power-of-two scales BF16 values often are.

Tensors in a format without codewords are neither recorded nor followed; where guidance has none left, it is QAT.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trace_rl.config.guidance import FULL, GuidanceSpec, recordable
from trace_rl.guidance.align import CLOSED
from trace_rl.qat.attach import Qat
from trace_rl.qat.collector import Collector
from trace_rl.qat.context import Mode
from trace_rl.rl.batch import pack
from trace_rl.rl.diagnostics import with_layout
from trace_rl.rl.trainer import response_logprobs
from trace_rl.trajectory import RolloutBatch

MICRO_BATCH = 64
RECORDED_SCALE = FULL.model_copy(update={"gate": CLOSED})


class SomeLayers(GuidanceSpec):
    """Guidance of any set of layers, which no method asks for: it shows what a layer is worth."""

    chosen: tuple[int, ...]
    """The guided layers, in place of ``layers``."""

    def layer_ids(self, num_layers: int) -> tuple[int, ...]:
        assert all(0 <= layer < num_layers for layer in self.chosen), (self.chosen, num_layers)
        return self.chosen


@dataclass(frozen=True)
class Forward:
    """One way for the trainer to compute the log-probs of recorded tokens."""

    mode: Mode
    """``off``, ``rtn`` or ``guided``."""
    guidance: GuidanceSpec | None = None
    """What is followed in mode ``guided``."""
    replay: bool = True
    """Whether the recorded routing is replayed (R3)."""

    def without_replay(self) -> "Forward":
        return Forward(self.mode, self.guidance, replay=False)


BF16_FORWARD = Forward("off")
QAT = Forward("rtn")
FOLLOW_SCALE = Forward("guided", RECORDED_SCALE)
TRACE = Forward("guided", GuidanceSpec())
TRACE_GATED = Forward("guided", GuidanceSpec(gate=0.05))
TRACE_ALL = Forward("guided", GuidanceSpec(layers="all"))
TRACE_FULL = Forward("guided", FULL)


@dataclass(frozen=True)
class Tokens:
    """What a forward says of the response tokens, in the order of the trajectories (float32 [N] both)."""

    logprobs: Tensor
    entropy: Tensor


class Recorded:
    """One rollout batch, ready for any forward."""

    def __init__(self, batch: RolloutBatch, *, temperature: float, pad_id: int) -> None:
        self.batch = batch
        self.temperature = temperature
        self.pad_id = pad_id
        self.rollout_logprobs = torch.cat([t.logprobs for t in batch.trajectories])
        """float32 [N]: what the engine reported as it sampled."""
        lengths = torch.tensor([t.logprobs.numel() for t in batch.trajectories])
        self.clusters = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        """int64 [N]: the trajectory of each response token."""
        self.positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
        """int64 [N]: its position in the response, from 0."""

    def response_scores(self, scores: list[Tensor]) -> Tensor:
        """float32 [N]: the response part of what ``engine.score`` returned for this batch's sequences."""
        pairs = zip(self.batch.trajectories, scores, strict=True)
        return torch.cat([score[trajectory.prompt_len - 1 :] for trajectory, score in pairs])

    @property
    def sequences(self) -> list[list[int]]:
        """Prompt and response token ids, as ``engine.score`` takes them."""
        return [t.token_ids.tolist() for t in self.batch.trajectories]

    @torch.no_grad()
    def run(self, forward: Forward, *, model: PreTrainedModel, qat: Qat, collector: Collector | None = None) -> Tokens:
        """Log-probs and entropy under ``forward``; a collector compares codes with the rollout's as it goes."""
        source = None if self.batch.recording is None else qat.record_layout(self.batch.recording)
        followed = recordable(forward.guidance, quant=qat.quant) if forward.guidance else None
        target = None if followed is None else qat.record_layout(followed)
        parts = []
        for start in range(0, len(self.batch.trajectories), MICRO_BATCH):
            whole = pack(self.batch.trajectories[start : start + MICRO_BATCH], pad_id=self.pad_id)
            if collector is not None and source is not None:
                collector.reference = (whole.record, source)
            packed = whole if target in (None, source) else with_layout(whole, source=source, target=target)
            with qat.forward(
                mode="rtn" if forward.mode == "guided" and target is None else forward.mode,
                guidance=None if target is None else (packed.record, target),
                valid=packed.valid,
                expert_ids=packed.expert_ids if forward.replay else None,
                collect=collector,
            ):
                logits = model(input_ids=packed.input_ids, attention_mask=packed.valid.long(), use_cache=False).logits
            parts.append(response_logprobs(logits, batch=packed, temperature=self.temperature))
        return Tokens(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
