"""Evaluation through lm-eval: tasks judge as RL does, the model is the engine, the stage writes both executions."""

import json
import math
from pathlib import Path

import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import get_model
from tiny import tiny_config, tiny_run

from trace_rl.config.method import PtqMethod, RlMethod
from trace_rl.config.quant import BF16, QuantSpec
from trace_rl.errors import UserError
from trace_rl.formats.static_scales import StaticScales
from trace_rl.rollout.engine import Sampling
from trace_rl.rollout.lm_eval_model import TraceLM
from trace_rl.stages import evaluate, quantize
from trace_rl.tasks.dataset import build_splits
from trace_rl.tasks.lm_eval_tasks import local_tasks
from trace_rl.tasks.problem import write_jsonl

TASKS = ("mini_math", "mini_code")
NUM_PROBLEMS = 12


def write_rows(data: Path) -> dict[str, list]:
    """Evaluation rows of every task, as the data stage writes them."""
    splits = build_splits(seed=0, train_problems=64, rl_problems=32, eval_problems=NUM_PROBLEMS)
    rows = {task: splits[task.replace("mini_", "eval_")] for task in TASKS}
    data.mkdir(parents=True, exist_ok=True)
    for task, problems in rows.items():
        write_jsonl(data / f"{task}.jsonl", problems=problems)
    return rows


class Scripted(LM):
    """Answers prompts from a table."""

    def __init__(self, answers: dict[str, str]) -> None:
        super().__init__()
        self.answers = answers

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        return [self.answers[request.args[0]] for request in requests]

    def loglikelihood(self, requests):
        raise AssertionError("the tasks only generate")

    def loglikelihood_rolling(self, requests):
        raise AssertionError("the tasks only generate")


def test_tasks_judge_with_the_verifiers_of_rl(tmp_path: Path):
    rows = write_rows(tmp_path)
    answers = {problem.prompt: problem.answer for problems in rows.values() for problem in problems}
    wrong = {
        problem.prompt: problem.answer + "9" for problems in rows.values() for problem in problems[: NUM_PROBLEMS // 4]
    }
    result = evaluate.run_tasks(Scripted(answers | wrong), tasks=TASKS, data=tmp_path)
    for task in TASKS:
        score = result["scores"][task]
        assert score["n"] == NUM_PROBLEMS
        assert score["mean"] == 0.75
        assert math.isclose(score["stderr"], math.sqrt(0.75 * 0.25 / (NUM_PROBLEMS - 1)))
        first = result["samples"][task][0]
        assert first["prompt"] == rows[task][0].prompt
        assert first["answer"] == rows[task][0].answer + "9"
        assert first["acc"] == 0.0
        assert len(result["samples"][task]) == evaluate.SAMPLES_KEPT


def test_new_rows_are_read_not_a_cache_of_the_old(tmp_path: Path):
    rows = write_rows(tmp_path)["mini_math"]
    answers = {problem.prompt: problem.answer for problem in rows}
    assert evaluate.run_tasks(Scripted(answers), tasks=["mini_math"], data=tmp_path)["scores"]["mini_math"]["n"] == 12
    write_jsonl(tmp_path / "mini_math.jsonl", problems=rows[:5])
    assert evaluate.run_tasks(Scripted(answers), tasks=["mini_math"], data=tmp_path)["scores"]["mini_math"]["n"] == 5


def test_a_limit_of_one_has_no_standard_error(tmp_path: Path):
    answers = {problem.prompt: problem.answer for problem in write_rows(tmp_path)["mini_code"]}
    result = evaluate.run_tasks(Scripted(answers), tasks=["mini_code"], data=tmp_path, limit=1)
    assert result["scores"] == {"mini_code": {"mean": 1.0, "stderr": None, "n": 1}}


def test_every_task_file_is_named_after_its_task():
    assert set(TASKS) <= set(local_tasks())
    for name, path in local_tasks().items():
        assert f"task: {name}\n" in path.read_text()


def test_missing_rows_and_no_tasks_are_user_errors(tmp_path: Path):
    with pytest.raises(UserError, match=r"mini_math needs .*mini_math\.jsonl"):
        evaluate.run_tasks(Scripted({}), tasks=["mini_math"], data=tmp_path)
    with pytest.raises(UserError, match=r"evaluate\.tasks is empty"):
        evaluate.run_tasks(Scripted({}), tasks=[], data=tmp_path)


@pytest.fixture(scope="module")
def run_paths(tmp_path_factory: pytest.TempPathFactory):
    """A run with a tiny policy, scales and evaluation rows."""
    paths = tiny_run(tmp_path_factory.mktemp("run"), config=tiny_config())
    write_rows(paths.data)
    return paths


@pytest.fixture(scope="module")
def lm(run_paths):
    quant = QuantSpec()
    opened = TraceLM.open(
        run_paths.checkpoint,
        quant=quant,
        scales=StaticScales.load(run_paths.scales),
        config=tiny_config().engine,
        max_new_tokens=8,
    )
    yield opened
    opened.close()


def request(kind: str, *arguments) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


GREEDY = {"until": [], "do_sample": False}
PROMPTS = ("12+3-4?", "1:2,2:3,3:4?", "7-5+20?")


def test_generation_is_the_engines_own(lm: TraceLM):
    answers = lm.generate_until([request("generate_until", prompt, GREEDY) for prompt in PROMPTS])
    batch = lm.engine.generate(
        [lm.tokenizer(prompt)["input_ids"] for prompt in PROMPTS], Sampling(temperature=0.0, max_new_tokens=8), None
    )
    for answer, trajectory in zip(answers, batch.trajectories, strict=True):
        ids = [token for token in trajectory.response_ids if token != lm.eot_token_id]
        assert answer == lm.tokenizer.decode(ids)
    assert any(answers)


def test_stop_strings_lengths_and_sampling(lm: TraceLM):
    candidates = [f"{left}+{right}?" for left in range(10, 20) for right in range(5)]
    answers = lm.generate_until([request("generate_until", candidate, GREEDY) for candidate in candidates])
    whole, prompt = max(zip(answers, candidates, strict=True), key=lambda pair: len(set(pair[0])))
    stop = whole[-1]
    cut, short, *sampled = lm.generate_until(
        [
            request("generate_until", prompt, {**GREEDY, "until": [stop]}),
            request("generate_until", prompt, {**GREEDY, "max_gen_toks": 2}),
            *[request("generate_until", prompt, {"until": [], "do_sample": True, "temperature": 2.0})] * 6,
        ]
    )
    assert cut == whole[: whole.index(stop)]
    assert whole.startswith(short)
    assert len(lm.tokenizer(short, add_special_tokens=False)["input_ids"]) == 2
    assert len(set(sampled)) > 1
    with pytest.raises(UserError, match="top_p"):
        lm.generate_until([request("generate_until", prompt, {"until": [], "do_sample": True, "top_p": 0.5})])


def test_loglikelihood_is_the_engines_score(lm: TraceLM):
    pairs = [("12+3-4?", "15-4=11"), ("7?", "7"), ("", "12")]
    results = lm.loglikelihood([request("loglikelihood", *pair) for pair in pairs], disable_tqdm=True)
    for (context, continuation), (total, _) in zip(pairs, results, strict=True):
        ids = lm.tokenizer(context + continuation)["input_ids"]
        (logprobs,) = lm.engine.score([ids], 1.0)
        assert total == pytest.approx(float(logprobs[-len(continuation) :].sum()), abs=1e-3)
    assert lm.loglikelihood([request("loglikelihood", "7?", "")], disable_tqdm=True) == [(0.0, True)]


def test_greedy_continuations_are_recognized(lm: TraceLM):
    trajectory = lm.engine.generate(
        [lm.tokenizer("7?")["input_ids"]], Sampling(temperature=0.0, max_new_tokens=4, ignore_eos=True), None
    ).trajectories[0]
    greedy = trajectory.response_ids
    other = [*greedy[:-1], (greedy[-1] + 1) % len(lm.tokenizer)]
    context = trajectory.token_ids[: trajectory.prompt_len].tolist()
    results = lm._loglikelihood_tokens([(("", ""), context, greedy), (("", ""), context, other)])
    assert [is_greedy for _, is_greedy in results] == [True, False]
    assert results[0][0] == pytest.approx(float(trajectory.logprobs.sum()), abs=0.02)


def test_rolling_loglikelihood_counts_every_token_once(lm: TraceLM):
    text = "1+2=3;" * 20
    (total,) = lm.loglikelihood_rolling([request("loglikelihood_rolling", text)], disable_tqdm=True)
    window = lm.max_model_len - 2
    ids = [lm.prefix_token_id, *lm.tokenizer(text, add_special_tokens=False)["input_ids"]]
    (first,) = lm.engine.score([ids[: window + 1]], 1.0)
    assert total < float(first.sum()) < 0
    short = text[:30]
    (total,) = lm.loglikelihood_rolling([request("loglikelihood_rolling", short)], disable_tqdm=True)
    (scored,) = lm.engine.score([lm.tokenizer(short)["input_ids"]], 1.0)
    assert total == pytest.approx(float(scored.sum()), abs=1e-3)


def test_a_prompt_that_is_too_long_is_refused(lm: TraceLM):
    with pytest.raises(UserError, match="max_model_len"):
        lm.generate_until([request("generate_until", "1+" * 60, GREEDY)])


def test_the_registered_model_opens_from_lm_evals_arguments(run_paths):
    model = get_model("trace_vllm")
    assert model is TraceLM
    arguments = f"pretrained={run_paths.checkpoint},name=torch,max_model_len=64,execution=fp4,scales={run_paths.scales}"
    opened = model.create_from_arg_string(arguments, {"batch_size": 1, "device": "cpu"})
    assert opened.engine.quant == QuantSpec()
    assert opened.max_model_len == 64
    opened.close()
    with pytest.raises(UserError, match="engine_name unknown"):
        model.create_from_arg_string(f"pretrained={run_paths.checkpoint},engine_name=torch")
    with pytest.raises(UserError, match="execution is 'int8'"):
        model.create_from_arg_string(f"pretrained={run_paths.checkpoint},execution=int8")
    with pytest.raises(UserError, match="needs pretrained"):
        model.create_from_arg_string("name=torch")


def check_result(metrics: dict, written: Path, *, tasks=TASKS, n: int = NUM_PROBLEMS) -> None:
    assert json.loads(written.read_text()) == json.loads(json.dumps(metrics))
    assert set(metrics["executions"]) == {"bf16", "fp4"}
    for scores in metrics["executions"].values():
        assert set(scores) == set(tasks)
        for score in scores.values():
            assert score["n"] == n
            assert 0.0 <= score["mean"] <= 1.0
            assert score["stderr"] >= 0.0
    assert metrics["quant_hash"]["bf16"] == BF16.hash() != metrics["quant_hash"]["fp4"]
    assert all(metrics["generated_tokens"].values())


def test_stage_evaluates_the_policy_before_rl(run_paths, capsys: pytest.CaptureFixture[str]):
    metrics = evaluate.run(tiny_config(evaluate={"max_new_tokens": 6, "limit": 5}), run_paths)
    check_result(metrics, run_paths.evaluation_start, n=5)
    assert "mini_code" in capsys.readouterr().out
    assert metrics["samples"]["bf16"] != metrics["samples"]["fp4"]


def test_stage_evaluates_rl_and_ptq_methods(run_paths):
    config = tiny_config(evaluate={"max_new_tokens": 6, "tasks": ["mini_math"]})
    trained = RlMethod(name="bf16", description="", source="control")
    exported = PtqMethod(name="ptq_nvfp4", description="", source="control")
    with pytest.raises(UserError, match="not trained"):
        evaluate.run(config, run_paths, method=trained, seed=0)
    policy = run_paths.train("bf16", 0) / "policy"
    policy.parent.mkdir(parents=True)
    policy.symlink_to(run_paths.checkpoint)
    of_trained = evaluate.run(config, run_paths, method=trained, seed=0)
    check_result(of_trained, run_paths.evaluation("bf16", 0), tasks=["mini_math"])
    with pytest.raises(UserError, match="not exported"):
        evaluate.run(config, run_paths, method=exported, seed=0)
    quantize.run(config, run_paths, method=exported, seed=0)
    of_exported = evaluate.run(config, run_paths, method=exported, seed=0)
    check_result(of_exported, run_paths.evaluation("ptq_nvfp4", 0), tasks=["mini_math"])
    assert of_exported["executions"] == of_trained["executions"]
    assert of_exported["samples"] == of_trained["samples"]


@pytest.mark.slow
@pytest.mark.engine
def test_stage_on_vllm_agrees_with_the_oracle(run_paths):
    """The same greedy answers, but for a few near-ties that the engines' arithmetic decides differently."""
    settings = {"max_new_tokens": 6, "tasks": ["mini_math", "mini_code"]}
    oracle = evaluate.run(tiny_config(evaluate=settings), run_paths)
    engine = {"name": "vllm", "max_model_len": 64, "max_num_seqs": 32, "kv_cache_gib": 0.1}
    metrics = evaluate.run(tiny_config(evaluate=settings, engine=engine), run_paths)
    check_result(metrics, run_paths.evaluation_start, tasks=settings["tasks"])
    pairs = [
        (ours["answer"], theirs["answer"])
        for task in settings["tasks"]
        for ours, theirs in zip(metrics["samples"]["bf16"][task], oracle["samples"]["bf16"][task], strict=True)
    ]
    assert sum(ours[:2] == theirs[:2] for ours, theirs in pairs) >= len(pairs) - 2
