"""Session for peers: implementations of other projects with their own decoding loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Origin, Outcome
from specbench_cli.errors import MethodFault
from specbench_cli.former_names import renamed_members


@renamed_members(counted="counts", sees_first="knows_first_token_time", now="now_ns")
class PeerSession(Session):
    """Session of a request that a peer decodes.

    The peer gets transformers' model and tokenizer, and passes the decoded tokens to `adopt`.

    Attributes:
        counts: Counts that the peer reports instead of steps (`count`).
        knows_first_token_time: True if the peer reported the time of the first token.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counts: dict[str, float] = {}
        self.knows_first_token_time = False

    @property
    def pass_(self) -> int:
        """Number of the repeat, from 1. Under rejection sampling each repeat uses another seed."""
        return self._pass

    @property
    def tokenizer(self) -> Any:
        """transformers' own tokenizer of the target."""
        return self._workspace.tokenizer

    def module(self, name: str) -> Any:
        """Return the transformers module of the "target" or the "draft"."""
        if self._workspace.modules is None:
            raise MethodFault(f"this run has no transformers module of {name!r}")
        return self._workspace.modules(name)

    def now_ns(self) -> int:
        """Return the time in ns, by the clock of the request."""
        return self.harness.meter.clock.now_ns()

    def adopt(self, outcome: Outcome, at: int | None = None) -> Outcome:
        """Append decoded tokens up to the end of the output. No state changes.

        A peer calls this after it has decoded all tokens.

        Args:
            at: Time of the tokens, as from `now_ns`, if the peer knows it.
        """
        first = self._text.position == 0
        arrived = self._text.last_ns
        kept = self._text.append(outcome)
        if at is not None:
            self._text.last_ns = at
            if first:
                self._text.first_ns, self.knows_first_token_time = at, True
        elif not first:
            self._text.last_ns = arrived
        return kept

    def adopt_tokens(self, ids: Sequence[int], first: int, last: int) -> None:
        """Append the tokens of a peer that does not report steps.

        Args:
            ids: The whole output.
            first, last: Times of the first and the last token, as from `now_ns`.
        """
        self.adopt(Outcome((), tuple(ids[:1]), ("prefill",), 0), first)
        if self.finish is None and len(ids) > 1:
            rest = tuple(ids[1:])
            plain: list[Origin] = ["plain" for _ in rest]
            self.adopt(Outcome((), rest, tuple(plain), 0), last)

    def count(self, **counted: float) -> None:
        """Store counts that the peer reports, such as "drafted" and "accepted" tokens."""
        self.counts |= counted
