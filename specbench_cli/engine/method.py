"""Base class of speculative decoding methods.

Planning code imports this module, so it does not import torch.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

from specbench_cli.engine.models.artifact import Artifact, ArtifactSpec
from specbench_cli.engine.params import Claim, MethodParams
from specbench_cli.engine.types import Guarantee
from specbench_cli.engine.verify.accept import AcceptParams, AcceptRule
from specbench_cli.errors import MethodFault
from specbench_cli.former_names import renamed_members

if TYPE_CHECKING:
    from specbench_cli.engine.batch import Batch
    from specbench_cli.engine.session import Session
    from specbench_cli.engine.types import Draft, Outcome, Rule, Step


@renamed_members(
    needed="requirements",
    held="max_sequences",
    off="exact_params",
    relative="lossless_counterpart",
    paper="paper_params",
)
class Method(ABC):
    """Base of all methods. Override `propose`, or `generate` for a decoding loop of its own.

    Class attributes:
        name: Name on the command line.
        aliases: Other names that the command line accepts.
        family: Row of README's method table, by what drafts.
        lossy: True if, with default parameters, the output may differ from the target's.
        proposed_in: Keys of the papers that propose the method. Only built-in methods have keys.
        builds_on: Keys of further papers to cite.
        project: The project that implements the method, if no paper proposes it.
        Params: Class of its parameters.
        needs: Requirements for running it ("draft").
        Head: Class of its trained head, loaded from the parameter `head`. None means no head.
        state_scope: Lifetime of what it learns: "prompt", "run" or "corpus".
        workers: Number of workers that compute at the same time.
        bonus: True if a bonus token of the target follows a draft that is accepted completely.
        proposes: True if it proposes tokens. If not, it commits one token per step.
        any_vocabulary: True if its draft model may have another tokenizer (`Transcript`).
        peer: True if it runs another project's implementation, which is measured but not audited.
        baseline: The method that its speedups are relative to. If another program decodes, this is
            the plain decoding of that program.
        decodes: The model that decides the tokens: "target", or "draft" for the draft model alone.
        exact_params: Parameters with which a lossy method is exact. Audits prove it.
        lossless_counterpart: The lossless method with the same drafts as this lossy one. Runs add
            it for comparison.
        control: True if it only serves as a control for other methods.
        paper_params: Parameters of the results in its paper. Tables mark rows with these
            parameters.
        tunable: Names of the parameters that `--tune` varies. None means all.
        citation: BibTeX entries of its sources, indented like a docstring (`inspect.cleandoc`).
            Built-in methods name keys of `methods/papers.yaml` in `proposed_in` instead.
        claims: Speedups that its sources report. Empty if no figure was confirmed.
    """

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    family: ClassVar[str] = ""
    lossy: ClassVar[bool] = False
    proposed_in: ClassVar[tuple[str, ...]] = ()
    builds_on: ClassVar[tuple[str, ...]] = ()
    project: ClassVar[str] = ""
    Params: ClassVar[type[MethodParams]] = MethodParams
    needs: ClassVar[frozenset[str]] = frozenset()
    Head: ClassVar[type[Artifact] | None] = None
    state_scope: ClassVar[Literal["prompt", "run", "corpus"]] = "prompt"
    workers: ClassVar[int] = 1
    bonus: ClassVar[bool] = True
    proposes: ClassVar[bool] = True
    any_vocabulary: ClassVar[bool] = False
    peer: ClassVar[bool] = False
    baseline: ClassVar[str] = "vanilla"
    decodes: ClassVar[Literal["target", "draft"]] = "target"
    exact_params: ClassVar[Mapping[str, Any]] = {}
    lossless_counterpart: ClassVar[str | None] = None
    control: ClassVar[bool] = False
    paper_params: ClassVar[Mapping[str, Any]] = {}
    tunable: ClassVar[frozenset[str] | None] = None
    citation: ClassVar[str] = ""
    claims: ClassVar[tuple[Claim, ...]] = ()

    params: Any  # an instance of the method's Params; subclasses annotate the type

    def __init__(self, params: MethodParams | None = None) -> None:
        self.params = self.Params() if params is None else params

    @property
    def accept(self) -> AcceptRule | None:
        """Accept rule, which keeps draft tokens that the lossless rule rejects. None means no rule.

        A method with its own decoding loop passes the rule to `session.verify`.
        """
        return self.params.rule if isinstance(self.params, AcceptParams) else None

    def guarantee(self, sampling: Rule) -> Guarantee:
        """Return the guarantee of the output under a decoding rule.

        An accept rule can only weaken it.
        """
        rule = self.accept
        own: Guarantee = "exact_law" if sampling in ("rejection", "block") else "exact_tokens"
        if rule is None or rule.is_exact:
            return own
        return max(own, rule.guarantee, key=get_args(Guarantee).index)

    @property
    def upper_bound(self) -> bool:
        """True if the method reads vanilla's output (`Harness.reference`).

        It is then an upper bound for other methods, and is not ranked.
        """
        return bool(getattr(self.params, "upper_bound", False))

    @property
    def requirements(self) -> frozenset[str]:
        """Requirements with the current parameters, by default `needs`."""
        return self.needs

    @property
    def scope(self) -> Literal["prompt", "run", "corpus"]:
        """Lifetime of what it learns: `state_scope`, or "prompt" if its parameter `scope` is."""
        forgets = getattr(self.params, "scope", None) == "prompt"
        return "prompt" if forgets else self.state_scope

    @property
    def uses_costs(self) -> bool:
        """True if it reads forward costs (`session.verify_cost`), which the run then measures
        first."""
        return self.by_load

    @property
    def by_load(self) -> bool:
        """True if draft lengths depend on the number of sequences in a step."""
        return bool(getattr(self.params, "by_load", False))

    @property
    def learns(self) -> bool:
        """True if it learns between requests, which takes time: it overrides `learn`."""
        return type(self).learn is not Method.learn

    @property
    def timing_free(self) -> bool:
        """True if its counters depend on inputs and seed alone, and not on timing."""
        return not self.uses_costs

    def models(self) -> tuple[str, ...]:
        """Return further models that it drafts with, by name as for --draft."""
        return ()

    def artifacts(self) -> tuple[ArtifactSpec, ...]:
        """Return the trained modules that it needs: by default its `Head`.

        They are loaded before anything is timed.
        """
        return () if self.Head is None else (ArtifactSpec(self.Head, self.params.head),)

    def check(self) -> None:
        """Check that the method can run here with its parameters. Called before anything is loaded.

        Raises:
            UsageError: a parameter is missing.
            EnvironmentFault: a program is missing.
        """

    def processes(self) -> Sequence[int]:
        """Return the ids of processes outside of the run's process tree that decode for this
        method.

        Their CPU time is not counted as noise.
        """
        return ()

    def start(self, session: Session) -> None:
        """Prepare for a prompt: prefill the draft model, build an index. The timer is running."""

    def propose(self, session: Session, limit: int) -> Draft:
        """Propose a draft of at most `limit` levels. An empty draft makes a plain decoding step."""
        raise MethodFault(f"{type(self).__name__} defines neither `propose` nor `generate`")

    def propose_batch(self, members: Sequence[tuple[Self, Session]]) -> list[Draft]:
        """Propose a draft for each active sequence of a batch. Called on the first sequence's
        method.

        The default calls `propose` for each sequence.

        Args:
            members: A method object and a session for each sequence.
        """
        return [method.propose(session, session.max_draft_length()) for method, session in members]

    def max_sequences(self, size: int) -> int:
        """Return the number of sequences that have states at the same time.

        Args:
            size: Maximum number of sequences in a step.
        """
        return size

    def schedule(
        self, members: Sequence[tuple[Self, Session]], size: int
    ) -> Sequence[tuple[Self, Session]]:
        """Choose the sequences of the next step. Called on the first sequence's method.

        Args:
            members: Sequences with states that have not ended, in the order in which they joined.
            size: Maximum number of sequences to choose.

        Returns:
            At most `size` different members. The default takes the first ones.
        """
        return members[:size]

    def observe(self, session: Session, outcome: Outcome) -> Mapping[str, float] | None:
        """Update the method with the outcome of the last draft, and roll the draft's state back.

        Returns:
            Counts of the method's own, or None. Records store their sums (`Step.extra`).
        """

    def learn(self, session: Session) -> None:
        """Learn from a request that has just ended. This delays the next request.

        Needs a `state_scope`. Weights may change only here: those of
        `session.trainable(...).module`. Gradients are enabled, and are discarded afterwards. Clone
        tensors that were created while decoding before you use them in a loss.
        """

    def generate(self, session: Session) -> Iterator[Step]:
        """Decode the session's request. Yield the steps."""
        from specbench_cli.engine.loop import draft_and_verify

        return draft_and_verify(self, session)

    def generate_batch(self, batch: Batch) -> Iterator[Step]:
        """Decode the requests of a batch together, with one copy of this method for each request.

        Raises:
            MethodFault: the method has its own decoding loop, or learns between requests.
        """
        from specbench_cli.engine.loop import draft_and_verify_batch

        if not self.batches:
            raise MethodFault(
                f"{type(self).name} decodes one request at a time: it has a loop of its own, or"
                " learns from one for the next"
            )
        return draft_and_verify_batch([type(self)(self.params) for _ in batch.sessions], batch)

    @property
    def batches(self) -> bool:
        """True if several requests can be decoded together.

        The method must use the standard decoding loop, and must not learn between requests.
        """
        return type(self).generate is Method.generate and not self.learns
