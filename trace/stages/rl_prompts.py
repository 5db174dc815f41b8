"""The prompts that calibration, parity and benchmark sample from: the first rows of the RL data set."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trace_rl.errors import UserError
from trace_rl.tasks.problem import read_jsonl


def rl_prompts(checkpoint: Path, *, data: Path, count: int, setting: str) -> list[list[int]]:
    """Token ids of the first ``count`` RL prompts; ``setting`` names the key to lower when there are fewer."""
    prompts = first_prompts(checkpoint, data=data, most=count)
    if len(prompts) < count:
        raise UserError(f"{setting} is {count}, the RL data set has {len(prompts)} prompts; lower {setting}")
    return prompts


def first_prompts(checkpoint: Path, *, data: Path, most: int) -> list[list[int]]:
    """Token ids of the first RL prompts, at most ``most``."""
    problems = read_jsonl(data / "rl.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    return [tokenizer(problem.prompt)["input_ids"] for problem in problems[:most]]


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The padding token, or eos for tokenizers without one; padded positions are masked."""
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
