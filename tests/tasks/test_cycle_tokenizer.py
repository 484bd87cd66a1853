"""The built-in tokenizer: any text goes in and comes out unchanged."""

from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.tasks.cycle_tokenizer import build_tokenizer, byte_symbols

TOKENIZER = build_tokenizer()


def test_the_tasks_symbols_come_first_and_the_vocabulary_is_small() -> None:
    assert TOKENIZER.encode("0123456789+-*=;abcdefghijklmnopqrstuvwxyz") == list(range(41))
    assert len(TOKENIZER) == 260
    assert (TOKENIZER.pad_token, TOKENIZER.eos_token) == ("<|pad|>", "<|end|>")
    assert TOKENIZER.encode("<think></think>") == [256, 257]
    assert set(TOKENIZER.all_special_tokens) == {"<|pad|>", "<|end|>"}


def test_the_symbols_of_bytes_are_those_of_the_library() -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    symbols = byte_symbols()
    assert len(set(symbols.values())) == 256
    assert set(symbols.values()) == set(ByteLevel.alphabet())
    assert (symbols[ord(" ")], symbols[ord("a")], symbols[ord("\n")]) == ("Ġ", "a", "Ċ")


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back_exactly(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    if "<" not in text:
        assert len(ids) == len(text.encode())


def test_awkward_texts_come_back_exactly() -> None:
    for text in (
        " a  b ",
        "don't . , !",
        "\r\n\t\x00",
        "e\u0301 \u00e9",
        "\U0001f468\u200d\U0001f469",
        "a<think> </think>",
    ):
        assert TOKENIZER.decode(TOKENIZER.encode(text)) == text
