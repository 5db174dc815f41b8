"""What is FP4, and in which format (METHOD.md sections 1 and 2).

One ``QuantSpec`` travels with every checkpoint, rollout batch, guidance shard, MLflow run and result; its hash keeps
artifacts of different quantization apart.

A format is chosen per scope. ``FormatChoice`` is written as a preset's name where one has these three formats, in YAML
and in JSON alike, and as a mapping otherwise:

    format: mxfp4_w4a8                                       MXFP4 weights and KV, MXFP8 activations
    format: {weights: hif4, activations: hif4, kv: nvfp4}    what is left out is nvfp4
"""

from typing import Any, Literal, get_args

from pydantic import Field, GetJsonSchemaHandler, SerializerFunctionWrapHandler, model_serializer, model_validator
from pydantic_core import CoreSchema

from trace_rl.config.base import Section, digest_of

FormatName = Literal[
    "nvfp4", "mxfp4", "mxfp4_floor", "mxfp4_even", "fouroversix", "fouroversix_mae", "hif4", "hscale", "mxfp8"
]
"""Formats of one tensor: ``mxfp4`` takes the scale rule ``rceil``, ``fouroversix`` the error ``mse``."""

Scope = Literal["weights", "activations", "kv"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
SCOPE_OF: dict[str, Scope] = {"fc1": "activations", "fc2": "activations", "k": "kv", "v": "kv"}
"""Scope of each tensor that is not a weight."""
WITHOUT_CODEWORDS = frozenset({"hif4", "mxfp8"})
"""Formats whose values are no E2M1 codes: they can be neither recorded nor guided."""

ResidualKind = Literal["none", "channels", "sparse"]
RESIDUAL_SHARE = 0.5

_UNIFORM: tuple[FormatName, ...] = (
    "nvfp4",
    "mxfp4",
    "mxfp4_floor",
    "mxfp4_even",
    "fouroversix",
    "fouroversix_mae",
    "hif4",
)
PRESETS: dict[str, dict[Scope, FormatName]] = {
    **{name: {"weights": name, "activations": name, "kv": name} for name in _UNIFORM},
    "mxfp4_w4a8": {"weights": "mxfp4", "activations": "mxfp8", "kv": "mxfp4"},
    "hscale": {"weights": "hscale", "activations": "nvfp4", "kv": "nvfp4"},
}
"""What a format given as one word means for each scope."""

_SENSELESS = {
    ("weights", "mxfp8"): "8-bit weights are not FP4. Set weights: mxfp4; format mxfp4_w4a8 keeps activations in mxfp8",
    ("kv", "mxfp8"): "the cache is the FP4 scope with the most bytes. Set kv: mxfp4, or the method's kv: false (BF16)",
    ("activations", "hscale"): "it searches scales of a fixed tensor by its Hessian. Set activations: nvfp4",
    ("kv", "hscale"): "it searches scales of a fixed tensor by its Hessian. Set kv: nvfp4",
}


class FormatChoice(Section):
    """Number formats by scope; one word sets all three. ``mxfp4_w4a8`` is MXFP4 weights and KV with MXFP8 activations,
    ``hscale`` is H-Scale weights with NVFP4 activations and KV.
    """

    weights: FormatName = "nvfp4"
    """Routed-expert weights; ``hscale`` in methods that quantize a finished policy only."""
    activations: FormatName = "nvfp4"
    """Routed-expert inputs (FC1 and FC2); ``mxfp8`` keeps them in 8 bits."""
    kv: FormatName = "nvfp4"
    """KV cache, in blocks along the head dimension."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if value not in PRESETS:
            raise ValueError(f"format {value!r} is unknown; choose one of {', '.join(PRESETS)}, or give one per scope")
        return PRESETS[value]

    @model_validator(mode="after")
    def _sensible(self) -> "FormatChoice":
        for scope in SCOPES:
            if reason := _SENSELESS.get((scope, getattr(self, scope))):
                raise ValueError(f"{getattr(self, scope)} is no format for {scope}: {reason}")
        return self

    @model_serializer(mode="wrap")
    def _to_name(self, handler: SerializerFunctionWrapHandler) -> Any:
        return self.preset or handler(self)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        mapping = handler.resolve_ref_schema(handler(schema))
        names = {"type": "string", "enum": list(PRESETS)}
        return {"title": cls.__name__, "description": mapping.pop("description", ""), "anyOf": [names, mapping]}

    @property
    def preset(self) -> str | None:
        """The one word for these formats, None where there is none."""
        formats = {scope: getattr(self, scope) for scope in SCOPES}
        return next((name for name, preset in PRESETS.items() if preset == formats), None)

    @property
    def slug(self) -> str:
        """These formats as one word for paths: the preset, else the three formats by scope (``hif4-nvfp4-mxfp4``)."""
        return self.preset or "-".join(getattr(self, scope) for scope in SCOPES)

    @classmethod
    def from_slug(cls, slug: str) -> "FormatChoice":
        """The formats whose `slug` this is; ValueError for another word."""
        if slug in PRESETS:
            return cls.model_validate(slug)
        names = slug.split("-")
        if len(names) != len(SCOPES):
            raise ValueError(f"format {slug!r} is unknown; give one of {', '.join(PRESETS)}, or {'-'.join(SCOPES)}")
        return cls.model_validate(dict(zip(SCOPES, names, strict=True)))

    def __str__(self) -> str:
        return self.preset or ", ".join(f"{scope} {getattr(self, scope)}" for scope in SCOPES)

    def of(self, where: str) -> FormatName:
        """The format of a scope (``weights``, ``activations``, ``kv``) or tensor (``fc1``, ``fc2``, ``k``, ``v``)."""
        return getattr(self, SCOPE_OF.get(where, where))


class QuantSpec(Section):
    """The formats and the three scopes that may be FP4; everything else is BF16."""

    format: FormatChoice = FormatChoice()
    """Number format of every quantized tensor."""
    weights: bool = True
    """Quantize the routed experts' gate, up and down projections; scales follow the weights at every refit."""
    activations: bool = True
    """Quantize the routed experts' inputs (FC1 and FC2) with the calibrated static encode scale of the layer."""
    kv: bool = True
    """Quantize K (after its norm and RoPE) and V as they enter the cache, with the layer's static encode scale."""
    residual: ResidualKind = "none"
    """What an engine adds to the FP4 inputs of the experts (`trace_rl.formats.residual`): ``channels``, the rounded
    residual of the channels where calibration saw the largest (QUADS); ``sparse``, of two of every four (ResQ)."""
    residual_share: float = Field(default=RESIDUAL_SHARE, gt=0.0, le=1.0)
    """Share of the channels that ``residual: channels`` covers."""

    @model_validator(mode="after")
    def _compensates_fp4(self) -> "QuantSpec":
        check_residual(self.residual, share=self.residual_share, activations=self.format_of("activations"))
        return self

    @property
    def enabled(self) -> bool:
        """Whether anything at all is quantized."""
        return self.weights or self.activations or self.kv

    def format_of(self, where: str) -> FormatName | None:
        """The format of a scope or tensor (as ``FormatChoice.of``), None where it stays BF16."""
        return self.format.of(where) if getattr(self, SCOPE_OF.get(where, where)) else None

    def recordable(self) -> tuple[Literal["fc1", "k", "v"], ...]:
        """The guidable tensors that are quantized to codewords, in the order of a record."""
        names: tuple[Literal["fc1", "k", "v"], ...] = ("fc1", "k", "v")
        return tuple(name for name in names if (self.format_of(name) or "hif4") not in WITHOUT_CODEWORDS)

    def hash(self) -> str:
        """16 hex digits over what is quantized how: the format of a BF16 scope does not count."""
        content: dict[str, Any] = {scope: self.format_of(scope) for scope in SCOPES}
        if self.residual != "none":
            content["residual"] = self.residual
        if self.residual == "channels":
            content["residual_share"] = self.residual_share
        return digest_of(content)


def check_residual(residual: ResidualKind, *, share: float, activations: str | None) -> None:
    """ValueError where a residual is compensated that nothing leaves, or where a share is set and not used."""
    if residual != "none" and activations in (None, "mxfp8"):
        raise ValueError(
            f"residual: {residual} compensates FP4 activations, and they are {activations or 'BF16'} here; set "
            "activations: true in an FP4 format, or residual: none"
        )
    if residual != "channels" and share != RESIDUAL_SHARE:
        raise ValueError("residual_share has no effect without residual: channels; remove it")


BF16 = QuantSpec(weights=False, activations=False, kv=False)
