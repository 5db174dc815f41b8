"""The miniature policy: a real Qwen3-MoE, small enough to train from scratch on one core.

Six layers, hidden 128, 4 heads on 2 KV heads of 32, 16 experts of width 64 with top-4 routing (2.7 M parameters);
every dimension that FP4 touches is a multiple of 16. It is built by transformers and saved as an ordinary checkpoint
directory, so AutoModelForCausalLM and vLLM load it without our code.

Training speed on CPU is decided by shapes: oneDNN plans a matmul per shape, so tokens are sorted by expert and padded
to a capacity rounded to `CAPACITY_STEP`, and each layer's experts are two batched matmuls. Padding rows are zero, so
they change neither the result nor any gradient. The function enters through transformers' registry under the name
`capacity`; it is differentiable plain PyTorch without quantization, for supervised training only.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.cache_utils import DynamicCache
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from trace_rl.errors import UserError

CAPACITY_STEP = 64
EXPERTS_IMPLEMENTATION = "capacity"


def capacity_experts(
    self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Routed experts as two batched matmuls over [experts, capacity, features].

    hidden_states [T, H] and the result are in the compute dtype; top_k_index, top_k_weights are [T, k].
    """
    num_tokens, hidden = hidden_states.shape
    num_experts, top_k = self.num_experts, top_k_index.shape[1]
    expert = top_k_index.reshape(-1)
    order = torch.argsort(expert, stable=True)
    counts = torch.bincount(expert, minlength=num_experts)
    capacity = -(-int(counts.max()) // CAPACITY_STEP) * CAPACITY_STEP
    starts = counts.cumsum(0) - counts
    sorted_expert = expert[order]
    slot_sorted = sorted_expert * capacity + torch.arange(order.numel()) - starts[sorted_expert]
    # Slot -> token, with one extra zero row for the padding; assignment -> slot for the way back.
    token_of_slot = torch.full((num_experts * capacity,), num_tokens)
    token_of_slot[slot_sorted] = order // top_k
    slot = torch.empty_like(order)
    slot[order] = slot_sorted
    padded = torch.cat([hidden_states, hidden_states.new_zeros(1, hidden)])
    x_ECH = padded.index_select(0, token_of_slot).view(num_experts, capacity, hidden)
    gate, up = torch.bmm(x_ECH, self.gate_up_proj.transpose(1, 2)).chunk(2, dim=-1)
    y_ECH = torch.bmm(self.act_fn(gate) * up, self.down_proj.transpose(1, 2))
    y_TKH = y_ECH.view(-1, hidden).index_select(0, slot).view(num_tokens, top_k, hidden)
    return (y_TKH.float() * top_k_weights.float().unsqueeze(-1)).sum(1).to(hidden_states.dtype)


def register_experts() -> str:
    """Make `capacity` known to transformers; returns its name."""
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, capacity_experts)
    return EXPERTS_IMPLEMENTATION


def miniature_config(
    tokenizer: PreTrainedTokenizerFast,
    *,
    num_layers: int = 6,
    hidden_size: int = 128,
    num_attention_heads: int = 4,
    num_key_value_heads: int = 2,
    head_dim: int = 32,
    num_experts: int = 16,
    num_experts_per_tok: int = 4,
    moe_intermediate_size: int = 64,
    max_position_embeddings: int = 256,
) -> Qwen3MoeConfig:
    """The Qwen3-MoE configuration; its vocabulary is the tokenizer's."""
    for name, size in (
        ("hidden_size", hidden_size),
        ("head_dim", head_dim),
        ("moe_intermediate_size", moe_intermediate_size),
    ):
        if size % 16:
            raise UserError(f"{name} is {size}: every FP4 dimension must be a multiple of the block size 16")
    if num_attention_heads % num_key_value_heads:
        raise UserError(
            f"num_attention_heads {num_attention_heads} must be a multiple of num_key_value_heads {num_key_value_heads}"
        )
    return Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,  # of a dense layer; the miniature has none
        moe_intermediate_size=moe_intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        num_experts=num_experts,
        num_experts_per_tok=num_experts_per_tok,
        norm_topk_prob=True,
        max_position_embeddings=max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
    )


def build_model(config: Qwen3MoeConfig, *, seed: int) -> Qwen3MoeForCausalLM:
    """A freshly initialised FP32 model. Routers are initialised like the linear layers, since zero routers tie."""
    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    config._experts_implementation = register_experts()
    model = Qwen3MoeForCausalLM(config).float()
    std = config.hidden_size**-0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                continue
            fan_in = parameter.shape[-1]
            scale = fan_in**-0.5 if "embed" not in name else std
            # Residual outputs start smaller by depth, as in GPT-2, so that six layers train at a high rate.
            if name.endswith(("o_proj.weight", "down_proj")):
                scale /= (2 * config.num_hidden_layers) ** 0.5
            parameter.normal_(0.0, scale)
    return model


def save_checkpoint(
    directory: Path,
    *,
    config: Qwen3MoeConfig,
    state: dict[str, torch.Tensor],
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Write an ordinary BF16 checkpoint directory: configuration, weights, tokenizer, generation defaults."""
    directory.mkdir(parents=True, exist_ok=True)
    config = Qwen3MoeConfig(**{key: value for key, value in config.to_dict().items() if key != "model_type"})
    model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict({name: tensor.to(torch.bfloat16) for name, tensor in state.items()})
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
    )
    model.save_pretrained(directory, safe_serialization=True)
    tokenizer.save_pretrained(directory)


@torch.inference_mode()
def sample_responses(
    model: Qwen3MoeForCausalLM,
    *,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    max_new_tokens: int,
    seed: int,
) -> list[list[int]]:
    """One response per prompt by incremental decoding of the whole batch; temperature 0 is greedy.

    Prompts (token ids) are padded on the left. A response ends before its end-of-sequence token; one that reaches
    `max_new_tokens` is returned as far as it came.
    """
    if not prompts or min(map(len, prompts)) == 0:
        raise UserError("sampling needs at least one prompt and no zero-length prompt")
    config, longest = model.config, max(map(len, prompts))
    generator = torch.Generator().manual_seed(seed)
    ids = torch.full((len(prompts), longest), config.pad_token_id)
    mask = torch.zeros((len(prompts), longest), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache, done, columns = DynamicCache(config=config), torch.zeros(len(prompts), dtype=torch.bool), []
    for _ in range(max_new_tokens):
        logits = (
            model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            .logits[:, -1]
            .float()
        )
        if temperature == 0.0:
            token = logits.argmax(-1)
        else:
            token = torch.multinomial(F.softmax(logits / temperature, dim=-1), 1, generator=generator)[:, 0]
        token = torch.where(done, config.pad_token_id, token)
        columns.append(token)
        done |= token == config.eos_token_id
        if bool(done.all()):
            break
        ids, positions = token[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
    responses = []
    for row in torch.stack(columns, dim=1).tolist():
        end = row.index(config.eos_token_id) if config.eos_token_id in row else len(row)
        responses.append(row[:end])
    return responses
