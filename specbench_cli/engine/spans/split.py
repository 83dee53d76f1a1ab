"""Where a text is cut into spans."""

from __future__ import annotations

from collections.abc import Sequence

from specbench_cli.engine.drafting.vocabulary import Vocabulary


class Delimiter:
    r"""The end of a span, looked for in its text and not in its ids.

    A delimiter comes as one token, as several, or inside one that says more: "\n\n" is one token to
    some tokenizers, two to others, and a part of ".\n\n" to most. The span ends with the token that
    completes it, whatever else that says.

    Args:
        text: what ends a span; empty: nothing does.
        words: what ids stand for.
    """

    def __init__(self, text: str, words: Vocabulary) -> None:
        self._data, self._pieces = text.encode(), words.pieces

    def ends(self, ids: Sequence[int]) -> bool:
        """Whether the last token of a span completes a delimiter that lies in the span."""
        if not self._data or not ids:
            return False
        last = self._piece(ids[-1])
        tail = last
        for token in reversed(ids[:-1]):
            if len(tail) - len(last) >= len(self._data) - 1:
                break
            tail = self._piece(token) + tail
        return self._data in tail[max(0, len(tail) - len(last) - len(self._data) + 1) :]

    def split(self, ids: Sequence[int]) -> list[list[int]]:
        """The spans of a whole text; the last one may lack its delimiter."""
        spans: list[list[int]] = [[]]
        for token in ids:
            if self.ends(spans[-1]):
                spans.append([])
            spans[-1].append(token)
        return [span for span in spans if span]

    def _piece(self, token: int) -> bytes:
        """Bytes of a token; none of one that pads the vocabulary."""
        return self._pieces[token] if token < len(self._pieces) else b""
