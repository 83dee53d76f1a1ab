"""Speculative sampling with a draft model.

Yaniv Leviathan, Matan Kalman, Yossi Matias: Fast Inference from Transformers via Speculative
Decoding, ICML 2023, arXiv:2211.17192. Charlie Chen et al.: Accelerating Large Language Model
Decoding with Speculative Sampling, 2023, arXiv:2302.01318.
"""

from __future__ import annotations

from typing import ClassVar

from specbench_cli.api import Draft, Field, Method, MethodParams, Outcome, Session, Tokens


class SpsParams(MethodParams):
    """Parameters of `Sps`."""

    length: int = Field(
        5, ge=1, description="draft tokens a step (gamma in Leviathan et al., K in Chen et al.)"
    )


class Sps(Method):
    """Speculative sampling: a small model drafts a chain, the target scores it in one forward.

    Exact because a draft token x drawn from q stands with probability min(1, p(x)/q(x)) and a
    rejected one is replaced by a draw from norm(max(p - q, 0)), which together draw from p; in
    greedy and coupled decoding a draft token stands iff it is the target's own choice.
    Differs from the papers: nothing; q is the draft's law under the target's temperature and cuts.

    One step:
    1. Feed the draft the committed tokens that it has not seen: one, or two after full acceptance.
    2. Draw `length` tokens from it, one forward each.
    3. (engine) One target forward over the last committed token and the draft; verify; commit.
    4. Forget the draft's rows of rejected tokens.
    """

    name: ClassVar[str] = "sps"
    Params: ClassVar[type[MethodParams]] = SpsParams
    params: SpsParams
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})

    def start(self, session: Session) -> None:
        """Prefill the draft."""
        self.model = session.draft()
        self.state = session.new_state(self.model)
        self.model.forward(session.since(0), self.state, logits_at=None)

    def propose(self, session: Session, limit: int) -> Draft:
        """Steps 1 and 2."""
        picks = []
        x = session.since(self.state.length())
        for ahead in range(min(self.params.length, limit)):
            picks.append(session.pick(self.model.forward(x, self.state), ahead))
            x = Tokens(picks[-1][0][None])
        return session.drawn(picks)

    def observe(self, session: Session, outcome: Outcome) -> None:
        """Step 4: keep the rows of what was committed, but for the last token, which has none."""
        self.state.truncate(0, min(self.state.length(), len(session.tokens()) - 1))
