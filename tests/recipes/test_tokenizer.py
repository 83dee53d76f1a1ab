"""The tokenizer of the embedded family."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from recipes.embedded.tokenizer import tokenizer_texts, train_tokenizer
from specbench_cli.training.corpus import SPECIAL_TOKENS

CHAT = [
    {"role": "user", "content": "Grüß Gott!"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "And now?"},
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(islice(tokenizer_texts([], 0, 300), 600), vocab_size=600)


def test_the_chat_template_marks_turns_and_opens_the_answer(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|begin|><|user|>Grüß Gott!<|assistant|>Hello.<|end|><|user|>And now?<|assistant|>"
    )


def test_a_rendered_chat_encodes_to_the_special_ids_once(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert [SPECIAL_TOKENS[i] for i in ids if i < len(SPECIAL_TOKENS)] == [
        "<|begin|>",
        "<|user|>",
        "<|assistant|>",
        "<|end|>",
        "<|user|>",
        "<|assistant|>",
    ]
    assert tokenizer(text).input_ids == ids


def test_eos_bos_and_pad_are_the_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.bos_token == "<|begin|>"
    assert tokenizer.pad_token == "<|pad|>"


def test_digits_are_single_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.tokenize("1234") == ["1", "2", "3", "4"]


@given(text=st.text())
def test_any_text_is_decoded_to_itself(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == text


def test_tokenizer_training_is_reproducible(tokenizer: PreTrainedTokenizerFast) -> None:
    again = train_tokenizer(islice(tokenizer_texts([], 0, 300), 600), vocab_size=600)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
