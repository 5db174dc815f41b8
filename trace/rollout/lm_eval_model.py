"""The rollout engine as an lm-eval model, so that an evaluation runs the execution that the rollout runs.

lm-eval's own vLLM model asks for the distribution named vllm and would not know our quantization; this one wraps any
`RolloutEngine` and is registered as `trace_vllm`:

    lm_eval --include_path <tasks> --tasks mini_math --model trace_vllm \\
        --model_args pretrained=results/mini/checkpoint,execution=fp4,scales=results/mini/calibration/scales.json

(after `import trace_rl.rollout.lm_eval_model`; the evaluate stage does all of this). Generation is greedy unless a task
says `do_sample: true`; then each request has its own seed. The engine stops at the model's end token only, so a task's
stop strings cut the text afterwards: same answer, some tokens more. A prompt is encoded as the trainer encodes it, with
the tokenizer's special tokens, once.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trace_rl.config.quant import BF16, QuantSpec
from trace_rl.config.rollout import EngineConfig
from trace_rl.errors import UserError
from trace_rl.formats.static_scales import StaticScales
from trace_rl.rollout.engine import RolloutEngine, Sampling, open_engine
from trace_rl.trajectory import Trajectory

EXECUTIONS = ("bf16", "fp4")
_IGNORED_ARGUMENTS = ("batch_size", "max_batch_size", "device")  # lm-eval passes them to every model
_UNSUPPORTED = {"top_k": (None, 0, -1, 50), "top_p": (None, 1.0), "num_beams": (None, 1)}  # value -> no effect

EncodedPair = tuple[tuple[str, str], list[int], list[int]]


@register_model("trace_vllm")
class TraceLM(TemplateLM):
    """An open engine with its tokenizer; `close` closes the engine."""

    def __init__(
        self,
        engine: RolloutEngine,
        *,
        tokenizer: PreTrainedTokenizerBase,
        max_model_len: int,
        max_new_tokens: int,
        seed: int = 0,
    ) -> None:
        """`max_new_tokens` holds where a task gives no `max_gen_toks`; `seed` enters sampled generation only."""
        super().__init__()
        self.engine = engine
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.max_new_tokens = max_new_tokens
        self.seed = seed
        self.num_generated_tokens = 0

    @classmethod
    def open(
        cls,
        checkpoint_dir: Path,
        *,
        quant: QuantSpec,
        scales: StaticScales | None,
        config: EngineConfig,
        max_new_tokens: int,
        seed: int = 0,
    ) -> "TraceLM":
        """Open an engine and the tokenizer of one checkpoint directory."""
        engine = open_engine(checkpoint_dir, quant=quant, scales=scales, config=config)
        tokenizer = AutoTokenizer.from_pretrained(checkpoint_dir, local_files_only=True)
        return cls(
            engine,
            tokenizer=tokenizer,
            max_model_len=config.max_model_len,
            max_new_tokens=max_new_tokens,
            seed=seed,
        )

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> "TraceLM":
        """lm-eval's command line: `pretrained=DIR,execution=fp4,scales=FILE,...`, see `create_from_arg_obj`."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> "TraceLM":
        """From `pretrained`, `execution` (bf16 or fp4), `format`, `scales`, `max_new_tokens`, `seed`; the rest are
        fields of EngineConfig. What lm-eval adds for other models (batch size, device) has no meaning here."""
        arguments = {key: value for key, value in arg_dict.items() if key not in _IGNORED_ARGUMENTS}
        if "pretrained" not in arguments:
            raise UserError("model trace_vllm needs pretrained=DIR, a Hugging Face checkpoint directory")
        directory = Path(str(arguments.pop("pretrained")))
        execution = arguments.pop("execution", "bf16")
        if execution not in EXECUTIONS:
            raise UserError(f"execution is {execution!r}; use {' or '.join(EXECUTIONS)}")
        number_format, scales = arguments.pop("format", "nvfp4"), arguments.pop("scales", None)
        max_new_tokens, seed = int(arguments.pop("max_new_tokens", 256)), int(arguments.pop("seed", 0))
        unknown = sorted(set(arguments) - set(EngineConfig.model_fields))
        if unknown:
            raise UserError(f"model_args {', '.join(unknown)} unknown; give pretrained, execution, format, scales, ...")
        return cls.open(
            directory,
            quant=BF16 if execution == "bf16" else QuantSpec(format=number_format),
            scales=None if execution == "bf16" or scales is None else StaticScales.load(scales),
            config=EngineConfig(**arguments),
            max_new_tokens=max_new_tokens,
            seed=seed,
        )

    def close(self) -> None:
        """Release the engine."""
        self.engine.close()

    # What lm-eval asks of a tokenizer.

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What an empty context stands for: the beginning token, or the end token where there is none."""
        bos = self.tokenizer.bos_token_id
        return self.tokenizer.eos_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids with the tokenizer's special tokens, unless the text already begins with them."""
        if add_special_tokens is None:
            bos = self.tokenizer.bos_token
            add_special_tokens = not (bos and string.startswith(bos))
        return self.tokenizer(string, add_special_tokens=add_special_tokens)["input_ids"]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as text, by the tokenizer's own template."""
        text = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return str(text)

    # The three kinds of requests.

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """One answer per request, cut before the first stop string."""
        groups: dict[Sampling, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            groups[self._sampling(request.args[1])].append(index)
        answers = [""] * len(requests)
        for sampling, indices in groups.items():
            prompts = [self.tok_encode(requests[index].args[0]) for index in indices]
            trajectories = self._generate(prompts, sampling)
            for index, trajectory in zip(indices, trajectories, strict=True):
                text = self._text(trajectory)
                for stop in _stop_strings(requests[index].args[1]):
                    text = text.split(stop)[0]
                answers[index] = text
                self.cache_hook.add_partial("generate_until", requests[index].args, text)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each whole text, in disjoint windows of the longest sequence the engine scores."""
        totals = []
        for (text,) in (request.args for request in requests):
            windows = map(
                make_disjoint_window,
                get_rolling_token_windows(
                    token_list=self.tok_encode(text, add_special_tokens=False),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_model_len - 2,
                    context_len=1,
                ),
            )
            pairs: list[EncodedPair] = [(("", ""), context, continuation) for context, continuation in windows]
            totals.append(sum(logprob for logprob, _ in self._loglikelihood_tokens(pairs, greedy=False)))
        return totals

    def _loglikelihood_tokens(
        self, requests: list[EncodedPair], disable_tqdm: bool = False, greedy: bool = True, **_: Any
    ) -> list[tuple[float, bool]]:
        """Sum of the continuation's log-probabilities, and whether greedy decoding would produce it."""
        scored = self.engine.score([context + continuation for _, context, continuation in requests], 1.0)
        sums = [
            float(logprobs[len(context) - 1 :].double().sum())
            for logprobs, (_, context, _) in zip(scored, requests, strict=True)
        ]
        is_greedy = self._is_greedy(requests) if greedy else [False] * len(requests)
        return list(zip(sums, is_greedy, strict=True))

    def _is_greedy(self, requests: list[EncodedPair]) -> list[bool]:
        """Decode each context greedily for as many tokens as its continuation has, and compare."""
        by_length: dict[int, list[int]] = defaultdict(list)
        for index, (_, _, continuation) in enumerate(requests):
            by_length[len(continuation)].append(index)
        result = [True] * len(requests)
        for length, indices in by_length.items():
            if length == 0:
                continue
            sampling = Sampling(temperature=0.0, max_new_tokens=length, ignore_eos=True)
            for index, trajectory in zip(
                indices, self._generate([requests[index][1] for index in indices], sampling), strict=True
            ):
                result[index] = trajectory.response_ids == requests[index][2]
        return result

    def _generate(self, prompts: list[list[int]], sampling: Sampling) -> list[Trajectory]:
        trajectories = self.engine.generate(prompts, sampling, None, record_experts=False).trajectories
        self.num_generated_tokens += sum(trajectory.num_tokens - trajectory.prompt_len for trajectory in trajectories)
        return trajectories

    def _text(self, trajectory: Trajectory) -> str:
        """The response without its end token; an unfinished one keeps everything it has."""
        ids = trajectory.response_ids
        if trajectory.finish_reason == "stop":
            ids = ids[:-1]
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def _sampling(self, options: dict[str, Any]) -> Sampling:
        """A task's generation settings; one this engine does not have is refused, not ignored."""
        for name, without_effect in _UNSUPPORTED.items():
            if options.get("do_sample") and options.get(name) not in without_effect:
                raise UserError(f"a task asks for {name} {options[name]!r}; the engine samples by temperature only")
        temperature = float(options.get("temperature", 1.0)) if options.get("do_sample") else 0.0
        max_new_tokens = int(options.get("max_gen_toks") or self.max_new_tokens)
        return Sampling(temperature=temperature, max_new_tokens=max_new_tokens, seed=self.seed)


def _stop_strings(options: dict[str, Any]) -> list[str]:
    until = options.get("until") or []
    return [stop for stop in ([until] if isinstance(until, str) else until) if stop]
