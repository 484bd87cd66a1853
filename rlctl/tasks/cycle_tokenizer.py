"""The tokenizer of the built-in model: one token a byte, the task's symbols first, so that any text can be read."""

from __future__ import annotations

from typing import Any

from rlctl.tasks.cycle import MAX_K

PAD, EOS = "<|pad|>", "<|end|>"
THINK = ("<think>", "</think>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{% elif message['role'] == 'user' and (loop.first or loop.previtem['role'] == 'assistant') %}"
    "{{ message['content'] }}"
    "{% else %}{{ message['content'] + '\n' }}{% endif %}"
    "{% endfor %}"
)
"""What a user says first, or in answer to the model, is rendered to its bare text, the form that the warm start trains
on."""


def byte_symbols() -> dict[int, str]:
    """Return byte -> the printable character that byte-level tokenizers write for it (the table of GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


def build_tokenizer() -> Any:
    """Return the transformers tokenizer: 256 bytes, two think marks (ordinary text), padding and end (special)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = "".join(chr(ord("a") + i) for i in range(MAX_K))
    task_bytes = [*f"0123456789+-*=;{letters}".encode()]
    symbols = byte_symbols()
    order = [*task_bytes, *(byte for byte in range(256) if byte not in task_bytes)]
    vocab = {symbols[byte]: i for i, byte in enumerate(order)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in THINK])
    core.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in (PAD, EOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )
