"""Structured output: a grammar leaves out the tokens that it forbids after a text.

The masks are a library's; here is which state of its matcher belongs to which row. The matcher is
taken through the nodes of a draft root side first, back at each branch, and to the root in the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from specbench_cli.engine import host
from specbench_cli.engine.verify.processor import LogitsProcessor, RequestProcessor
from specbench_cli.engine.verify.tree import ROOT, build_tree
from specbench_cli.errors import MethodFault


class GrammarMatcher(Protocol):
    """What is needed of a matcher of tokens, `llguidance.LLMatcher`."""

    def deep_copy(self) -> GrammarMatcher:
        """Another one in the same state."""

    def try_consume_tokens(self, tokens: list[int], /) -> int:
        """Go on by tokens, up to the first that is forbidden; how many they were."""

    def rollback(self, num_tokens: int, /) -> bool:
        """Go back by so many tokens."""

    def compute_bitmask(self) -> bytes:
        """A bit for each token, lowest first: whether it is allowed next."""

    def is_error(self) -> bool:
        """Whether it cannot go on, by a limit of the library's own."""

    def get_error(self) -> str:
        """Why it cannot."""


class GrammarMask(LogitsProcessor):
    """Leaves out what a grammar forbids; where it is complete, all but the end of the output.

    Args:
        matcher: before the first token; it says that the output may end by the first of `eos`.
        eos: ids that end an output: all of them are allowed where one is.
    """

    def __init__(self, matcher: GrammarMatcher, eos: Sequence[int]) -> None:
        self._matcher, self._eos = matcher, eos

    def begin(self) -> RequestProcessor:
        """See `Processor`."""
        return RequestGrammarMask(self._matcher.deep_copy(), self._eos)


class RequestGrammarMask(RequestProcessor):
    """A grammar on one request; see `GrammarMask`."""

    def __init__(self, matcher: GrammarMatcher, eos: Sequence[int]) -> None:
        self._matcher, self._eos = matcher, eos
        self._read = 0  # tokens of the output that the matcher is behind

    def __call__(
        self,
        rows: Tensor,
        output: Sequence[int],
        tokens: Sequence[int],
        parents: tuple[int, ...] | None = None,
    ) -> Tensor:
        """See `Processing`."""
        self._follow(output)
        tree = build_tree(tuple(range(ROOT, len(tokens) - 1)) if parents is None else parents)
        # What no output comes to stays as it is: a row without any token is no distribution.
        allowed = np.ones(rows.shape, dtype=np.bool_)
        allowed[0] = self._allowed_ids(rows.shape[1])
        ahead = 0  # nodes that the matcher is behind
        due = [*reversed(tree.children[ROOT])]
        while due:
            node = due.pop()
            row, depth = node + 1, tree.depths[node]
            self._matcher.rollback(ahead - (depth - 1))
            ahead = depth - 1
            if row >= len(allowed) or not self._consume(tokens[node]):
                continue
            ahead = depth
            allowed[row] = self._allowed_ids(rows.shape[1])
            due += reversed(tree.children[node])
        self._matcher.rollback(ahead)
        forbidden = host.send(torch.from_numpy(~allowed), rows.device)
        return rows.masked_fill(forbidden, -math.inf)

    def process_draft(self, rows: Tensor, output: Sequence[int], path: Sequence[int]) -> Tensor:
        """See `Processing`."""
        self._follow(output)
        read = sum(1 for _ in takewhile(self._consume, path))
        if read == len(path):
            allowed = self._allowed_ids(rows.shape[1])
            forbidden = host.send(torch.from_numpy(~allowed), rows.device)
            masked = rows.masked_fill(forbidden, -math.inf)
            # A draft whose output is cut may have no token that is allowed.
            rows = torch.where(masked.isfinite().any(-1, keepdim=True), masked, rows)
        self._matcher.rollback(read)
        return rows

    def _follow(self, output: Sequence[int]) -> None:
        """Read what was committed since."""
        for at in range(self._read, len(output)):
            if not self._consume(output[at]):
                raise MethodFault(
                    f"token {output[at]} at place {at} of the output is none that the grammar"
                    " allows there",
                    "commit what `session.verify` decides, and nothing else",
                )
        self._read = len(output)

    def _consume(self, token: int) -> bool:
        """Go on by a token, if it is one that text goes on with."""
        return token not in self._eos and self._matcher.try_consume_tokens([token]) == 1

    def _allowed_ids(self, vocab: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which of the target's ids are allowed next, [vocab] bool; padding is not."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        known = np.unpackbits(bits, count=vocab, bitorder="little").astype(np.bool_)
        known[[*self._eos]] = known[self._eos[0]]
        if self._matcher.is_error() or not known.any():
            why = self._matcher.get_error() or "no token of the target's can go on from here"
            raise ArithmeticError(f"the grammar has come to an end that is none: {why}")
        return known
