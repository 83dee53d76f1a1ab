"""Parameters of methods whose draft model drafts chains.

Code that only plans a run imports this module, so it does not import torch.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import Field, field_validator

from specbench_cli.engine.params import MethodParams

LengthRule = Literal[
    "heuristic", "confidence", "entropy", "acceptance-head", "oracle", "synergy", "smartspec"
]
RULES: tuple[LengthRule, ...] = get_args(LengthRule)
LOAD_RULES = ("synergy", "smartspec")
"""Rules that set the draft lengths of all sequences of a step together, from forward costs."""


class LengthParams(MethodParams):
    """Parameters of a method whose draft model drafts chains."""

    length: int | LengthRule = Field(
        5,
        description="number of draft tokens per step (gamma in Leviathan et al., K in Chen et al.),"
        " or the name of a rule that chooses it",
    )
    max: int = Field(20, ge=1, description="maximum draft length if a rule chooses it")
    threshold: float | None = Field(
        None,
        ge=0,
        description="limit at which the rule stops drafting: minimum confidence (default: learned),"
        " maximum entropy in nats (default 1.5), or maximum probability of a rejection"
        " (acceptance-head, default 0.3)",
    )

    @field_validator("length", mode="before")
    @classmethod
    def _number_or_rule(cls, value: Any) -> Any:
        if type(value) is not int and value not in RULES:
            raise ValueError(f"must be a whole number, or {', '.join(RULES)}; got {value!r}")
        if type(value) is int and value < 1:
            raise ValueError(f"must be at least 1, got {value}")
        return value

    acceptance: float = Field(
        0.7,
        gt=0,
        lt=1,
        description="expected acceptance rate of draft tokens: used by synergy, and as the initial"
        " value of smartspec",
    )

    @property
    def upper_bound(self) -> bool:
        """True if the draft length rule knows the output of plain decoding in advance."""
        return self.length == "oracle"

    @property
    def by_load(self) -> bool:
        """True if the draft length depends on the batch: on the other sequences and on forward
        costs.
        """
        return self.length in LOAD_RULES

    @property
    def levels(self) -> int:
        """Maximum number of draft tokens per step."""
        return self.length if isinstance(self.length, int) else self.max
