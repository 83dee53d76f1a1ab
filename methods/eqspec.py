"""EQSPEC: speculative decoding of a batch whose sequences accept different numbers of tokens.

Ranran Haoran Zhang et al.: Batch Speculative Decoding Done Right, 2025, arXiv:2510.22876.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

from methods.specdecpp.head import AcceptanceHead
from specbench_cli.api import (
    ArtifactSpec,
    Draft,
    DraftModelMethod,
    LengthParams,
    Outcome,
    Session,
    create_length_rule,
    draft_chains,
)


class EqSpecParams(LengthParams):
    """Parameters of `EqSpec`."""


class EqSpec(DraftModelMethod):
    """EQSPEC: batched drafting in which each sequence keeps its own accepted tokens.

    Lossless because every sequence has the same tokens, positions, attention and KV cache as when
    it is decoded alone. Speculative sampling verifies each sequence.
    Differs from the paper: in the paper, a batch is one tensor padded on the left. Every step
    strips the padding, appends the accepted tokens and pads again (unpad, append, repad). Here
    sequences of a batch have different lengths without padding, and no KV entry moves. The counter
    `realigned_rows` is the number of the target's KV entries that padding would have moved. The
    authors' code also drops the bonus token after full acceptance, finds padding by token id,
    searches the prompt for EOS, and keeps tokens after EOS. It feeds the draft model the whole text
    in each step, and shortens all drafts to the smallest remaining budget. specbench does none of
    this.

    One step (with `--batch N`, of up to N sequences):
    1. Count the KV entries that a padded batch would move to align the ends of all sequences.
    2. Draft: one forward of the draft model per token, over all sequences with remaining budget.
    3. (engine) One target forward over the last committed token and the draft of each sequence;
       verify each; if a draft tokens of a sequence are accepted, commit a + 1 tokens.
    4. Drop the draft model's KV entries of rejected tokens. A finished sequence leaves the batch.
    """

    name: ClassVar[str] = "eqspec"
    family: ClassVar[str] = "a draft model"
    proposed_in: ClassVar[tuple[str, ...]] = ("zhang2025batch",)
    Params: ClassVar[type[LengthParams]] = EqSpecParams
    params: EqSpecParams
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
        heads = map(session.artifact, self.artifacts())
        self.length = create_length_rule(self.params, session, *heads, model=self.model)
        self.pad: int | None = None  # padding before the text in the paper's batch
        self.realigned = 0

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the draft of one decoding step for a single sequence: steps 1 and 2 of the class
        docstring.
        """
        return self.propose_batch([(self, session)])[0]

    def propose_batch(self, members: Sequence[tuple[Self, Session]]) -> list[Draft]:
        """Carry out steps 1 and 2 of the class docstring."""
        # Step 1: In the paper's batch, the longest text has `width` tokens, and shorter texts are
        # padded on the left. If the padding of a text changes, its KV entries would move.
        width = max(len(session.tokens()) for _, session in members)
        for method, session in members:
            pad = width - len(session.tokens())
            method.realigned = session.state.length() if method.pad not in (None, pad) else 0
            method.pad = pad
        # Step 2: Draw draft tokens for all sequences, one draft model forward per token.
        sequences = [(session, method.state) for method, session in members]
        return draft_chains(self.model, sequences, [method.length for method, _ in members])

    def observe(self, session: Session, outcome: Outcome) -> Mapping[str, float]:
        """Process the outcome of verification: step 4 of the class docstring.

        The draft model has no KV entry for the last committed token yet.
        """
        super().observe(session, outcome)
        self.length.observe(outcome)
        return {"realigned_rows": self.realigned}
