"""Attach FP4 fake quantization and routing replay to a transformers model, through its registries only.

    qat = attach(model, quant=spec, scales=scales)
    with qat.forward(mode="guided", guidance=(rows, layout), valid=valid, expert_ids=ids):
        logits = model(input_ids, attention_mask=mask).logits

Weights: per expert one encode scale for gate and up together and one for down, from the BF16 parameter, never from an
FP32 master. Their fake quantization is computed once and reused until the parameter changes, which is seen by its
version counter: write parameters under ``torch.no_grad()`` (optimizers do), or call ``invalidate_weights`` after
writing through ``.data``, which bypasses the counter.

Activations and K, V: static encode scales per layer. Every matmul operand is ``xhat.to(bfloat16)``, as in the rollout.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trace_rl import formats
from trace_rl.config.guidance import GuidanceSpec
from trace_rl.config.quant import SCOPE_OF, QuantSpec
from trace_rl.errors import UserError
from trace_rl.formats.quantized import CodewordFormat, with_codewords
from trace_rl.formats.static_scales import StaticScales
from trace_rl.guidance.align import align_codes
from trace_rl.guidance.bits import unpack_bits
from trace_rl.guidance.record import ModelDims, RecordLayout
from trace_rl.guidance.scales import recover_scales
from trace_rl.kernels import dispatch as kernels
from trace_rl.kernels import experts as fused
from trace_rl.kernels.experts import ExpertMatrices
from trace_rl.models.checkpoint_io import check_blocks
from trace_rl.models.families import decoder_layers, family_of, moe_layers
from trace_rl.qat.attention import trace_attention, trace_mask
from trace_rl.qat.collector import Collector
from trace_rl.qat.compensator import Compensator
from trace_rl.qat.context import ForwardState, Mode, Recorder
from trace_rl.qat.experts import trace_experts
from trace_rl.qat.norms import replace_norms
from trace_rl.qat.routing_replay import check_expert_ids, router_hook
from trace_rl.qat.straight_through import straight_through

NAME = "trace"
"""Under this name the implementations are registered in transformers."""


class Qat:
    """The handle of an attached model: runs forwards at a stated rounding."""

    def __init__(self, model: nn.Module, *, quant: QuantSpec, scales: StaticScales | None) -> None:
        self.quant = quant
        self.scales = scales
        self.dims = ModelDims.from_config(model.config)
        self.family = family_of(model.config)
        self.renormalizes = self.family.renormalizes(model.config)
        self.weight_format = formats.get(quant.format.weights)
        self.formats = {tensor: formats.get(quant.format.of(tensor)) for tensor in SCOPE_OF}
        """Formats of fc1, fc2, k and v; K and V may have another than the expert inputs."""
        self.replayed_fraction = 1.0
        """Replayed (valid position, MoE layer) pairs of the last forward with expert ids; must be 1.0."""
        self.seconds = {"activations": 0.0, "weights": 0.0}
        """Wall seconds spent quantizing since the handle was made, K and V among the activations (CPU: kernels of an
        accelerator run after the clock has stopped). Without the FC2 inputs where the routed experts are one operator:
        it rounds them inside."""
        self.recovered = {"blocks": 0, "uncertain": 0}
        """Block scales recovered from two recorded bits since the handle was made, and those known to be uncertain."""
        self._state: ForwardState | None = None
        self._weights: dict[int, tuple[tuple[int, int, int], Tensor, Tensor]] = {}
        self._matrices: dict[int, tuple[tuple[int, ...], ExpertMatrices]] = {}
        self._compensators: dict[tuple[int, str], Compensator | None] = {}
        self.fused_experts = False
        """Whether the routed experts run as one operator (``trace_rl.kernels.experts``)."""

    @contextmanager
    def forward(
        self,
        *,
        mode: Mode,
        guidance: tuple[Tensor, RecordLayout] | None = None,
        valid: Tensor | None = None,
        expert_ids: Tensor | None = None,
        replay: bool = True,
        collect: Collector | None = None,
        recorder: Recorder | None = None,
        kv_in_cache: bool = False,
    ) -> Iterator[ForwardState]:
        """Everything the model computes inside the block is at ``mode``.

        ``guidance``: (rows uint8 [B, T, row_bytes], their layout), needed by mode ``guided`` and ignored by no other:
        passing it elsewhere is an error. ``valid`` bool [B, T]: positions that have a record, needed with guidance,
        expert ids or a collector. ``expert_ids`` integer [B, T, moe_layers, K]: routing to replay, or without
        ``replay`` only to compare the model's own with.
        """
        if self._state is not None:
            raise UserError("qat.forward is already active on this model; finish the first block before the next")
        if (mode == "guided") != (guidance is not None):
            raise UserError(f"mode {mode!r} {'needs' if guidance is None else 'does not take'} guidance rows")
        needs_valid = guidance is not None or expert_ids is not None or collect is not None
        if needs_valid and valid is None:
            raise UserError("guidance, expert ids and collectors need `valid`: which positions have a record")
        if (mode == "record") != (recorder is not None):
            raise UserError("mode 'record' and a recorder go together")
        state = ForwardState(mode=mode, quant=self.quant, collector=collect, recorder=recorder, kv_in_cache=kv_in_cache)
        if needs_valid:
            state.valid = valid.reshape(-1)
            state.invalid_index = (~state.valid).nonzero().squeeze(1)
        if guidance is not None:
            rows, layout = guidance
            state.rows, state.layout = rows.reshape(-1, rows.shape[-1]), layout
            self._check_rows(state)
        if expert_ids is not None:
            state.expert_ids, state.replay = self._checked_ids(expert_ids, valid=state.valid), replay
        self._state = state
        try:
            yield state
        finally:
            self._state = None
        if expert_ids is not None and replay:
            self.replayed_fraction = len(state.replayed_layers) / len(self.dims.moe_layers)
            assert self.replayed_fraction == 1.0, f"replayed only MoE layers {sorted(state.replayed_layers)}"

    def active(self) -> ForwardState:
        """The state of the running forward. Raises ``UserError`` outside ``with qat.forward(...)``."""
        if self._state is None:
            raise UserError("this model has FP4 training attached; call it inside `with qat.forward(mode=...)`")
        return self._state

    def record_layout(self, spec: GuidanceSpec) -> RecordLayout:
        """How an engine with this model's formats records ``spec``."""
        return RecordLayout.build(spec, self.dims, block_size=formats.block_sizes(self.quant.format))

    def encode_scale(self, *, layer: int, tensor: str) -> float:
        """The static encode scale of ``fc1``, ``fc2``, ``k`` or ``v`` in a layer."""
        return self.scales.get(tensor, layer)

    def quantize(self, x: Tensor, *, layer: int, tensor: str) -> Tensor:
        """Fake-quantize activation rows [N, C] (rows in [B*T] order for fc1, k, v); gradient identity.

        Returns ``x`` itself where the forward does not quantize this tensor; a collector then still compares what
        rounding to nearest would have given.
        """
        state = self.active()
        if not state.quantizes(tensor):
            if state.collector is not None and state.collector.wants(layer=layer, tensor=tensor) and self.scales:
                self._nearest(x, state=state, layer=layer, tensor=tensor, scale=self.scales.get(tensor, layer))
            return x
        scale = self.encode_scale(layer=layer, tensor=tensor)
        with self._timed("activations"), torch.no_grad():
            field = state.layout.field(layer, tensor) if state.mode == "guided" else None
            if field is not None:
                xhat = self._guided(x, state=state, layer=layer, tensor=tensor, scale=scale)
            elif (compensator := self._compensator(layer=layer, tensor=tensor)) is not None:
                exact = self._nearest(x.float(), state=state, layer=layer, tensor=tensor, scale=scale)
                xhat = compensator.operand(x, exact)
            else:
                xhat = self._nearest(x, state=state, layer=layer, tensor=tensor, scale=scale)
        return straight_through(x, xhat)

    def _compensator(self, *, layer: int, tensor: str) -> Compensator | None:
        """What a rollout engine on this model adds to an expert input; methods give a trainer nothing of the kind."""
        if (layer, tensor) not in self._compensators:
            self._compensators[layer, tensor] = Compensator.of(
                self.quant, scales=self.scales, fmt=self.formats[tensor], tensor=tensor, layer=layer
            )
        return self._compensators[layer, tensor]

    def expert_weights(self, experts: nn.Module, state: ForwardState) -> tuple[Tensor, Tensor]:
        """Gate_up [E, 2I, H] and down [E, H, I] as the forward multiplies with them; gradient identity."""
        gate_up, down = experts.gate_up_proj, experts.down_proj
        if state.mode == "off" or not self.quant.weights:
            return gate_up, down
        key = self._weights_key(experts)
        cached = self._weights.get(experts.trace_layer)
        if cached is None or cached[0] != key:
            with self._timed("weights"), torch.no_grad():
                cached = (key, self.fake_quant_weight(gate_up), self.fake_quant_weight(down))
            self._weights[experts.trace_layer] = cached
        return straight_through(gate_up, cached[1]), straight_through(down, cached[2])

    def expert_matrices(self, experts: nn.Module, gate_up: Tensor, down: Tensor) -> ExpertMatrices:
        """The two matrices of ``expert_weights`` as the operator reads them, packed again when they change."""
        backward = torch.is_grad_enabled()
        key = (gate_up.data_ptr(), gate_up._version, down.data_ptr(), down._version, self._weights_key(experts))
        cached = self._matrices.get(experts.trace_layer)
        if cached is None or cached[0] != key or (backward and cached[1].down_turned is None):
            cached = (key, ExpertMatrices.pack(gate_up, down, backward=backward))
            self._matrices[experts.trace_layer] = cached
        return cached[1]

    @staticmethod
    def _weights_key(experts: nn.Module) -> tuple[int, int, int]:
        gate_up, down = experts.gate_up_proj, experts.down_proj
        return gate_up._version, down._version, gate_up.data_ptr()

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - start

    def fake_quant_weight(self, weight_ERC: Tensor) -> Tensor:
        """Expert matrices rounded to the format, one encode scale per expert, in the weight's dtype."""
        return kernels.fake_quant_experts(weight_ERC, fmt=self.weight_format, check=False)

    def invalidate_weights(self) -> None:
        """Forget cached weight quantization; needed after writing parameters through ``.data``."""
        self._weights.clear()
        self._matrices.clear()

    def _nearest(self, x: Tensor, *, state: ForwardState, layer: int, tensor: str, scale: float) -> Tensor:
        counts = state.collector is not None and state.collector.wants(layer=layer, tensor=tensor)
        fmt = self.formats[tensor]
        records = state.recorder is not None and isinstance(fmt, CodewordFormat)
        if not records and not counts:
            return kernels.fake_quant(x, scale, fmt=fmt, check=False)
        codes, block_scale, xhat = with_codewords(fmt).quantize_codes(x, scale)
        if records:
            state.recorder.on_codes(layer, tensor, codes, block_scale)
        if counts:
            state.collector.on_codes(
                fmt=fmt,
                layer=layer,
                tensor=tensor,
                x=x,
                codes=codes,
                block_scale=block_scale,
                encode_scale=scale,
                valid=state.valid,
            )
        return xhat.to(x.dtype)

    def _guided(self, x: Tensor, *, state: ForwardState, layer: int, tensor: str, scale: float) -> Tensor:
        spec = state.layout.spec
        fmt = with_codewords(self.formats[tensor])
        counts = state.collector is not None and state.collector.wants(layer=layer, tensor=tensor)
        planes, block_scale = state.layout.packed(state.rows, layer, tensor)
        if spec.scale_bits != 8:
            own_scale = fmt.block_scales(x, scale)
            block_scale, uncertain = recover_scales(block_scale, spec.scale_bits, own_scale, largest=fmt.largest_scale)
            detected = int(uncertain[state.valid].sum())
            self.recovered["uncertain"] += detected
            self.recovered["blocks"] += int(state.valid.sum()) * uncertain.shape[-1]
            if state.collector is not None:
                state.collector.on_scale_recovery(
                    layer=layer, tensor=tensor, recovered=block_scale, valid=state.valid, detected=detected
                )
        if counts:
            guide = unpack_bits(planes, spec.bits, x.shape[-1])
            codes = align_codes(x, block_scale, guide, spec.bits, scale, gate=spec.gate, fmt=fmt)
            state.collector.on_codes(
                fmt=fmt,
                layer=layer,
                tensor=tensor,
                x=x,
                codes=codes,
                block_scale=block_scale,
                encode_scale=scale,
                valid=state.valid,
            )
        return kernels.guided_fake_quant(
            x,
            planes,
            block_scale,
            scale,
            fmt=fmt,
            bits=spec.bits,
            gate=spec.gate,
            valid=state.valid if state.invalid_index.numel() else None,
            check=False,
        )

    def _check_rows(self, state: ForwardState) -> None:
        if state.rows.dtype != torch.uint8 or state.rows.shape[1] != state.layout.row_bytes:
            raise UserError(
                f"guidance rows are {state.rows.dtype} with {state.rows.shape[1]} bytes, the layout has uint8 rows of "
                f"{state.layout.row_bytes} bytes; the rollout was recorded with another guidance spec"
            )
        unquantized = sorted({f.tensor for f in state.layout.fields if not state.quantizes(f.tensor)})
        if unquantized:
            raise UserError(
                f"guidance guides {', '.join(unquantized)}, which the trainer does not quantize; drop the tensor from "
                "guidance.tensors or switch its scope on"
            )

    def _checked_ids(self, expert_ids: Tensor, *, valid: Tensor) -> Tensor:
        ids = expert_ids.reshape(-1, *expert_ids.shape[-2:]).long()
        check_expert_ids(
            ids,
            valid_N=valid,
            num_experts=self.dims.num_experts,
            num_layers=len(self.dims.moe_layers),
            top_k=self.dims.top_k,
        )
        return ids


