"""Sessions that expose their states, clock and trace to the audit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from specbench_cli.audit.models.head import (
    TableFeatureHead,
    TableLookAhead,
    TableSequentialHead,
)
from specbench_cli.engine.models.artifact import ArtifactSpec
from specbench_cli.engine.models.decoder import Decoder, State
from specbench_cli.engine.models.head import FeatureHead
from specbench_cli.engine.models.meter import Metered, MeteredHead
from specbench_cli.engine.partial import Partial
from specbench_cli.engine.peer_session import PeerSession
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import ModelOutput
from specbench_cli.engine.verify.choosing import Pick
from specbench_cli.engine.watch import Watch
from specbench_cli.engine.workers.drafter import DraftSession
from specbench_cli.engine.workspace import Workspace


def nominal_cost(model: str, rows: int, *step: int) -> float:
    """Return invented costs of a forward, at which drafting pays off.

    Methods with `Method.uses_costs` read them during an audit.
    """
    return (1 + rows / 16) / (1 if model == "target" else 10)


class ObservedSession(Session):
    """A session that records its states and stateless heads, and checks its timer and trace.

    Attributes:
        model_states: (model, state) for all states. The model is a `Partial` for a state of some
            of the target's layers.
        stateless_heads: heads without a state that the method loaded.
        watch: check of the timer and the trace, which runs during decoding.
        n_picked: number of calls of `pick`, which draws or chooses draft tokens.
    """

    model_states: list[tuple[Decoder | Partial, State]]
    stateless_heads: tuple[FeatureHead, ...] = ()
    n_picked = 0

    def __init__(self, workspace: Workspace, *request: Any, **rest: Any) -> None:
        super().__init__(workspace, *request, **rest)
        self.watch = Watch(workspace, self.memory)
        self.watch.begin(self)

    def find_contradiction(self) -> str | None:
        """Return a description of a forward that the timer or the trace missed, or None."""
        self.watch.end()
        for worker in self.harness.workers:
            worker.drain()
        self.harness.meter.resolve()
        return self.watch.find_fault(self.harness.meter)

    def new_state(self, decoder: Metered, slack: int = 0) -> State:
        """See `Session`."""
        state = super().new_state(decoder, slack)
        model: Decoder | Partial = decoder if isinstance(decoder, Partial) else decoder.decoder
        self.__dict__.setdefault("model_states", []).append((model, state))
        return state

    def artifact(self, wanted: ArtifactSpec) -> Any:
        """See `Session`."""
        made = super().artifact(wanted)
        if isinstance(made, MeteredHead):
            self.stateless_heads = (*self.stateless_heads, made.head)
        return made

    def pick(self, out: ModelOutput, ahead: int = 0) -> Pick:
        """See `Session`."""
        self.n_picked += 1
        return super().pick(out, ahead)

    @property
    def drafted_by_tables(self) -> bool:
        """True if models drafted, and all their outputs came from tables."""
        exact = (
            isinstance(head, TableSequentialHead | TableLookAhead)
            or (isinstance(head, TableFeatureHead) and head.exact)
            for head in self.stateless_heads
        )
        return all(exact) and any(f.model != "target" for f in self.harness.meter.forwards)

    @property
    def misread(self) -> int:
        """Number of rows that a draft read at a wrong position or with wrong features."""
        return sum(getattr(state, "misread", 0) for _, state in self.model_states)

    def draft_sessions(self) -> Iterator[DraftSession]:
        """Yield the draft sessions of drafters that run in this process."""
        for worker in self.harness.workers:
            if worker.session is not None:
                yield worker.session

    def states(self) -> Iterator[tuple[Decoder | Partial, State, Sequence[int]]]:
        """Yield (model, state, text) of every state, including those of drafters."""
        for decoder, state in self.model_states:
            yield decoder, state, self.tokens()
        for desk in self.draft_sessions():
            for decoder, state in desk.states:
                yield decoder, state, desk.text


class ObservedPeerSession(ObservedSession, PeerSession):
    """An observed session for a peer, which decodes with its own engine."""
