"""Which part of a text each of its tokens wrote.

Token ids cannot be decoded one by one: a blank may depend on the token before, and with byte-level
vocabularies a character may be spread over several tokens. A token's piece is therefore what it
adds to the text before it; the token that completes a character has all of it, those before have
none.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbench_cli.summary.comparison import Decode

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What decoders put in place of bytes that are no character yet."""
_LONGEST = 8
"""Tokens that one character may be spread over; bytes not completed by then are broken."""
_BEFORE = 4
"""Tokens of context that a token is decoded with."""


def pieces(ids: Sequence[int], decode: Decode | None) -> list[str]:
    """The text of every token; together they are the text of all, as far as it is UTF-8.

    Args:
        ids: [n] tokens of one text.
        decode: from ids to text; None: the pieces are the ids in words, with a blank between.
    Returns:
        [n] pieces, some of them empty.
    """
    if decode is None:
        return [f"{' ' if place else ''}{token}" for place, token in enumerate(ids)]
    found: list[str] = []
    settled = 0  # tokens whose text is complete
    start, before = 0, ""  # the context and its text
    for end in range(1, len(ids) + 1):
        text = decode(ids[start:end])
        waits = text.endswith(INCOMPLETE) and end < len(ids) and end - settled < _LONGEST
        added = "" if waits else text[_shared(before, text) :]
        if not waits:
            settled = end
            start = max(0, end - _BEFORE)
            before = decode(ids[start:end])
        found.append(added)
    return found


def _shared(a: str, b: str) -> int:
    """How many characters two texts begin with alike."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((place for place, (x, y) in pairs if x != y), min(len(a), len(b)))


def piece(token: int, decode: Decode | None) -> str:
    """A token's text where nothing is known of its neighbours; its id where it has none alone."""
    text = "" if decode is None else decode([token])
    return text if text and INCOMPLETE not in text else f"#{token}"
