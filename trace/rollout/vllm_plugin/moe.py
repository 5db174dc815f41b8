"""Routed experts in FP4 (or BF16), recorded, with weights that stay in place.

Weights: quantize-dequantize per expert and matrix at load and at every refit, ``xhat`` kept as BF16 in the parameter
itself (gate and up share one encode scale). FC1 input: once per token, before dispatch, with the layer's static scale;
this is the guided tensor. FC2 input: per token and expert, round to nearest. Weights and inputs may have different
formats (W4A8: MXFP4 and MXFP8). With ``quant.residual`` both operands also carry their rounded residual
(``trace_rl.formats.residual``); what is recorded stays the rounded input alone.

Where it can, a layer runs as one operator (``trace_rl.kernels.experts``), the trainer's too. Otherwise the experts run
as two batched matmuls over rows padded to a common capacity from a coarse ladder: oneDNN compiles a kernel for every
new shape, and a Python loop over experts is several times slower at these sizes.

Shapes: T tokens, K experts per token, E experts, C capacity, H hidden, I expert width.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation, apply_moe_activation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.utils import set_weight_attrs

from trace_rl import formats
from trace_rl.errors import UserError
from trace_rl.formats.hscale import HScale
from trace_rl.kernels import dispatch as kernels
from trace_rl.kernels.experts import ExpertMatrices, routed_experts
from trace_rl.kernels.experts import can_run as experts_can_run
from trace_rl.qat.compensator import Compensator
from trace_rl.rollout.vllm_plugin import LOAD_FORMAT

if TYPE_CHECKING:
    from trace_rl.rollout.vllm_plugin.quantization import TraceConfig


def bucketed_capacity(count: int) -> int:
    """``count`` rounded up to a multiple of 16 and of an eighth of its power of two: at most 12.5 % waste."""
    step = max(16, 1 << max(0, count.bit_length() - 4))
    return max(step, -(-count // step) * step)


class TraceMoEMethod(FusedMoEMethodBase):
    """The MoE method of one layer."""

    def __init__(self, moe: FusedMoEConfig, *, config: "TraceConfig", layer_id: int) -> None:
        super().__init__(moe)
        if moe.has_bias or not moe.is_act_and_mul or moe.swiglu_limit is not None:
            raise UserError(f"layer {layer_id}: experts with biases, a clamp or without a gate are not supported")
        if config.packed and get_current_vllm_config().load_config.load_format != LOAD_FORMAT:
            raise UserError(f"packed expert weights are read by load_format {LOAD_FORMAT!r} only; pass it to vLLM")
        if moe.moe_parallel_config.tp_size > 1 or moe.moe_parallel_config.use_ep:
            raise UserError("FP4 experts run on one device; set engine.tensor_parallel_size to 1")
        self.quant = config.quant
        self.weight_format = formats.get(self.quant.format.weights)
        self.input_format = formats.get(self.quant.format.activations)
        self.shadow = config.shadow
        self.layer_id = layer_id
        self.weights_hold_codes = config.packed
        """The loader wrote dequantized codes: the first quantization is skipped."""
        self.fused = False
        self.matrices: ExpertMatrices | None = None
        """The weights as the fused operator reads them, packed again at every refit."""
        self.fc1_scale = config.scales.get("fc1", layer_id) if self.quant.activations else 1.0
        self.fc2_scale = config.scales.get("fc2", layer_id) if self.quant.activations else 1.0
        self.fc1_compensator, self.fc2_compensator = (
            Compensator.of(self.quant, scales=config.scales, fmt=self.input_format, tensor=tensor, layer=layer_id)
            for tensor in ("fc1", "fc2")
        )

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: object,
    ) -> None:
        """Register ``w13_weight`` [E, 2I, H] and ``w2_weight`` [E, H, I], gate rows before up rows."""
        shapes = {
            "w13_weight": (num_experts, 2 * intermediate_size_per_partition, hidden_size),
            "w2_weight": (num_experts, hidden_size, intermediate_size_per_partition),
        }
        for name, shape in shapes.items():
            weight = torch.nn.Parameter(torch.empty(shape, dtype=params_dtype), requires_grad=False)
            layer.register_parameter(name, weight)
            set_weight_attrs(weight, extra_weight_attrs)

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> FusedMoEQuantConfig:
        """vLLM's own kernels are not used; theirs is the unquantized description."""
        return FusedMoEQuantConfig.make()

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Quantize the weights just loaded, unless they came from packed codes."""
        if layer.apply_router_weight_on_input:
            raise UserError(f"layer {self.layer_id}: gate values applied to the input are not supported")
        if not self.weights_hold_codes:
            self.check_quantizes()
        self.fused = layer.activation is MoEActivation.SILU and self._can_fuse(layer.w2_weight)
        self.quantize_weights(layer)
        self.weights_hold_codes = False

    def check_quantizes(self) -> None:
        """UserError for a weight format that only an export can hold."""
        if self.quant.weights and isinstance(self.weight_format, HScale):
            raise UserError(
                f"layer {self.layer_id}: hscale weights come from an export, whose scales were searched; load what "
                "`trace-rl quantize` wrote and leave it as it is, or choose another format"
            )

    def quantize_weights(self, layer: RoutedExperts) -> None:
        """Replace both weights in place by their quantized values, one encode scale per expert and matrix."""
        if self.quant.weights and not self.weights_hold_codes:
            for weight in (layer.w13_weight.data, layer.w2_weight.data):
                weight.copy_(kernels.fake_quant_experts(weight, fmt=self.weight_format, check=False))
        if self.fused:
            self.matrices = ExpertMatrices.pack(layer.w13_weight.data, layer.w2_weight.data, backward=False)

    def _can_fuse(self, down: Tensor) -> bool:
        if self.fc2_compensator is not None:  # the operator rounds the FC2 input inside
            return False
        fmt = self.input_format if self.quant.activations else None
        return down.dtype == torch.bfloat16 and experts_can_run(
            hidden_size=down.shape[1], expert_width=down.shape[2], device=down.device, fmt=fmt
        )

    def apply(
        self,
        layer: RoutedExperts,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: object | None,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """x [T, H], topk_weights and topk_ids [T, K] -> [T, H]. Shared experts are run by vLLM's runner."""
        ids_TK = topk_ids.long()
        x_TH = self._quantize_input(x, ids_TK)
        if self.matrices is not None:
            fmt = self.input_format if self.quant.activations else None
            return routed_experts(x_TH, topk_weights, ids_TK, self.matrices, fmt=fmt, fc2_scale=self.fc2_scale)
        num_tokens, top_k = ids_TK.shape
        num_experts = layer.w13_weight.shape[0]

        flat = ids_TK.reshape(-1)
        counts = torch.bincount(flat, minlength=num_experts)
        capacity = bucketed_capacity(int(counts.max()))
        order = torch.argsort(flat, stable=True)
        expert = flat[order]
        slot_of_sorted = torch.arange(flat.numel(), device=flat.device) + (
            torch.arange(num_experts, device=flat.device) * capacity - counts.cumsum(0) + counts
        ).index_select(0, expert)
        padded = x_TH.new_zeros(num_experts * capacity, x_TH.shape[1])
        padded.index_copy_(0, slot_of_sorted, x_TH.index_select(0, order // top_k))

        gate_up = torch.bmm(padded.view(num_experts, capacity, -1), layer.w13_weight.transpose(1, 2))
        hidden = self._activate(layer, gate_up.view(num_experts * capacity, -1))
        if self.quant.activations:
            hidden = self._quantize_hidden(hidden)
        out = torch.bmm(hidden.view(num_experts, capacity, -1), layer.w2_weight.transpose(1, 2))

        slot = torch.empty_like(flat).index_copy_(0, order, slot_of_sorted)
        per_pair = out.view(num_experts * capacity, -1).index_select(0, slot).view(num_tokens, top_k, -1)
        return torch.bmm(topk_weights.to(torch.float32).unsqueeze(1), per_pair.float()).squeeze(1).to(x.dtype)

    def _quantize_hidden(self, hidden: Tensor) -> Tensor:
        """The FC2 operand (BF16), [rows, I]; rows of zeros stay zeros."""
        if self.fc2_compensator is not None:
            return self.fc2_compensator.quantize(hidden)
        return kernels.fake_quant(hidden, self.fc2_scale, fmt=self.input_format, check=False)

    @staticmethod
    def _activate(layer: RoutedExperts, gate_up: Tensor) -> Tensor:
        """act(gate) * up, [rows, 2I] -> [rows, I]; SiLU rounds where transformers does, and is three times faster."""
        if layer.activation is MoEActivation.SILU:
            gate, up = gate_up.chunk(2, dim=1)
            return F.silu(gate).mul_(up)
        return apply_moe_activation(layer.activation, gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2), gate_up)

    def _quantize_input(self, x: Tensor, ids_TK: Tensor) -> Tensor:
        """The FC1 operand (BF16), recorded with the expert ids at the tokens' KV slots."""
        shadow = self.shadow
        records_fc1 = shadow.records(self.layer_id, "fc1")
        slots = shadow.slots() if records_fc1 or shadow.experts is not None else None
        used = x
        if self.quant.activations:
            target = None if slots is None else shadow.target(self.layer_id, "fc1", slots=slots)
            compensator = self.fc1_compensator
            exact = x if compensator is None else x.float()  # the same codes, and Q(X) is not rounded to BF16
            used = kernels.quantize_record(
                exact, self.fc1_scale, fmt=self.input_format, target=target, check=False
            ).xhat
            if compensator is not None:
                used = compensator.operand(x, used)
        if slots is not None:
            if shadow.experts is not None:
                shadow.write_experts(self.layer_id, slots=slots, ids=ids_TK)
            if shadow.captured_fc1 is not None:
                shadow.captured_fc1[slots, shadow.moe_index[self.layer_id]] = used
        return used
