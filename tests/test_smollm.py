"""Sparse upcycling keeps the function, the result trains, saves and loads, and the package is what we say it is."""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from trace_rl.config.checkpoint import UpcycledCheckpoint
from trace_rl.config.load import load_experiment
from trace_rl.config.quant import QuantSpec
from trace_rl.models import smollm
from trace_rl.models.checkpoint_io import validate_checkpoint
from trace_rl.models.families import cast_parameters, moe_layers
from trace_rl.models.tokenizer import build_tokenizer
from trace_rl.stages import upcycling
from trace_rl.tasks import packaged as data
from trace_rl.tasks.arithmetic import make_math


def dense_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=64,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            initializer_range=0.1,
            rope_parameters={"rope_theta": 5000.0, "rope_type": "default"},
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    ).eval()


def test_upcycling_keeps_the_logits():
    dense = dense_model()
    model = smollm.upcycle(dense, num_experts=4, num_experts_per_tok=2, seed=1)
    ids = torch.randint(0, dense.config.vocab_size, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    assert smollm.logit_difference(dense, model, token_ids=ids) < 1e-4
    routers = [moe.router.weight for moe in moe_layers(model)]
    assert len(routers) == 3 and all(router.std() > 0 for router in routers)
    with torch.no_grad():
        dense.model.layers[1].mlp.up_proj.weight.mul_(1.1)
    assert smollm.logit_difference(dense, model, token_ids=ids) > 1e-3

    smollm.perturb_experts(model, scale=0.01)
    experts = moe_layers(model)[0].experts.gate_up_proj
    relative = (experts[0] - experts[1]).square().mean() / experts[0].square().mean()
    assert 0.5e-4 < relative < 4e-4


def test_supervised_steps_lower_the_loss_and_the_checkpoint_loads(tmp_path):
    rng = random.Random(0)
    rows = [make_math(rng, num_ops=1, max_operand=9) for _ in range(8)]
    model = smollm.upcycle(dense_model(), num_experts=4, num_experts_per_tok=2)
    cast_parameters(model, torch.bfloat16)
    tokenizer = build_tokenizer()
    recipe = UpcycledCheckpoint(source="smollm2_upcycled", steps=12, batch_size=8, learning_rate=3e-3)
    losses = upcycling.fine_tune(model, recipe, tokenizer=tokenizer, rows=rows)
    assert len(losses) == 12 and losses[-1] < 0.8 * losses[0]

    smollm.save_checkpoint(tmp_path, model=model, tokenizer=tokenizer)
    info = validate_checkpoint(tmp_path, quant=QuantSpec())
    assert info.model_type == "mixtral" and info.dims == {"hidden_size": 128, "expert_width": 64, "head_dim": 64}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name


def test_labels_are_the_answers_tokens():
    rng = random.Random(0)
    problems = [make_math(rng, num_ops=ops, max_operand=9) for ops in (1, 2)]
    tokenizer = build_tokenizer()
    input_ids, labels = upcycling.make_batch(tokenizer, problems=problems)
    for problem, ids, wanted in zip(problems, input_ids, labels, strict=True):
        answer = tokenizer(problem.answer, add_special_tokens=False)["input_ids"]
        assert wanted[wanted != upcycling.IGNORED].tolist() == [*answer, tokenizer.eos_token_id]
        first = int((wanted != upcycling.IGNORED).nonzero()[0, 0])
        assert ids[: first + 1].tolist() == tokenizer(problem.prompt)["input_ids"]


@pytest.mark.slow
def test_the_package_is_the_model_it_says(tmp_path):
    tokenizer = smollm.load_tokenizer()
    assert len(tokenizer) == 49152 and tokenizer.eos_token == "<|im_end|>"
    conversation = [{"role": "user", "content": "What is 2 + 3?"}]
    text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    assert data.chat_prompt("What is 2 + 3?") == text
    # The template's text is encoded as the template's tokens: nothing is added twice.
    ids = tokenizer(text)["input_ids"]
    templated = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ids == templated and ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 3

    # Every problem of the two tasks fits into the sequences of config/smol.yaml.
    config = load_experiment(Path(__file__).parents[1] / "config" / "smol.yaml")
    room = config.engine.max_model_len - config.evaluate.max_new_tokens
    for problems in (data.read_humaneval(), data.read_gsm8k_subset()):
        assert max(len(tokenizer(problem.prompt)["input_ids"]) for problem in problems) <= room

    tokenizer.save_pretrained(tmp_path)
    again = type(tokenizer).from_pretrained(tmp_path)
    assert again(text)["input_ids"] == ids and again.chat_template == tokenizer.chat_template
