"""Session for peers: methods that run another project's implementation with its own
decoding loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Origin, Outcome
from specbench_cli.errors import MethodFault
from specbench_cli.former_names import renamed_members


@renamed_members(counted="counts", sees_first="knows_first_token_time", now="now_ns")
class PeerSession(Session):
    """Session of a request that a peer decodes. A peer runs another project's implementation.

    The peer gets the model and tokenizer of transformers, and passes the decoded tokens to
    `adopt_tokens`.

    Attributes:
        counts: Counts that the peer reports (`count`), if it does not report steps.
        knows_first_token_time: True if the peer reported the time of the first token.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counts: dict[str, float] = {}
        self.knows_first_token_time = False

    @property
    def pass_(self) -> int:
        """Number of the run's repeat, from 1. Under rejection sampling each repeat uses another
        seed.
        """
        return self._pass

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer, as transformers loads it."""
        return self._workspace.tokenizer

    def module(self, name: str) -> Any:
        """Return the transformers module of the model "target" or "draft"."""
        if self._workspace.modules is None:
            raise MethodFault(f"this run has no transformers module of {name!r}")
        return self._workspace.modules(name)

    def now_ns(self) -> int:
        """Return the time in ns, by the clock of the request."""
        return self.harness.meter.clock.now_ns()

    def adopt(self, outcome: Outcome, at: int | None = None) -> Outcome:
        """Append decoded tokens up to the end of the output. No model state changes.

        A peer calls this after it has decoded all tokens.

        Args:
            at: Time of the tokens by `now_ns`, if the peer knows it.
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
        """Append the output of a peer that does not report steps.

        Args:
            ids: Token ids of the whole output.
            first, last: Times of the first and the last token, by `now_ns`.
        """
        self.adopt(Outcome((), tuple(ids[:1]), ("prefill",), 0), first)
        if self.finish is None and len(ids) > 1:
            rest = tuple(ids[1:])
            plain: list[Origin] = ["plain" for _ in rest]
            self.adopt(Outcome((), rest, tuple(plain), 0), last)

    def count(self, **counted: float) -> None:
        """Store counts that the peer, another project's implementation, reports. Examples are the
        numbers of drafted and accepted tokens.
        """
        self.counts |= counted
