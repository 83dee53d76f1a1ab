"""Structured output: a logits processor that masks the tokens that a grammar forbids.

The library llguidance computes the masks, with a matcher whose state is the text so far. For a
draft, this module moves the matcher through the draft nodes in depth-first order. It moves the
matcher back at each branch, and back to the root at the end.
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
    """Interface of llguidance's token matcher, `llguidance.LLMatcher`."""

    def deep_copy(self) -> GrammarMatcher:
        """Return a copy of the matcher in the same state."""

    def try_consume_tokens(self, tokens: list[int], /) -> int:
        """Advance the matcher over tokens up to the first forbidden token. Return their number."""

    def rollback(self, num_tokens: int, /) -> bool:
        """Move the matcher back by a number of tokens."""

    def compute_bitmask(self) -> bytes:
        """Return one bit for each token id, lowest bit first: 1 if the token is allowed next."""

    def is_error(self) -> bool:
        """Return True if the matcher cannot continue because of a limit of the library."""

    def get_error(self) -> str:
        """Return the reason why the matcher cannot continue."""


class GrammarMask(LogitsProcessor):
    """Logits processor that masks tokens that the grammar forbids.

    When the output is complete, only the end-of-text ids are allowed.

    Args:
        matcher: Matcher before the first token. At the end of the output it allows the first id of
            `eos`.
        eos: End-of-text ids. If the matcher allows the first of them, all of them are allowed.
    """

    def __init__(self, matcher: GrammarMatcher, eos: Sequence[int]) -> None:
        self._matcher, self._eos = matcher, eos

    def begin(self) -> RequestProcessor:
        """Return the grammar mask of a new request."""
        return RequestGrammarMask(self._matcher.deep_copy(), self._eos)


class RequestGrammarMask(RequestProcessor):
    """Grammar mask of one request, with a matcher that follows the request's output."""

    def __init__(self, matcher: GrammarMatcher, eos: Sequence[int]) -> None:
        self._matcher, self._eos = matcher, eos
        self._read = 0  # number of output tokens that the matcher has consumed

    def __call__(
        self,
        rows: Tensor,
        output: Sequence[int],
        tokens: Sequence[int],
        parents: tuple[int, ...] | None = None,
    ) -> Tensor:
        """Return the target's logits, with -inf for tokens that the grammar forbids."""
        self._follow(output)
        tree = build_tree(tuple(range(ROOT, len(tokens) - 1)) if parents is None else parents)
        # Start with True everywhere. Rows after a forbidden token stay unmasked, because a fully
        # masked row would have no distribution.
        allowed = np.ones(rows.shape, dtype=np.bool_)
        allowed[0] = self._allowed_ids(rows.shape[1])
        ahead = 0  # number of nodes that the matcher has consumed
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
        """Return a draft model's logits, with -inf for tokens that the grammar forbids."""
        self._follow(output)
        read = sum(1 for _ in takewhile(self._consume, path))
        if read == len(path):
            allowed = self._allowed_ids(rows.shape[1])
            forbidden = host.send(torch.from_numpy(~allowed), rows.device)
            masked = rows.masked_fill(forbidden, -math.inf)
            # If the grammar allows only tokens that have no finite logit in the draft model, leave
            # the row unmasked.
            rows = torch.where(masked.isfinite().any(-1, keepdim=True), masked, rows)
        self._matcher.rollback(read)
        return rows

    def _follow(self, output: Sequence[int]) -> None:
        """Advance the matcher over the tokens that were committed since the last call."""
        for at in range(self._read, len(output)):
            if not self._consume(output[at]):
                raise MethodFault(
                    f"the grammar does not allow token {output[at]} at position {at} of the output",
                    "commit only outcomes of `session.verify`",
                )
        self._read = len(output)

    def _consume(self, token: int) -> bool:
        """Advance the matcher by a token. Return False if the token is forbidden or an end-of-text
        id.
        """
        return token not in self._eos and self._matcher.try_consume_tokens([token]) == 1

    def _allowed_ids(self, vocab: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return which target ids the grammar allows next, bool [vocab]. Padding ids are not
        allowed.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, count=vocab, bitorder="little").astype(np.bool_)
        allowed[[*self._eos]] = allowed[self._eos[0]]
        if self._matcher.is_error() or not allowed.any():
            why = self._matcher.get_error() or "no token of the target can continue the output"
            raise ArithmeticError(f"the grammar cannot continue: {why}")
        return allowed
