"""The plain PyTorch rollout engine: an oracle, written for clarity.

Incremental decoding with the Hugging Face cache, the same model code as the trainer, attached in ``record`` mode. K and
V are quantized as they enter the cache (``QuantizedCache.update``), never again when they are read: quantizing twice is
not the identity. So every attention read comes from codes that were recorded, as in vLLM.

A packed export runs as what its codes stand for, and cannot be refitted.

Prompts are padded on the left; padding is masked, its positions and records are thrown away. Everything is written to
buffers with one slot per (sequence, position), and a last slot for what nobody will read.

Sampling: every sample has its own generator, seeded by ``sample_seed``, and draws one exponential per vocabulary entry
and step (argmax of p/e is a draw from p), so a sample depends on neither the batch nor the order of requests.
"""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from trace_rl.config.guidance import GuidanceSpec
from trace_rl.config.quant import QuantSpec
from trace_rl.config.rollout import EngineConfig
from trace_rl.errors import UserError
from trace_rl.formats.static_scales import StaticScales
from trace_rl.guidance.record import ModelDims, RecordLayout
from trace_rl.models.checkpoint_io import read_json
from trace_rl.models.export import check_packed, load_packed
from trace_rl.qat.attach import Qat, attach
from trace_rl.qat.attention import flatten_heads, quantize_heads
from trace_rl.rollout.engine import Sampling, check_prompts, check_recording, sample_seed
from trace_rl.trajectory import RolloutBatch, Trajectory


class QuantizedCache(DynamicCache):
    """A cache whose new K and V pass through the quantizer on their way in."""

    def __init__(self, qat: Qat, *, config) -> None:
        super().__init__(config=config)
        self.qat = qat

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Quantize [B, kv_heads, T, D] states, store them, and return everything stored."""
        key_states = quantize_heads(self.qat, key_states, layer=layer_idx, tensor="k")
        value_states = quantize_heads(self.qat, value_states, layer=layer_idx, tensor="v")
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class SlotRecorder:
    """Writes what a forward rounded to into slot buffers; ``slots`` [B*T] says where each row belongs."""

    def __init__(self, *, num_slots: int, layout: RecordLayout | None, dims: ModelDims, experts: bool, capture: bool):
        self.layout = layout
        self.slots = torch.empty(0, dtype=torch.int64)
        self.seconds = 0.0
        self.record = None if layout is None else torch.zeros(num_slots, layout.row_bytes, dtype=torch.uint8)
        self.expert_ids = None
        if experts:
            self.expert_ids = torch.full((num_slots, len(dims.moe_layers), dims.top_k), -1, dtype=torch.int16)
        self.operands: dict[tuple[int, str], Tensor] | None = {} if capture else None
        self.num_slots = num_slots

    def on_codes(self, layer: int, tensor: str, codes: Tensor, block_scale: Tensor) -> None:
        """Keep the codes of guided tensors."""
        if self.layout is not None and self.layout.field(layer, tensor) is not None:
            started = time.perf_counter()
            self.layout.write(self.record, self.slots, layer, tensor, codes, block_scale)
            self.seconds += time.perf_counter() - started

    def on_experts(self, moe_index: int, ids: Tensor) -> None:
        """Keep the router's choice."""
        if self.expert_ids is not None:
            self.expert_ids[self.slots, moe_index] = ids.reshape(len(self.slots), -1).to(torch.int16)

    def on_operand(self, layer: int, tensor: str, x: Tensor) -> None:
        """Keep the matmul operand itself, for the test that recorded equals used."""
        if self.operands is not None:
            key = (layer, tensor)
            if key not in self.operands:
                self.operands[key] = x.new_zeros(self.num_slots, x.shape[1])
            self.operands[key][self.slots] = x


