"""Staged speculative decoding.

Benjamin Spector, Chris Re: Accelerating LLM Inference with Staged Speculative Decoding, ES-FoMo
workshop at ICML 2023, arXiv:2308.04623.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, field_validator

from specbench_cli.api import Draft, Field, Method, MethodParams, Outcome, Session
from specbench_cli.engine.drafting.ngram import KatzModel
from specbench_cli.engine.drafting.stages import Counts, Generator, Stage

NGRAM = "ngram"

Stages = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda value: value.split(",") if isinstance(value, str) else value),
]


class StagedParams(MethodParams):
    """Parameters of `Staged`."""

    stages: Stages = Field(
        (NGRAM, "draft"),
        min_length=1,
        description="what drafts for what, cheapest first: ngram or not, models by name, draft",
    )
    depth: int = Field(12, ge=1, description="most tokens that the last stage generates a step")
    threshold: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="it stops behind a token that it would reach with less probability; 0: never",
    )
    nodes: int = Field(16, ge=1, description="size of the tree that the target verifies")
    width: int = Field(3, ge=1, description="most children of a node")
    lookahead: int = Field(4, ge=1, description="size of the trees that models below verify")
    order: int = Field(3, ge=1, description="n of the n-grams")
    scope: Literal["run", "prompt"] = Field(
        "run", description="what n-gram counts live for: a pass over all prompts, or one prompt"
    )
    law: Literal["point", "wor"] = Field(
        "point",
        description="what the last stage generates under rejection: its likeliest tokens, taken as"
        " point masses, or draws from its law, branches without replacement",
    )

    @field_validator("stages")
    @classmethod
    def _models_after_counts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if NGRAM in value[1:] or value == (NGRAM,) or len(set(value)) < len(value):
            raise ValueError(f"must name models, each once, {NGRAM!r} at most before them")
        return value


class Staged(Method):
    """Staged speculative decoding: the draft model has a draft of its own, and drafts a tree.

    Exact because the tree is verified like any other: what the stages below guess decides how many
    forwards the draft model takes for the tokens that it would have generated anyway. Those are
    point masses; with law `wor` they are draws from its law, whatever was guessed.
    Differs from the paper: n-grams are counted while decoding, not beforehand in 120 million tokens
    of the draft's; the shape of the tree, which the paper leaves open, is what was generated, up to
    a token that is too unlikely to be reached, with the next-best children where they are likeliest
    to be wanted; Katz's discount is absolute.

    With scope `run` the counts go on from prompt to prompt of a pass, so that how fast a prompt is
    decoded depends on the prompts before it, which are the same for all methods; what is decoded
    does not. With scope `prompt` each begins with none.

    One step:
    1. Take from each stage's state what was not committed.
    2. Until the last stage has `depth` tokens, or one that it would hardly reach: the stage below
       proposes a tree of at most `lookahead` nodes (a model by these same steps, n-grams their
       likeliest continuations), one forward of the model scores it, and the model's own choices are
       followed down that tree. They, and its choice after them, are generated and counted.
    3. To what it generated add the next-best children of the same forwards, the likeliest first,
       until the tree has `nodes`.
    4. (engine) One target forward over the last committed token and the tree; verify; commit.
    """

    name: ClassVar[str] = "staged"
    Params: ClassVar[type[MethodParams]] = StagedParams
    params: StagedParams
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})
    state_scope: ClassVar[Literal["prompt", "run", "corpus"]] = "run"
    citation: ClassVar[str] = """
        @misc{spector2023staged,
          title = {Accelerating {LLM} Inference with Staged Speculative Decoding},
          author = {Spector, Benjamin and Re, Chris},
          year = {2023},
          eprint = {2308.04623},
          archiveprefix = {arXiv},
          note = {ES-FoMo workshop at ICML 2023},
        }
    """

    def models(self) -> tuple[str, ...]:
        """The stages that are neither n-grams nor the run's draft model."""
        return tuple(stage for stage in self.params.stages if stage not in (NGRAM, "draft"))

    def start(self, session: Session) -> None:
        """Make room for the tree, prefill the models, and take up the counts."""
        params = self.params
        session.reserve(params.nodes)
        below: Stage | None = None
        for stage in params.stages:
            last = stage == params.stages[-1]
            if stage == NGRAM:
                below = Counts(session, self._counts(session), params.lookahead)
                continue
            below = self.last = Generator(
                session,
                session.draft(stage),
                below,
                nodes=params.nodes if last else params.lookahead,
                width=params.width,
                slack=params.lookahead,
                least=params.threshold if last else 0.0,
                draws=last and params.law == "wor" and session.sampling.draws,
            )

    def propose(self, session: Session, limit: int) -> Draft:
        """Steps 2 and 3."""
        trunk, rows = self.last.generate((), min(self.params.depth, limit))
        if trunk and self.last.draws:
            return self.last.drawn(trunk, rows)
        tokens, parents = self.last.branched(trunk, rows)
        return session.chain(tokens) if len(tokens) == len(trunk) else session.tree(tokens, parents)

    def observe(self, session: Session, outcome: Outcome) -> None:
        """Step 1, of the next step: the text is as it will be then."""
        self.last.settle()

    def _counts(self, session: Session) -> KatzModel:
        kept = session.memory if self.params.scope == "run" else {}
        fresh = KatzModel(session.target.vocab_size, self.params.order)
        counts: KatzModel = kept.setdefault(NGRAM, fresh)
        return counts
