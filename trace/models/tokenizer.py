"""The miniature's tokenizer: one character, one token, as a real Hugging Face fast tokenizer.

A `WordLevel` model over single characters with `<pad>`, `<bos>`, `<eos>` and `<unk>`; `<bos>` is prepended by the
post-processor, so AutoTokenizer, vLLM and lm-eval encode a prompt alike. Decoding joins characters without spaces.
"""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from trace_rl.errors import UserError

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
ALPHABET = "0123456789+-*=;:,|?x"


def build_tokenizer(*, alphabet: str = ALPHABET, model_max_length: int = 256) -> PreTrainedTokenizerFast:
    """A character-level tokenizer; its length is the vocabulary size of the miniature policy."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_max_length=model_max_length,
        padding_side="left",
    )


def encode_example(tokenizer: PreTrainedTokenizerFast, *, prompt: str, answer: str) -> tuple[list[int], int]:
    """Token ids of `<bos>prompt answer<eos>` and the length of the prompt part.

    Raises UserError for a zero-length prompt and for characters outside the vocabulary.
    """
    if not prompt:
        raise UserError("zero-length prompt: every training example needs a prompt")
    prompt_ids = tokenizer(prompt)["input_ids"]
    answer_ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
    ids = [*prompt_ids, *answer_ids, tokenizer.eos_token_id]
    if tokenizer.unk_token_id in ids:
        raise UserError(f"example {prompt + answer!r} has characters outside the tokenizer's alphabet {ALPHABET!r}")
    return ids, len(prompt_ids)
