"""Several requests decoded together: a session each, and one forward of the target a step for all.

Every sequence has a length, a draft, a tree mask and an end of its own; one that has ended takes no
further part. What it commits does not depend on those beside it: its draws, its noise and its
states are its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor

from specbench_cli.engine.learning import Memory
from specbench_cli.engine.models.meter import Meter, Metered
from specbench_cli.engine.session import Request, Session, Shared
from specbench_cli.engine.types import Draft, Forward
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace


class Batch:
    """The sessions of requests that one method decodes together.

    Args:
        memory: what the method keeps between prompts; the same for all sequences.
        recordings, references: by place, as `Session` takes them.
        kind: what makes the sessions.

    Attributes:
        sessions: one a request, in their order.
        meter: the trace of all forwards; `Forward.rows` says whose rows each had.
    """

    def __init__(
        self,
        workspace: Workspace,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        pass_: int = 1,
        memory: Memory | None = None,
        recordings: Mapping[int, Sequence[int]] | None = None,
        references: Mapping[int, Sequence[int]] | None = None,
        kind: type[Session] = Session,
    ) -> None:
        target = workspace.decoders["target"]
        self.meter = Meter(target.device)
        self._target = Metered(target, self.meter, role="verify")
        self._taken = 0
        lend, kept = workspace.loans(len(requests)), Memory() if memory is None else memory
        # Sequences about as long as each other lie beside each other: attention takes them at once.
        lengths = [len(request.ids) for request in requests]
        order = sorted(range(len(requests)), key=lengths.__getitem__)
        self._line = {place: line for line, place in enumerate(order)}
        self.sessions = tuple(
            kind(
                workspace,
                request,
                sampling,
                pass_=pass_,
                memory=kept,
                recording=(recordings or {}).get(place),
                reference=(references or {}).get(place),
                shared=Shared(self.meter, partial(lend, place=self._line[place]), place),
            )
            for place, request in enumerate(requests)
        )

    def prefill(self) -> None:
        """Run all prompts through the target in one forward; commit each one's first token."""
        nothing = [(session, None) for session in self.sessions]
        for session, logits in zip(self.sessions, self._forward(nothing), strict=True):
            session.harness.begun(logits)

    def score(self, drafts: Sequence[tuple[Session, Draft]]) -> list[Tensor]:
        """One target forward over the last committed tokens and the drafts of some sequences.

        Returns:
            for each, logits [m + 1, V] as of `Session.score`.
        Raises:
            MethodFault: a draft is malformed.
        """
        return self._forward(drafts)

    def forwards(self) -> Sequence[Forward]:
        """The forwards since the last call, for the steps that they led to."""
        first, self._taken = self._taken, len(self.meter.forwards)
        return self.meter.forwards[first:]

    def _forward(self, drafts: Sequence[tuple[Session, Draft | None]]) -> list[Tensor]:
        parts = [session.harness.brings(draft) for session, draft in drafts]
        order = sorted(range(len(parts)), key=lambda at: self._line[parts[at].place])
        outs = self._target.forward_batch(
            [parts[at] for at in order], taps=drafts[0][0].harness.taps
        )
        at_of = dict(zip(order, outs, strict=True))
        return [session.harness.takes(at_of[at]) for at, (session, _) in enumerate(drafts)]
