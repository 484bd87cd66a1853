"""Prompts to ids and responses to text, with the tokenizers that people have."""

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rlctl.errors import UsageError
from rlctl.tasks.base import Sample
from rlctl.tasks.cycle_tokenizer import build_tokenizer
from rlctl.tasks.prompts import decode_response, encode_prompt

CHAT = [{"role": "system", "content": "S"}, {"role": "user", "content": "6"}]


def plain_tokenizer(template: str) -> Any:
    """A word tokenizer with <s> and </s> put around a text as ``template`` says, and no chat template."""
    vocab = {word: i for i, word in enumerate(["<s>", "</s>", "<unk>", "one", "two", "three"])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))  # noqa: S106
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(mark, special=True) for mark in ("<s>", "</s>")])
    core.post_processor = processors.TemplateProcessing(
        single=template, pair=None, special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")  # noqa: S106


def test_a_chat_template_is_used_without_doubling_special_tokens() -> None:
    tokenizer = plain_tokenizer("<s> $A")
    tokenizer.chat_template = "<s> one {{ messages[-1]['content'] }}{% if add_generation_prompt %} three{% endif %}"
    assert encode_prompt(tokenizer, Sample(0, "two", ""), 10) == [0, 3, 4, 5]


@pytest.mark.parametrize(("template", "ids"), [("<s> $A", [0, 3, 4]), ("$A", [3, 4]), ("<s> $A </s>", [0, 3, 4])])
def test_plain_text_begins_as_the_tokenizer_wants_and_has_no_end(template: str, ids: list[int]) -> None:
    assert encode_prompt(plain_tokenizer(template), Sample(0, "one two", ""), 10) == ids


def test_a_user_message_is_rendered_to_the_bare_prompt_of_the_warm_start() -> None:
    tokenizer = build_tokenizer()
    ids = encode_prompt(tokenizer, Sample(0, "6-1-9e", "5"), 6)
    assert ids == [6, 11, 1, 11, 9, 19]
    assert tokenizer.decode(encode_prompt(tokenizer, Sample(0, "6", "5", messages=CHAT), 10)) == "S\n6\n"


def test_a_prompt_that_is_too_long_names_its_place_and_both_numbers() -> None:
    with pytest.raises(UsageError, match=r"d\.jsonl:7: the prompt has 6 tokens, over task\.max_prompt_tokens=5"):
        encode_prompt(build_tokenizer(), Sample(3, "6-1-9e", "5", source="d.jsonl:7"), 5)
    with pytest.raises(UsageError, match="prompt 3: the prompt has 6"):
        encode_prompt(build_tokenizer(), Sample(3, "6-1-9e", "5"), 5)


def test_a_chat_without_a_template_and_an_empty_prompt_are_refused() -> None:
    with pytest.raises(UsageError, match="no chat template"):
        encode_prompt(plain_tokenizer("$A"), Sample(0, "6", "", messages=CHAT), 10)
    with pytest.raises(UsageError, match="no tokens"):
        encode_prompt(plain_tokenizer("$A"), Sample(0, " ", ""), 10)


def test_only_what_ends_a_response_is_stripped() -> None:
    tokenizer = build_tokenizer()
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    body = tokenizer.encode("<think>a-1=5;</think>5 ")
    assert decode_response(tokenizer, [*body, end]) == "<think>a-1=5;</think>5 "
    assert decode_response(tokenizer, [*body, end, pad, pad]) == "<think>a-1=5;</think>5 "
    assert decode_response(tokenizer, [end, *body]) == "<|end|><think>a-1=5;</think>5 "
    assert decode_response(tokenizer, [*body, 7], stop_ids=[7]) == "<think>a-1=5;</think>5 "
    assert decode_response(tokenizer, [end]) == ""
    assert decode_response(tokenizer, []) == ""
