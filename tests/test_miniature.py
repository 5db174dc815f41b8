"""The miniature policy: tokenizer, experts, checkpoint directory, sampling, and a cold start that survives a kill."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from trace_rl.config.experiment import ExperimentConfig
from trace_rl.errors import UserError
from trace_rl.models.miniature import build_model, miniature_config, sample_responses, save_checkpoint
from trace_rl.models.tokenizer import ALPHABET, build_tokenizer, encode_example
from trace_rl.stages import cold_start

SHAPE = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


def smoke(**recipe) -> ExperimentConfig:
    defaults = {
        "source": "cold_start",
        "model": SHAPE,
        "threads": 1,
        "steps": 6,
        "batch_size": 8,
        "warmup_steps": 2,
        "checkpoint_every": 2,
        "validate_every": 3,
        "validation_problems": 8,
    }
    return ExperimentConfig.model_validate(
        {
            "checkpoint": defaults | recipe,
            "data": {"train_problems": 200, "rl_problems": 20, "eval_problems": 10},
        }
    )


def test_tokenizer_round_trip_through_auto_tokenizer(tmp_path):
    build_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "34+57-12+8?" + ALPHABET
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id and len(ids) == len(text) + 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert None not in (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert tokenizer("1%")["input_ids"][-1] == tokenizer.unk_token_id


def test_encode_example_marks_the_prompt_and_refuses_bad_text():
    tokenizer = build_tokenizer()
    ids, prompt_len = encode_example(tokenizer, prompt="1+1?", answer="1+1=2")
    assert prompt_len == 5 and len(ids) == 11 and ids[-1] == tokenizer.eos_token_id
    with pytest.raises(UserError, match="zero-length prompt"):
        encode_example(tokenizer, prompt="", answer="1")
    with pytest.raises(UserError, match="alphabet"):
        encode_example(tokenizer, prompt="1&1?", answer="1")


def test_capacity_experts_agree_with_the_loop_of_transformers():
    tokenizer = build_tokenizer()
    config = miniature_config(tokenizer, **SHAPE)
    model = build_model(config, seed=1)
    ids = torch.randint(4, len(tokenizer), (3, 17), generator=torch.Generator().manual_seed(0))
    gradients = {}
    for name in ("capacity", "eager"):
        model.config._experts_implementation = name
        model.zero_grad()
        logits = model(input_ids=ids).logits
        F.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
        gradients[name] = {key: p.grad.clone() for key, p in model.named_parameters()} | {"logits": logits.detach()}
    for key, value in gradients["eager"].items():
        torch.testing.assert_close(gradients["capacity"][key], value, rtol=1e-4, atol=1e-5)


def test_fp4_dimension_must_be_a_multiple_of_the_block():
    with pytest.raises(UserError, match="moe_intermediate_size is 24"):
        miniature_config(build_tokenizer(), **(SHAPE | {"moe_intermediate_size": 24}))


def test_sampling_matches_a_full_forward_whatever_the_padding():
    tokenizer = build_tokenizer()
    model = build_model(miniature_config(tokenizer, **SHAPE), seed=1).eval()
    prompts = [tokenizer(text)["input_ids"] for text in ("1+2?", "0:51,1:43,2:35?")]
    together = sample_responses(model, prompts=prompts, temperature=0.0, max_new_tokens=6, seed=0)
    for prompt, response in zip(prompts, together, strict=True):
        ids = list(prompt)
        for _ in range(6):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == tokenizer.eos_token_id:
                break
        assert [i for i in ids[len(prompt) :] if i != tokenizer.eos_token_id] == response
    first = sample_responses(model, prompts=prompts, temperature=1.0, max_new_tokens=6, seed=5)
    assert first == sample_responses(model, prompts=prompts, temperature=1.0, max_new_tokens=6, seed=5)
    with pytest.raises(UserError, match="zero-length prompt"):
        sample_responses(model, prompts=[[]], temperature=1.0, max_new_tokens=2, seed=0)


def test_checkpoint_directory_loads_with_transformers(tmp_path):
    tokenizer = build_tokenizer()
    config = miniature_config(tokenizer, **SHAPE)
    model = build_model(config, seed=1)
    save_checkpoint(tmp_path / "ckpt", config=config, state=model.state_dict(), tokenizer=tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ckpt")
    assert loaded.dtype == torch.bfloat16 and loaded.config.vocab_size == len(tokenizer)
    assert loaded.generation_config.eos_token_id == tokenizer.eos_token_id
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.to(torch.bfloat16)), name


def test_batches_depend_on_seed_and_step_only():
    rows = {"math": [([1, 5, 6, 2], 2)] * 9, "code": [([1, 5, 6, 7, 8, 9, 2], 3)] * 9}
    ids, mask, targets = cold_start.make_batch(rows, seed=0, step=21, batch_size=4, pad=0)
    again = cold_start.make_batch(rows, seed=0, step=21, batch_size=4, pad=0)
    assert all(torch.equal(a, b) for a, b in zip((ids, mask, targets), again, strict=True))
    assert ids.shape[1] % cold_start.LENGTH_STEP == 0
    assert (targets[mask == 0] == -100).all()
    row = int((mask.sum(1)).argmax())
    if mask[row].sum() == 6:
        assert targets[row, :6].tolist() == [-100, -100, 7, 8, 9, 2]


def test_learning_rate_warms_up_and_decays():
    rates = [cold_start.learning_rate(step, peak=1.0, warmup=4, total=20) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and rates[4] == 1.0
    assert all(a >= b for a, b in zip(rates[4:], rates[5:], strict=False)) and 0.1 < rates[-1] < 0.12


class _Killed(Exception):
    pass


def test_killed_cold_start_continues_bit_identically(tmp_path):
    config = smoke()
    whole = cold_start.run(config, tmp_path / "whole")
    trainer = cold_start._Trainer(
        config.checkpoint, data=config.data, digest=whole["digest"], out_dir=tmp_path / "killed"
    )
    update = trainer._update

    def dies_at_five():
        if trainer.step == 5:
            raise _Killed
        return update()

    trainer._update = dies_at_five
    with pytest.raises(_Killed):
        trainer.train()
    assert not (tmp_path / "killed").exists()
    resumed = cold_start.run(config, tmp_path / "killed")
    assert [(h["step"], h["loss"], h["accuracy"]) for h in resumed["history"]] == [
        (h["step"], h["loss"], h["accuracy"]) for h in whole["history"]
    ]
    first = load_file(tmp_path / "whole" / "model.safetensors")
    second = load_file(tmp_path / "killed" / "model.safetensors")
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert not (tmp_path / "killed.state").exists()


def test_finished_cold_start_is_left_alone(tmp_path):
    config = smoke(steps=2, validate_every=2)
    summary = cold_start.run(config, tmp_path / "ckpt")
    before = (tmp_path / "ckpt" / "model.safetensors").stat().st_mtime_ns
    assert cold_start.run(config, tmp_path / "ckpt") == summary
    assert (tmp_path / "ckpt" / "model.safetensors").stat().st_mtime_ns == before
    assert json.loads((tmp_path / "ckpt" / "cold_start.json").read_text())["steps"] == 2
    with pytest.raises(UserError, match="source"):
        cold_start.run(
            ExperimentConfig.model_validate({"checkpoint": {"source": "local", "path": "x"}}), tmp_path / "other"
        )
