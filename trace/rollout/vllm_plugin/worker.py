"""The worker: gathers what was recorded before its KV slots are reused, refits, switches the recording.

A finished request's blocks are free for the next step. vLLM tells the worker which requests finished at the start of
that step, before anything is written: that is where their rows are gathered, by the block table the model runner
still holds. The last requests of a call are gathered by :meth:`TraceWorkerMixin.trace_collect`.

Preemption: a preempted request loses its blocks and is computed again on return, in other batches and so with other
rounding; its record is that of the last computation, which its later tokens read, while its earlier tokens were
sampled from the first. Preemptions are counted; size the KV cache so that there are none.
"""

import numpy as np
import torch
from torch import Tensor
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.cpu_worker import CPUWorker

from trace_rl.errors import UserError
from trace_rl.guidance.record import RecordLayout
from trace_rl.rollout.vllm_plugin.capture import CacheReader
from trace_rl.rollout.vllm_plugin.shadow import Shadow


class TraceWorkerMixin:
    """What the engine calls by ``collective_rpc``, on top of a vLLM worker with the V1 model runner."""

    def trace_prepare(self, *, top_k: int, capture: bool) -> None:
        """Once, after the KV cache exists: find the anchor layer and the MoE layers."""
        self.trace_shadow: Shadow = self.vllm_config.quant_config.shadow
        self.trace_top_k = top_k
        self.trace_num_preemptions = 0
        self._gathered: dict[str, dict[str, Tensor]] = {}
        self._done: set[str] = set()
        groups = self.model_runner.kv_cache_config.kv_cache_groups
        full = [i for i, group in enumerate(groups) if isinstance(group.kv_cache_spec, FullAttentionSpec)]
        if not full:
            raise UserError("recording needs a full-attention layer: its KV slots name the tokens")
        self._group = full[0]
        self._block_size = groups[self._group].kv_cache_spec.block_size
        self._num_slots = self.model_runner.kv_cache_config.num_blocks * self._block_size
        shadow = self.trace_shadow
        shadow.anchor = groups[self._group].layer_names[0]
        weights = self.model_runner.get_model().trace_weights
        shadow.moe_index = {layer_id: index for index, layer_id in enumerate(sorted(weights.experts))}
        self._cache_reader = None
        if capture:
            hidden = next(iter(weights.experts.values())).hidden_size
            shape = (self._num_slots, len(shadow.moe_index), hidden)
            shadow.captured_fc1 = torch.zeros(shape, dtype=torch.bfloat16, device=self.device)
            self._cache_reader = CacheReader(self.model_runner, layer_names=groups[self._group].layer_names)

    def trace_record(self, layout: RecordLayout | None, record_experts: bool) -> None:
        """Record this layout (None: no guidance) and routing from now on; the prefix cache must have been reset."""
        self.trace_shadow.configure(
            layout=layout,
            num_slots=self._num_slots,
            num_expert_ids=self.trace_top_k if record_experts else 0,
            device=self.device,
        )

    def trace_begin(self) -> None:
        """Start of a call: what earlier calls left behind is not gathered again."""
        self._gathered = {}
        self._done = set(self.model_runner.requests)
        self.trace_num_preemptions = 0

    def trace_collect(self) -> tuple[dict[str, dict[str, Tensor]], int]:
        """End of a call: rows by request id, and the number of preemptions."""
        self._gather(self.model_runner.requests)
        gathered, self._gathered = self._gathered, {}
        return gathered, self.trace_num_preemptions

    def trace_score_temperature(self, temperature: float | None) -> None:
        """Divide the logits by this (prompt log-probabilities ignore the sampling temperature); None: do not."""
        processor = getattr(self.model_runner.get_model(), "logits_processor", None)
        if temperature not in (None, 1.0) and getattr(processor, "soft_cap", None) is not None:
            raise UserError("score: this model caps its logits, so it can only be scored at temperature 1")
        self.trace_shadow.score_temperature = temperature

    def trace_refit(self, tensors: list[tuple[str, Tensor]]) -> None:
        """New weights in place."""
        self.model_runner.get_model().trace_weights.refit(tensors)

    def trace_resident_weights(self) -> list[tuple[str, Tensor]]:
        """Every parameter as the model holds it, by reference."""
        return [(name, parameter.data) for name, parameter in self.model_runner.get_model().named_parameters()]

    def execute_model(self, scheduler_output: SchedulerOutput) -> object:
        """One step; first gather the requests that finished in the last one."""
        if scheduler_output.finished_req_ids:
            self._gather(scheduler_output.finished_req_ids)
        if scheduler_output.preempted_req_ids:
            self.trace_num_preemptions += len(scheduler_output.preempted_req_ids)
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: object) -> object:
        """Sample; rows whose prefill is still incomplete do so without their generator.

        vLLM samples them too, throws the token away and rewinds the generator, which CPU generators cannot do.
        """
        batch = self.model_runner.input_batch
        incomplete = np.nonzero(self.model_runner.discard_request_mask.np[: batch.num_reqs])[0].tolist()
        kept = {row: batch.generators.pop(row) for row in incomplete if row in batch.generators}
        output = super().sample_tokens(grammar_output)
        batch.generators.update(kept)
        return output

    def _gather(self, request_ids: object) -> None:
        """Copy the rows of these requests, in one go; row i belongs to token i, the last token has none."""
        shadow = self.trace_shadow
        sources = {"record": shadow.rows, "experts": shadow.experts, "fc1": shadow.captured_fc1}
        sources = {name: source for name, source in sources.items() if source is not None}
        if not sources:
            return
        requests = self.model_runner.requests
        todo = [rid for rid in request_ids if rid in requests and rid not in self._done]
        if not todo:
            return
        self._done.update(todo)
        parts = []
        for rid in todo:
            blocks = np.asarray(requests[rid].block_ids[self._group], dtype=np.int64)
            positions = np.arange(min(requests[rid].num_tokens - 1, blocks.size * self._block_size))
            parts.append(blocks[positions // self._block_size] * self._block_size + positions % self._block_size)
        lengths = [part.size for part in parts]
        slots = torch.from_numpy(np.concatenate(parts)).to(self.device)
        rows = {name: source.index_select(0, slots) for name, source in sources.items()}
        if self._cache_reader is not None:
            rows |= self._cache_reader.read(slots)
        split = {name: value.split(lengths) for name, value in rows.items()}
        for index, rid in enumerate(todo):
            self._gathered[rid] = {name: pieces[index] for name, pieces in split.items()}


class TraceCPUWorker(TraceWorkerMixin, CPUWorker):
    """vLLM's CPU worker with the above."""
