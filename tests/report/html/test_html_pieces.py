"""Tests of splitting an output's text into one piece per token."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench_cli.report.html.tokens import split_text, token_text
from specbench_cli.report.tokens import load_text_decoder

VOCABULARY = {number: bytes([number]) for number in range(256)} | {256: b" the", 257: b"\n\n"}


def decode_bytes(ids):
    return b"".join(VOCABULARY[each] for each in ids).decode(errors="replace")


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_pieces_of_single_byte_tokens_join_to_the_text(text):
    ids = list(text.encode())
    found = split_text(ids, decode_bytes)
    assert len(found) == len(ids)
    assert "".join(found) == text


def test_character_is_in_the_piece_of_the_token_that_completes_it():
    ids = [*b"a", *"é😀".encode(), 256]
    assert split_text(ids, decode_bytes) == ["a", "", "é", "", "", "", "😀", " the"]


@pytest.mark.parametrize("broken", [b"\xf0\x9f\x98", b"\xff" * 20, b"a\x80\x80b"])
def test_invalid_bytes_are_kept_and_do_not_affect_later_tokens(broken):
    ids = [*broken, 256, *b"end"]
    found = split_text(ids, decode_bytes)
    assert "".join(found[-4:]).endswith("theend")
    assert "".join(found) == decode_bytes(ids)


@pytest.mark.parametrize(
    "text",
    ["Größe, naïve 日本語 👩‍🚀\n\n  two", "x = {'a': 1}\n\tif x:\n\t\tpass", "12345 + 67890"],
)
def test_pieces_of_the_embedded_tokenizer_join_to_the_text(text, encode):
    ids, decode = encode(text), load_text_decoder("embedded-7m")
    assert "".join(split_text(ids, decode)) == decode(ids)


def test_without_a_tokenizer_the_ids_are_shown():
    assert split_text([7, 12], None) == ["7", " 12"]
    assert token_text(7, None) == "#7"


def test_token_that_is_no_valid_character_is_shown_by_its_id():
    assert token_text(0xF0, decode_bytes) == "#240"
    assert token_text(256, decode_bytes) == " the"
