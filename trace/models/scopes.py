"""What must be FP4, said independently of the code that quantizes (METHOD.md section 2).

The trainer, the engines and the export find their tensors through module trees; this file finds them by name alone.
The scope audit compares the two, so a mistake in either shows. Routed experts only: `.experts.` with the dots, because
the commonest silent fault of the field is a pattern such as `mlp.gate` that also catches `mlp.gate_proj`, or `expert`
that also catches `shared_expert`.

Tensors that are not parameters get names of the same kind: `<layer>.mlp.experts.fc1_input`, `...fc2_input`,
`<layer>.self_attn.k_cache`, `...v_cache`.
"""

import re
from collections.abc import Callable, Iterable

from trace_rl.config.quant import QuantSpec

_EXPERT_WEIGHT = re.compile(
    r"\.experts\.(?:(?:gate_up_proj|down_proj)|\d+\.(?:gate_proj|up_proj|down_proj|w1|w2|w3)\.weight)$"
)
_EXPERT_INPUT = re.compile(r"\.experts\.fc[12]_input$")
_CACHE = re.compile(r"\.[kv]_cache$")
BF16_NAME = "bf16"

Selector = Callable[[str], bool]


def is_expert_weight(name: str) -> bool:
    """Whether a parameter is a routed expert's gate, up or down projection."""
    return _EXPERT_WEIGHT.search(name) is not None


def expected_format(name: str, *, quant: QuantSpec) -> str:
    """The format that ``quant`` prescribes for a parameter, an expert input or a KV tensor."""
    scope = None
    if is_expert_weight(name):
        scope = "weights"
    elif _EXPERT_INPUT.search(name):
        scope = "activations"
    elif _CACHE.search(name):
        scope = "kv"
    return BF16_NAME if scope is None else quant.format_of(scope) or BF16_NAME


def expected_scopes(names: Iterable[str], *, quant: QuantSpec) -> dict[str, str]:
    """Name -> prescribed format."""
    return {name: expected_format(name, quant=quant) for name in names}


def activation_names(parameters: Iterable[str], *, attention_layers: Iterable[int]) -> list[str]:
    """Names of expert inputs and KV tensors of a model with these parameters, experts fused."""
    parameters = list(parameters)
    experts = [name.removesuffix(".gate_up_proj") for name in parameters if name.endswith(".experts.gate_up_proj")]
    prefix = layer_prefix(parameters)
    inputs = [f"{name}.{tensor}" for name in experts for tensor in ("fc1_input", "fc2_input")]
    caches = [f"{prefix}.{layer}.self_attn.{tensor}" for layer in attention_layers for tensor in ("k_cache", "v_cache")]
    return inputs + caches


def layer_prefix(parameters: Iterable[str]) -> str:
    """The dotted name of the layer list, such as ``model.layers``."""
    name = next(name for name in parameters if ".layers." in name)
    return name[: name.index(".layers.") + len(".layers")]