class TorchEngine:
    """See the module docstring; implements ``RolloutEngine``.

    With ``capture``, ``captured`` holds per trajectory of the last ``generate`` the tensors the engine multiplied with:
    ``{(layer, tensor): [n - 1, columns]}``; K and V are read back from the cache.
    """

    def __init__(
        self,
        checkpoint_dir: Path,
        *,
        quant: QuantSpec,
        scales: StaticScales | None,
        config: EngineConfig,
        capture: bool = False,
    ) -> None:
        self.quant, self.scales, self.config, self.capture = quant, scales, config, capture
        self.packed = "quantization_config" in read_json(checkpoint_dir / "config.json")
        if self.packed:
            check_packed(checkpoint_dir, quant=quant)
            self.model = load_packed(checkpoint_dir).eval()
        else:
            self.model = AutoModelForCausalLM.from_pretrained(checkpoint_dir, dtype=torch.bfloat16).eval()
        # The weights of an export are what its codes stand for; rounding them again would move them.
        rounds = quant.model_copy(update={"weights": False}) if self.packed else quant
        self.qat = attach(self.model, quant=rounds, scales=scales)
        self.dims = self.qat.dims
        self.eos_ids = _eos_ids(self.model, checkpoint_dir)
        self.policy_version = 0
        self.captured: list[dict[tuple[int, str], Tensor]] = []

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        recording: GuidanceSpec | None,
        *,
        record_experts: bool = True,
    ) -> RolloutBatch:
        """Sample ``sampling.n`` responses per prompt, in batches of ``max_num_seqs``."""
        check_prompts(prompts, sampling=sampling, max_model_len=self.config.max_model_len)
        if recording is not None:
            check_recording(recording, quant=self.quant)
        layout = None if recording is None else self.qat.record_layout(recording)
        started = time.perf_counter()
        requests = [(p, s) for p in range(len(prompts)) for s in range(sampling.n)]
        trajectories: list[Trajectory] = []
        record_s = 0.0
        self.captured = []
        for first in range(0, len(requests), self.config.max_num_seqs):
            chunk = requests[first : first + self.config.max_num_seqs]
            done, seconds = self._decode(prompts, chunk, sampling=sampling, layout=layout, experts=record_experts)
            trajectories += done
            record_s += seconds
        for trajectory in trajectories:
            trajectory.check()
        return RolloutBatch(
            trajectories=trajectories,
            recording=recording,
            quant_hash=self.quant.hash(),
            policy_version=self.policy_version,
            seconds={"generate": time.perf_counter() - started - record_s, "record": record_s},
            stats={"generated_tokens": float(sum(t.num_tokens - t.prompt_len for t in trajectories))},
        )

    @torch.no_grad()
    def load_policy(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy a complete policy under Hugging Face names; tied weights may be left out."""
        if self.packed:
            raise UserError("load_policy: this engine runs an export; open it on a BF16 checkpoint to give it others")
        own = dict(self.model.named_parameters())
        missing = set(own)
        for name, tensor in tensors.items() if isinstance(tensors, dict) else tensors:
            if name not in own:
                if name == "lm_head.weight" and self.model.config.tie_word_embeddings:
                    continue
                raise UserError(f"load_policy: {name} is no parameter of {type(self.model).__name__}")
            if tensor.shape != own[name].shape:
                raise UserError(
                    f"load_policy: {name} has shape {tuple(tensor.shape)}, expected {tuple(own[name].shape)}"
                )
            own[name].copy_(tensor)
            missing.discard(name)
        if missing:
            raise UserError(f"load_policy: the policy lacks {sorted(missing)[:3]} ({len(missing)} tensors); pass all")
        self.qat.invalidate_weights()
        self.policy_version = version

    @torch.no_grad()
    def score(self, token_ids: Sequence[Sequence[int]], temperature: float) -> list[Tensor]:
        """Log-probabilities of tokens 1..n-1 of each sequence, one prefill, no cache."""
        results: list[Tensor] = []
        for first in range(0, len(token_ids), self.config.max_num_seqs):
            chunk = [list(ids) for ids in token_ids[first : first + self.config.max_num_seqs]]
            length = max(len(ids) for ids in chunk)
            input_ids = torch.zeros(len(chunk), length, dtype=torch.int64)
            mask = torch.zeros(len(chunk), length, dtype=torch.int64)
            for row, ids in enumerate(chunk):
                input_ids[row, : len(ids)] = torch.tensor(ids)
                mask[row, : len(ids)] = 1
            with self.qat.forward(mode="rtn"):
                logits = self.model(input_ids=input_ids, attention_mask=mask, use_cache=False).logits
            logprobs = log_probs(logits[:, :-1], temperature=temperature)
            chosen = logprobs.gather(2, input_ids[:, 1:, None]).squeeze(2)
            results += [chosen[row, : len(ids) - 1].clone() for row, ids in enumerate(chunk)]
        return results

    def close(self) -> None:
        """Nothing outlives the object."""

    @torch.no_grad()
    def _decode(
        self,
        prompts: Sequence[Sequence[int]],
        requests: list[tuple[int, int]],
        *,
        sampling: Sampling,
        layout: RecordLayout | None,
        experts: bool,
    ) -> tuple[list[Trajectory], float]:
        batch = len(requests)
        prompt_lens = torch.tensor([len(prompts[p]) for p, _ in requests])
        longest = int(prompt_lens.max())
        span = longest + sampling.max_new_tokens
        recorder = SlotRecorder(
            num_slots=batch * span + 1, layout=layout, dims=self.dims, experts=experts, capture=self.capture
        )
        generators = [torch.Generator().manual_seed(sample_seed(sampling.seed, p, s)) for p, s in requests]
        tokens = torch.zeros(batch, span, dtype=torch.int64)  # left aligned: column = position
        for row, (p, _) in enumerate(requests):
            tokens[row, : prompt_lens[row]] = torch.tensor(list(prompts[p]))
        lengths = prompt_lens.clone()
        logprobs = torch.zeros(batch, sampling.max_new_tokens)
        top_k = min(sampling.top_logprobs, self.model.config.vocab_size)
        top_ids = torch.zeros(batch, sampling.max_new_tokens, top_k, dtype=torch.int32)
        top_logprobs = torch.zeros(batch, sampling.max_new_tokens, top_k)
        finished = torch.zeros(batch, dtype=torch.bool)
        stopped = torch.zeros(batch, dtype=torch.bool)
        eos = torch.tensor(self.eos_ids)

        cache = QuantizedCache(self.qat, config=self.model.config)
        positions = torch.arange(longest) - (longest - prompt_lens)[:, None]  # negative on the left padding
        inputs = torch.where(positions >= 0, tokens.gather(1, positions.clamp(min=0)), 0)
        mask = positions >= 0
        base = torch.arange(batch)[:, None] * span
        for step in range(sampling.max_new_tokens):
            keep = (positions >= 0) & ~finished[:, None]
            recorder.slots = torch.where(keep, base + positions, batch * span).reshape(-1)
            with self.qat.forward(mode="record", recorder=recorder, kv_in_cache=True):
                logits = self.model(
                    input_ids=inputs,
                    attention_mask=mask.long(),
                    position_ids=positions.clamp(min=0),
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                ).logits[:, 0]
            logp = log_probs(logits, temperature=sampling.temperature)
            chosen = _sample(logp, generators=generators, greedy=sampling.temperature == 0)
            live = ~finished
            tokens[live, lengths[live]] = chosen[live]
            logprobs[live, step] = logp.gather(1, chosen[:, None]).squeeze(1)[live]
            if top_k:
                top = logp.topk(top_k, dim=1)
                top_ids[live, step], top_logprobs[live, step] = top.indices[live].to(torch.int32), top.values[live]
            lengths += live
            hit = torch.isin(chosen, eos) & live & (not sampling.ignore_eos)
            stopped |= hit
            finished |= hit
            if bool(finished.all()):
                break
            inputs, positions = chosen[:, None], (lengths - 1)[:, None]
            mask = torch.cat([mask, torch.ones(batch, 1, dtype=torch.bool)], dim=1)

        trajectories = []
        for row, (p, s) in enumerate(requests):
            rows = slice(row * span, row * span + int(lengths[row]) - 1)
            response = slice(int(lengths[row] - prompt_lens[row]))
            trajectories.append(
                Trajectory(
                    prompt_index=p,
                    sample_index=s,
                    token_ids=tokens[row, : lengths[row]].to(torch.int32),
                    prompt_len=int(prompt_lens[row]),
                    logprobs=logprobs[row, response].clone(),
                    expert_ids=None if recorder.expert_ids is None else recorder.expert_ids[rows].clone(),
                    record=None if recorder.record is None else recorder.record[rows].clone(),
                    policy_version=self.policy_version,
                    finish_reason="stop" if stopped[row] else "length",
                    top_ids=top_ids[row, response].clone() if top_k else None,
                    top_logprobs=top_logprobs[row, response].clone() if top_k else None,
                )
            )
            if self.capture:
                operands = {key: values[rows].clone() for key, values in recorder.operands.items()}
                pad = longest - int(prompt_lens[row])
                for layer in self.dims.attention_layers:
                    for tensor, stored in (("k", cache.layers[layer].keys), ("v", cache.layers[layer].values)):
                        one = flatten_heads(stored[row : row + 1])
                        operands[layer, tensor] = one[pad : pad + int(lengths[row]) - 1].clone()
                self.captured.append(operands)
        return trajectories, recorder.seconds


def log_probs(logits: Tensor, *, temperature: float) -> Tensor:
    """FP32 log-softmax at the sampling temperature; greedy decoding (0) reports temperature 1."""
    return torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)


def _sample(logp: Tensor, *, generators: list[torch.Generator], greedy: bool) -> Tensor:
    if greedy:
        return logp.argmax(dim=-1)
    noise = torch.stack([torch.empty(logp.shape[1]).exponential_(generator=g) for g in generators])
    return (logp - noise.log()).argmax(dim=-1)


def _eos_ids(model, checkpoint_dir: Path) -> list[int]:
    for config in (model.generation_config, model.config):
        eos = config.eos_token_id
        if eos is not None:
            return list(eos) if isinstance(eos, (list, tuple)) else [eos]
    raise UserError(f"{checkpoint_dir}: neither config.json nor generation_config.json has an eos_token_id; set one")