def attach(model: nn.Module, *, quant: QuantSpec, scales: StaticScales | None = None) -> Qat:
    """Switch a transformers causal language model to the ``trace`` implementations and return its handle.

    The handle is also ``model.trace_qat``. Attaching again replaces the previous handle. Raises ``UserError`` for an
    unknown family, missing static scales, unsupported expert layouts, and dimensions that are no multiple of the block.
    """
    if quant.format_of("weights") == "hscale":
        raise UserError("hscale searches the scales of a finished policy; a model that trains needs another format")
    qat = Qat(model, quant=quant, scales=scales)
    layers = moe_layers(model)
    _check_rotary(model)
    _check_scales(qat)
    _check_dims(model, qat, inter=layers[0].experts.down_proj.shape[-1])
    ALL_EXPERTS_FUNCTIONS.register(NAME, trace_experts)
    ALL_ATTENTION_FUNCTIONS.register(NAME, trace_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, trace_mask)
    model.set_experts_implementation(NAME)
    model.set_attn_implementation(NAME)
    for moe_index, moe in enumerate(layers):
        if moe.experts.has_bias or moe.experts.is_transposed or not moe.experts.is_concatenated:
            raise UserError(f"{moe.experts_name}: biased, transposed or interleaved expert weights are not supported")
        fresh = not hasattr(moe.router, "trace_qat")
        moe.experts.trace_qat = moe.router.trace_qat = qat
        moe.experts.trace_layer = moe.router.trace_layer = moe.layer
        moe.router.trace_moe_index = moe_index
        if fresh:
            moe.router.register_forward_hook(router_hook)
    for layer in decoder_layers(model)[1]:
        if hasattr(layer, "self_attn"):
            layer.self_attn.trace_qat = qat
    replace_norms(model, class_name=qat.family.norm_class)
    qat.fused_experts = _can_fuse(model, qat, layers[0].experts)
    model.trace_qat = qat
    return qat


