"""Speculative sampling with a draft model.

Yaniv Leviathan, Matan Kalman, Yossi Matias: Fast Inference from Transformers via Speculative
Decoding, ICML 2023, arXiv:2211.17192. Charlie Chen et al.: Accelerating Large Language Model
Decoding with Speculative Sampling, 2023, arXiv:2302.01318.
"""

from __future__ import annotations

from typing import ClassVar

from methods.specdecpp.head import AcceptanceHead
from specbench_cli.api import (
    AcceptParams,
    ArtifactSpec,
    Draft,
    DraftModelMethod,
    LengthParams,
    Outcome,
    Pick,
    Session,
    Tokens,
    create_length_rule,
)


class SpsParams(AcceptParams, LengthParams):
    """Parameters of `Sps`."""


class Sps(DraftModelMethod):
    """Speculative sampling: a draft model drafts a chain, the target verifies it in one forward.

    Lossless because a draft token x from q is accepted with probability min(1, p(x)/q(x)), and a
    rejected token is replaced by a draw from norm(max(p - q, 0)). The result follows the target's
    distribution p. In greedy decoding and coupled sampling (all methods share the Gumbel noise) a
    draft token is accepted if and only if the target chooses it.
    Differs from the papers in no point. q is the draft model's distribution with the same
    temperature, top-k and top-p as p.

    `length` may also be the name of a rule that decides when to stop drafting. The output stays
    exact, because a rule never removes a drafted token. The rules "heuristic" and "confidence" come
    from transformers' assisted generation. The rule "acceptance-head" comes from the method
    `specdec++`. "synergy" and "smartspec" use measured forward times and the batch size
    (`--batch`). "oracle" reads the output of vanilla, and gives an upper bound for all rules. The
    parameter `accept` selects a lossy accept rule.

    One step:
    1. The draft model processes its pending tokens: one token, or two tokens after full acceptance.
    2. Draw `length` tokens from the draft model, one forward per token.
    3. (engine) One target forward over the last committed token and the draft; verify; commit.
    4. Drop the draft model's KV entries of rejected tokens.
    """

    name: ClassVar[str] = "sps"
    aliases: ClassVar[tuple[str, ...]] = ("sd", "speculative")
    family: ClassVar[str] = "a draft model"
    proposed_in: ClassVar[tuple[str, ...]] = ("leviathan2023fast", "chen2023accelerating")
    Params: ClassVar[type[SpsParams]] = SpsParams
    params: SpsParams
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})
    tunable: ClassVar[frozenset[str] | None] = frozenset({"length"})

    def artifacts(self) -> tuple[ArtifactSpec, ...]:
        """Return the acceptance head of SpecDec++ if the parameters select it as length rule.

        Otherwise return nothing.
        """
        return (ArtifactSpec(AcceptanceHead),) if self.params.length == "acceptance-head" else ()

    def start(self, session: Session) -> None:
        """Prefill the draft model."""
        super().start(session)
        self.length = create_length_rule(
            self.params, session, *map(session.artifact, self.artifacts()), model=self.model
        )

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the draft of one decoding step: steps 1 and 2 of the class docstring."""
        picks: list[Pick] = []  # each a token x and, if it was drawn, its distribution q
        self.length.begin()
        limit = min(limit, self.length.most)
        # Step 1: The draft model has no KV entry for the last committed token. After full
        # acceptance, it also has none for the last accepted token.
        x = session.pending_tokens(self.state.length())
        while len(picks) < limit:
            # Step 2: Draw x from q. Apply the length rule only after x is kept. If the rule could
            # drop x because of its value, x would no longer follow q.
            out = self.model.forward(x, self.state)
            picks.append(session.pick(out, len(picks)))
            if not self.length.should_continue(out, picks[-1]):
                break
            x = Tokens(picks[-1][0][None])
        # Step 3: The engine accepts x with probability min(1, p(x) / q(x)). After a rejection, it
        # draws the next token from norm(max(p - q, 0)). After full acceptance, it draws from p.
        return session.chain_of_picks(picks)

    def observe(self, session: Session, outcome: Outcome) -> None:
        """Process the outcome of verification: step 4 of the class docstring.

        The draft model has no KV entry for the last committed token yet.
        """
        super().observe(session, outcome)
        self.length.observe(outcome)
