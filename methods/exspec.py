"""EXSPEC: batches of sequences with equal length, chosen from a window, need no padding.

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
    Field,
    LengthParams,
    Outcome,
    Session,
    create_length_rule,
    draft_chains,
)


class ExSpecParams(LengthParams):
    """Parameters of `ExSpec`."""

    window: int = Field(
        32,
        ge=1,
        description="number of sequences from which a batch is chosen (W in the paper; authors'"
        " code: 32)",
    )


class ExSpec(DraftModelMethod):
    """EXSPEC: batches sequences of equal length from a window of sequences.

    Lossless for the same reason as the method `eqspec`: the choice of sequences for a step does not
    change the tokens of any sequence.
    Differs from the paper in the same points as `eqspec`. No batch is padded here. The counter
    `realigned_rows` is the number of KV entries that the paper's batches of unequal lengths would
    move. Sequences are grouped by their true length, not by padded length, and prompts join in
    their original order, not sorted.

    One step (with `--batch N`, of up to N sequences):
    1. Cross-batch scheduling: group the window's sequences by length. The first group of N
       sequences is the batch. If no group is that large, the batch is the first N sequences of the
       window; in the paper, these need padding.
    2. Draft: one forward of the draft model per token, over all sequences with remaining budget.
    3. (engine) One target forward; verify and commit each sequence. When a sequence ends, another
       prompt joins the window.
    4. Drop the draft model's KV entries of rejected tokens.
    """

    name: ClassVar[str] = "exspec"
    family: ClassVar[str] = "a draft model"
    proposed_in: ClassVar[tuple[str, ...]] = ("zhang2025batch",)
    Params: ClassVar[type[LengthParams]] = ExSpecParams
    params: ExSpecParams
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})
    tunable: ClassVar[frozenset[str] | None] = frozenset({"length"})

    def artifacts(self) -> tuple[ArtifactSpec, ...]:
        """Return the acceptance head of SpecDec++ if the parameters select it as length rule.

        Otherwise return nothing.
        """
        return (ArtifactSpec(AcceptanceHead),) if self.params.length == "acceptance-head" else ()

    def max_sequences(self, size: int) -> int:
        """Return the window size: the maximum number of sequences that decode at the same time."""
        return max(size, self.params.window)

    def start(self, session: Session) -> None:
        """Prefill the draft model."""
        super().start(session)
        heads = map(session.artifact, self.artifacts())
        self.length = create_length_rule(self.params, session, *heads, model=self.model)
        self.realigned, self.unpadded = 0, False

    def schedule(
        self, members: Sequence[tuple[Self, Session]], size: int
    ) -> Sequence[tuple[Self, Session]]:
        """Carry out step 1 of the class docstring."""
        classes: dict[int, list[tuple[Self, Session]]] = {}
        for member in members:
            alike = classes.setdefault(len(member[1].tokens()), [])
            alike.append(member)
            if len(alike) == size:
                return alike
        return members[:size]

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the draft of one decoding step for a single sequence: step 2 of the class
        docstring.
        """
        return self.propose_batch([(self, session)])[0]

    def propose_batch(self, members: Sequence[tuple[Self, Session]]) -> list[Draft]:
        """Carry out step 2 of the class docstring."""
        lengths = [len(session.tokens()) for _, session in members]
        for (method, session), length in zip(members, lengths, strict=True):
            method.unpadded = len(set(lengths)) == 1
            method.realigned = session.state.length() if length < max(lengths) else 0
        sequences = [(session, method.state) for method, session in members]
        return draft_chains(self.model, sequences, [method.length for method, _ in members])

    def observe(self, session: Session, outcome: Outcome) -> Mapping[str, float]:
        """Process the outcome of verification: step 4 of the class docstring.

        The draft model has no KV entry for the last committed token yet.
        """
        super().observe(session, outcome)
        self.length.observe(outcome)
        return {"realigned_rows": self.realigned, "unpadded_steps": self.unpadded}