def _can_fuse(model: nn.Module, qat: Qat, experts: nn.Module) -> bool:
    down = experts.down_proj
    return (
        model.config.hidden_act in ("silu", "swish")
        and qat.quant.residual == "none"  # the operator rounds the FC2 input inside
        and down.dtype == torch.bfloat16
        and fused.can_run(
            hidden_size=qat.dims.hidden_size,
            expert_width=down.shape[-1],
            device=down.device,
            fmt=qat.formats["fc2"] if qat.quant.activations else None,
        )
    )


def _check_rotary(model: nn.Module) -> None:
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and buffer.dtype != torch.float32:
            raise UserError(
                f"{name} is {buffer.dtype}: model.to(dtype) rounded the rotary frequencies, which the rollout keeps in "
                "float32. Load with from_pretrained(dtype=...) or cast with trace_rl.models.families.cast_parameters"
            )


def _check_scales(qat: Qat) -> None:
    needed = {"fc1": qat.dims.moe_layers, "fc2": qat.dims.moe_layers}
    needed |= {"k": qat.dims.attention_layers, "v": qat.dims.attention_layers}
    for tensor, layer_ids in needed.items():
        if not getattr(qat.quant, SCOPE_OF[tensor]):
            continue
        if qat.scales is None:
            raise UserError("FP4 activations and KV need calibrated static scales; run `trace-rl calibrate` first")
        missing = sorted(set(layer_ids) - set(getattr(qat.scales, tensor)))
        if missing:
            raise UserError(f"static scales lack {tensor} of layers {missing}; calibrate this model again")


def _check_dims(model: nn.Module, qat: Qat, *, inter: int) -> None:
    dims = {"hidden_size": qat.dims.hidden_size, "expert_width": inter, "head_dim": qat.dims.head_dim}
    check_blocks(dims, quant=qat.quant, where=type(model).__name__)
