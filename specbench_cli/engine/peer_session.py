"""Session for an implementation with its own decoding loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Origin, Outcome
from specbench_cli.errors import MethodFault


class PeerSession(Session):
    """One request being decoded by somebody else's implementation, with its own means.

    It gets transformers' own objects, and hands over what it decoded (`adopt`) in place of having
    it verified and committed.

    Attributes:
        counted: what it counted itself, of a request whose steps it does not tell (`count`).
        sees_first: whether it said when the first token was there.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counts: dict[str, float] = {}
        self.knows_first_token_time = False

    @property
    def pass_(self) -> int:
        """The pass of the run, from 1; under rejection another pass draws anew."""
        return self._pass

    @property
    def tokenizer(self) -> Any:
        """transformers' own tokenizer of the target."""
        return self._workspace.tokenizer

    def module(self, name: str) -> Any:
        """transformers' own module of a decoder of the run, "target" or "draft"."""
        if self._workspace.modules is None:
            raise MethodFault(f"this run holds no transformers module of {name!r}")
        return self._workspace.modules(name)

    def now(self) -> int:
        """Nanoseconds of the clock that the request is timed by."""
        return self.harness.meter.clock.now()

    def adopt(self, outcome: Outcome, at: int | None = None) -> Outcome:
        """Take what was decoded: cut by the stop rule and appended; no state is touched.

        A peer tells its steps once it has all of them: they arrived with the first one told.

        Args:
            at: when its tokens were there, by `now`, of a peer that saw them come.
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
        """Take tokens whose steps are not told.

        Args:
            ids: of the whole output.
            first, last: when the first and the last of them were there, by `now`.
        """
        self.adopt(Outcome((), tuple(ids[:1]), ("prefill",), 0), first)
        if self.finish is None and len(ids) > 1:
            rest = tuple(ids[1:])
            plain: list[Origin] = ["plain" for _ in rest]
            self.adopt(Outcome((), rest, tuple(plain), 0), last)

    def count(self, **counted: float) -> None:
        """Tell what the other program counted of this request: "drafted" and "accepted" tokens."""
        self.counts |= counted
