"""A deliberately loose acceptance rule: what a lossy method has to lose on the embedded models.

A draft token stands if the target gives it at least `share` of the probability of its own first
choice. The target's tokens are then no longer what is committed, and answers get worse:

    specbench run --plugin tests/benchmarks/loose.py -m loose -t mini --set loose.share=0.001
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

from methods.sps import Sps, SpsParams
from specbench_cli.api import Field, Guarantee, MethodParams, Outcome, Session, Step


class LooseParams(SpsParams):
    """Parameters of `Loose`."""

    share: float = Field(
        0.001, ge=0, le=1, description="of the likeliest token's probability; 0 accepts everything"
    )


class Loose(Sps):
    """Greedy drafting with sps, verified by likelihood instead of by identity."""

    name: ClassVar[str] = "loose"
    Params: ClassVar[type[MethodParams]] = LooseParams
    params: LooseParams

    def guarantee(self, sampling: str) -> Guarantee:
        """Nothing but, perhaps, quality."""
        return "quality_only"

    def generate(self, session: Session) -> Iterator[Step]:
        """As sps, with step 3's rule replaced."""
        self.start(session)
        session.prefill()
        while session.finish is None:
            draft = self.propose(session, session.room())
            rows = session.score(draft).float()
            ids = draft.tokens
            worst = math.log(self.params.share) if self.params.share else -math.inf
            behind = rows[: len(ids)].gather(1, ids[:, None])[:, 0] - rows[: len(ids)].amax(-1)
            accepted = int((behind >= worst).long().cumprod(0).sum())
            last = int(rows[accepted].argmax())
            outcome = Outcome(
                path=tuple(range(accepted)),
                committed=(*ids[:accepted].tolist(), last),
                origin=(*["relaxed"] * accepted, "bonus" if accepted == len(ids) else "recovered"),
                tested=min(accepted + 1, len(ids)),
            )
            committed = session.commit(outcome)
            self.observe(session, committed)
            yield session.step(draft, committed)
