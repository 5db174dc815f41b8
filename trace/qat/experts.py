"""The ``trace`` experts function: fake-quantized routed experts as grouped matmuls.

Registered in transformers' ``ALL_EXPERTS_FUNCTIONS``. The FC1 input is quantized once per token, *before* dispatch, and
shared by the token's experts (the rollout records one vector per token per layer). The FC2 input is quantized per
token and expert, round to nearest on both sides, never guided.

Where it can, this runs as one operator (``trace_rl.kernels.experts``). Otherwise, and where the FC2 input is recorded
or counted, it is composed here: tokens are sorted by expert and every expert's rows are padded with zero rows to a
multiple of 64 (16 for few tokens), because oneDNN builds a new kernel for every new matmul shape, and the multiples
keep the shapes few. Padding all experts to one capacity instead doubles the rows of a realistic routing. Dispatch and
combine are gathers in both directions (the inverse permutation is known), so no backward ever scatters.

Shapes: N tokens, K experts per token, E experts, R padded rows, H hidden, I expert width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.functional import grouped_mm

from trace_rl.kernels.experts import routed_experts_with_gradient

FEW_ROWS, MANY_ROWS = 16, 64


@dataclass(frozen=True)
class Dispatch:
    """Where every (token, expert) pair sits among the rows sorted by expert, and back.

    ``slot`` [N*K]: row of each pair; ``pair`` [R]: pair of each row, N*K for an empty row; ``ends`` int32 [E]: the row
    after each expert's last.
    """

    slot: Tensor
    pair: Tensor
    ends: Tensor
    num_tokens: int
    top_k: int

    @staticmethod
    def plan(ids_NK: Tensor, *, num_experts: int) -> "Dispatch":
        """Sort pairs by expert; ids must lie in [0, num_experts)."""
        num_tokens, top_k = ids_NK.shape
        flat = ids_NK.reshape(-1)
        multiple = MANY_ROWS if flat.numel() >= num_experts * MANY_ROWS else FEW_ROWS
        counts = torch.bincount(flat, minlength=num_experts)
        ends = ((counts + multiple - 1) // multiple * multiple).cumsum(0)
        order = torch.argsort(flat, stable=True)
        expert = flat[order]
        # Every expert's rows start where the previous one's padding ends.
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        first_pair = counts.cumsum(0) - counts
        row = torch.arange(flat.numel(), device=flat.device) + (starts - first_pair)[expert]
        slot = torch.empty_like(flat)
        slot[order] = row
        pair = torch.full((int(ends[-1]),), flat.numel(), dtype=flat.dtype, device=flat.device)
        pair[row] = order
        return Dispatch(slot=slot, pair=pair, ends=ends.to(torch.int32), num_tokens=num_tokens, top_k=top_k)


def _with_zero_row(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_zeros(1, x.shape[1])])


class _Scatter(torch.autograd.Function):
    """[N, H] -> [R, H]: every token copied to its experts' rows, empty rows zero."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.dispatch = dispatch
        token = torch.div(dispatch.pair, dispatch.top_k, rounding_mode="floor")  # the empty pair N*K -> row N
        return _with_zero_row(x).index_select(0, token)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        d = ctx.dispatch
        per_pair = grad.index_select(0, d.slot).view(d.num_tokens, d.top_k, -1)
        return per_pair.sum(dim=1), None  # accumulated in FP32, rounded once


class _Gather(torch.autograd.Function):
    """[R, H] and gate values [N, K] -> [N, H]: sum over the token's experts, accumulated in FP32."""

    @staticmethod
    def forward(ctx: FunctionCtx, out: Tensor, weights: Tensor, dispatch: Dispatch) -> Tensor:
        per_pair = out.index_select(0, dispatch.slot).view(dispatch.num_tokens, dispatch.top_k, -1)
        ctx.save_for_backward(per_pair, weights)
        ctx.dispatch = dispatch
        result = per_pair[:, 0].float() * weights[:, :1].float()
        for j in range(1, dispatch.top_k):
            result.addcmul_(per_pair[:, j].float(), weights[:, j : j + 1].float())
        return result.to(out.dtype)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        per_pair, weights = ctx.saved_tensors
        d = ctx.dispatch
        grad32 = grad.float()
        grad_weights = torch.stack([(per_pair[:, j].float() * grad32).sum(-1) for j in range(d.top_k)], dim=1)
        token = torch.div(d.pair, d.top_k, rounding_mode="floor")
        slot_weight = torch.cat([weights.reshape(-1), weights.new_zeros(1)])[d.pair]
        grad_out = _with_zero_row(grad).index_select(0, token) * slot_weight[:, None].to(grad.dtype)
        return grad_out, grad_weights.to(weights.dtype), None


def trace_experts(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden_states [N,H], top_k_index [N,K], top_k_weights [N,K] -> [N,H] (the transformers experts interface)."""
    qat, layer = self.trace_qat, self.trace_layer
    state = qat.active()
    x = qat.quantize(hidden_states, layer=layer, tensor="fc1")
    if state.recorder is not None:
        state.recorder.on_operand(layer, "fc1", x)
    gate_up, down = qat.expert_weights(self, state)
    if qat.fused_experts and x.device.type == "cpu" and not state.touches_alone(layer=layer, tensor="fc2"):
        return routed_experts_with_gradient(
            x,
            top_k_weights,
            gate_up,
            down,
            top_k_index,
            qat.expert_matrices(self, gate_up, down),
            fmt=qat.formats["fc2"] if state.quantizes("fc2") else None,
            fc2_scale=qat.encode_scale(layer=layer, tensor="fc2") if state.quantizes("fc2") else 1.0,
        )
    dispatch = Dispatch.plan(top_k_index.long(), num_experts=gate_up.shape[0])
    x_RH = _Scatter.apply(x, dispatch)
    h_RI = self._apply_gate(grouped_mm(x_RH, gate_up.transpose(1, 2), offs=dispatch.ends))
    h_RI = qat.quantize(h_RI, layer=layer, tensor="fc2")
    out_RH = grouped_mm(h_RI, down.transpose(1, 2), offs=dispatch.ends)
    return _Gather.apply(out_RH, top_k_weights, dispatch).to(hidden_states.dtype)
