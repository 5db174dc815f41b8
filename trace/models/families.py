"""Model families: what the method must know about an architecture beyond its config.

Routing replay recomputes gate values from the live router logits, so it must know how the router turns logits into
gate values; nothing in a Hugging Face config says that reliably (``norm_topk_prob`` exists only where the family made
it an option). The table below states it per ``model_type``, and where the parts sit in the module tree. A family that
is not listed is refused: a wrong renormalization would train quietly and wrongly.

    rule "renormalized"    softmax over the selected logits (equal to softmax over all, select, divide by the sum)
    rule "plain"           softmax over all logits, select, no division
    rule "norm_topk_prob"  one of the two, by that config field

Families whose experts carry biases, or whose cache is not plain K and V per head (MLA), are not listed on purpose.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from trace_rl.errors import UserError


@dataclass(frozen=True)
class Family:
    """One architecture family.

    ``router_output`` names the router's outputs in order; ``router_name`` is the router's module name inside the MoE
    block, whose experts are always called ``experts``.
    """

    model_type: str
    gate_rule: Literal["renormalized", "plain", "norm_topk_prob"]
    moe_block: str = "mlp"
    router_name: str = "gate"
    router_output: tuple[str, str, str] = ("logits", "weights", "ids")
    norm_class: str | None = None
    """transformers' class of RMS norms that compute ``weight * normalized.to(dtype)``; None where they do not."""

    def renormalizes(self, config: Any) -> bool:
        """Whether the gate values of the selected experts sum to one."""
        if self.gate_rule == "norm_topk_prob":
            return bool(config.norm_topk_prob)
        return self.gate_rule == "renormalized"


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("qwen3_moe", "norm_topk_prob", norm_class="Qwen3MoeRMSNorm"),
        Family("qwen2_moe", "norm_topk_prob", norm_class="Qwen2MoeRMSNorm"),
        Family("olmoe", "norm_topk_prob", norm_class="OlmoeRMSNorm"),
        Family("mixtral", "renormalized", norm_class="MixtralRMSNorm"),
        Family("qwen3_next", "norm_topk_prob"),
        Family("qwen3_5_moe_text", "renormalized"),
        Family(
            "granitemoe",
            "renormalized",
            moe_block="block_sparse_moe",
            router_name="router",
            router_output=("ids", "weights", "logits"),
            norm_class="GraniteMoeRMSNorm",
        ),
    )
}


def family_of(config: Any) -> Family:
    """The family of a Hugging Face config. Raises ``UserError`` for an architecture the table does not hold."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise UserError(
            f"model_type {config.model_type!r} is not supported for FP4 training: how its router computes gate values "
            f"is not known here. Supported: {', '.join(sorted(FAMILIES))}"
        )
    return family


@dataclass(frozen=True)
class MoeLayer:
    """One MoE layer of a model: its index, router and experts modules, and their dotted names."""

    layer: int
    router_name: str
    router: nn.Module
    experts_name: str
    experts: nn.Module


def decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The dotted name and the list of a causal language model's decoder layers."""
    name = f"{model.base_model_prefix}.layers"
    return name, model.get_submodule(name)


def moe_layers(model: nn.Module) -> tuple[MoeLayer, ...]:
    """The MoE layers of a causal language model in order; dense layers are skipped."""
    family = family_of(model.config)
    prefix, layers = decoder_layers(model)
    found = []
    for index, layer in enumerate(layers):
        block = getattr(layer, family.moe_block, None)
        if block is None or not hasattr(block, "experts"):
            continue
        block_name = f"{prefix}.{index}.{family.moe_block}"
        found.append(
            MoeLayer(
                layer=index,
                router_name=f"{block_name}.{family.router_name}",
                router=getattr(block, family.router_name),
                experts_name=f"{block_name}.experts",
                experts=block.experts,
            )
        )
    if not found:
        raise UserError(f"the {config_name(model)} model has no MoE layer; FP4 training here quantizes routed experts")
    return tuple(found)


def config_name(model: nn.Module) -> str:
    """The architecture's name for messages."""
    return type(model).__name__


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast the parameters in place, never the buffers, and return the model.

    ``model.to(torch.bfloat16)`` also rounds the rotary ``inv_freq`` buffers, which every engine keeps in FP32:
    positions then turn by wrong angles (tests/test_replay.py: mean |dlogp| 0.004 instead of below 0.0001).
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def quantized_parameters(model: nn.Module) -> tuple[str, ...]:
    """Names of the parameters in the weight scope: the routed experts' fused projections, nothing else."""
    return tuple(f"{moe.experts_name}.{name}" for moe in moe_layers(model) for name in ("gate_up_proj", "down_proj"))
