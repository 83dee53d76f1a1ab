"""Base class of speculative decoding methods.

Code that only plans a run imports this module, so it does not import torch.
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
    """Base class of all methods. Override `propose`, or `generate` for your own decoding loop.

    Class attributes:
        name: Name on the command line.
        aliases: Other names that the command line accepts.
        family: Group of the method in README's table. It depends on what produces the drafts.
        lossy: True if, with default parameters, the output may differ from the target's output.
        proposed_in: Keys of the papers that propose the method. Only built-in methods have keys.
        builds_on: Keys of further papers to cite.
        project: The software project that implements the method, if no paper proposes it.
        Params: Class of the method's parameters.
        needs: What a run of the method requires, e.g. "draft" for a draft model.
        Head: Class of the method's trained head, which the parameter `head` names. None means no
            head.
        state_scope: How long the method keeps what it learns: "prompt", "run" or "corpus".
        workers: Number of workers that compute at the same time.
        bonus: True if the target adds a bonus token after a draft that is accepted completely.
        proposes: False if the method never drafts and commits one token per step.
        any_vocabulary: True if the draft model may have another tokenizer (`Transcript`).
        peer: True if the method runs another project's implementation. Runs measure such a method
            but do not audit it.
        baseline: The method that this method's speedups are relative to. If another program
            decodes, the baseline is plain decoding in that program.
        decodes: The model that chooses the output tokens: "target", or "draft" if the draft model
            decodes alone.
        exact_params: Parameters that make a lossy method lossless. Audits check that they do.
        lossless_counterpart: The lossless method with the same drafts as this lossy method. Runs
            add it for comparison.
        control: True if the method only serves as a control for other methods.
        paper_params: Parameters behind the results in the method's paper. Tables mark methods that
            use them.
        tunable: Names of the parameters that `--tune` varies. None means all parameters.
        citation: BibTeX entries of the method's sources, indented like a docstring
            (`inspect.cleandoc`). Built-in methods instead name keys of `methods/papers.yaml` in
            `proposed_in`.
        claims: Speedups that the method's papers report. Empty if specbench's authors found none.
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
        """Lossy accept rule, or None. It keeps draft tokens that the lossless rule would reject.

        The standard loop applies the rule. A method with its own loop passes it to
        `session.verify`.
        """
        return self.params.rule if isinstance(self.params, AcceptParams) else None

    def guarantee(self, sampling: Rule) -> Guarantee:
        """Return what the method guarantees about its output under a decoding rule.

        A lossy accept rule can only weaken the guarantee.
        """
        rule = self.accept
        own: Guarantee = "exact_law" if sampling in ("rejection", "block") else "exact_tokens"
        if rule is None or rule.is_exact:
            return own
        return max(own, rule.guarantee, key=get_args(Guarantee).index)

    @property
    def upper_bound(self) -> bool:
        """True if the method knows the output of plain decoding in advance (`Harness.reference`).

        The method then serves as an upper bound for other methods. Tables do not rank it.
        """
        return bool(getattr(self.params, "upper_bound", False))

    @property
    def requirements(self) -> frozenset[str]:
        """Assets that the method needs with its current parameters. By default `needs`."""
        return self.needs

    @property
    def scope(self) -> Literal["prompt", "run", "corpus"]:
        """Lifetime of the state that the method learns: "prompt", "run" or "corpus".

        It is `state_scope`, or "prompt" if the parameter `scope` is "prompt".
        """
        forgets = getattr(self.params, "scope", None) == "prompt"
        return "prompt" if forgets else self.state_scope

    @property
    def uses_costs(self) -> bool:
        """True if the method reads measured forward costs (`session.verify_cost`).

        The run then measures these costs before it decodes.
        """
        return self.by_load

    @property
    def by_load(self) -> bool:
        """True if the method's draft lengths depend on the number of sequences in a step."""
        return bool(getattr(self.params, "by_load", False))

    @property
    def learns(self) -> bool:
        """True if the method learns between requests. It then overrides `learn`."""
        return type(self).learn is not Method.learn

    @property
    def timing_free(self) -> bool:
        """True if the method's counters depend only on inputs and seed, and not on
        measured times."""
        return not self.uses_costs

    def models(self) -> tuple[str, ...]:
        """Return the names of further models that the method drafts with, as for the option
        --draft.
        """
        return ()

    def artifacts(self) -> tuple[ArtifactSpec, ...]:
        """Return the trained modules that the method needs. By default only its `Head`.

        The run loads them before the timer starts.
        """
        return () if self.Head is None else (ArtifactSpec(self.Head, self.params.head),)

    def check(self) -> None:
        """Check that the method can run on this machine with its parameters.

        The run calls it before it loads models.

        Raises:
            UsageError: A required parameter is missing.
            EnvironmentFault: A required program is missing.
        """

    def processes(self) -> Sequence[int]:
        """Return the ids of other processes that decode for this method, such as a server.

        Their CPU time does not count as disturbance by other programs.
        """
        return ()

    def start(self, session: Session) -> None:
        """Prepare for a prompt, for example prefill the draft model. The timer is
        already running."""

    def propose(self, session: Session, limit: int) -> Draft:
        """Propose a draft of at most `limit` levels.

        After an empty draft, the step decodes one token without speculation.
        """
        raise MethodFault(f"{type(self).__name__} defines neither `propose` nor `generate`")

    def propose_batch(self, members: Sequence[tuple[Self, Session]]) -> list[Draft]:
        """Propose a draft for each sequence of a batch. By default, call `propose` for each
        sequence.

        The engine calls it on the method object of the first sequence.

        Args:
            members: A method object and a session for each sequence.
        """
        return [method.propose(session, session.max_draft_length()) for method, session in members]

    def max_sequences(self, size: int) -> int:
        """Return how many sequences of a batch may have model states at the same time.

        Args:
            size: Maximum number of sequences in a step.
        """
        return size

    def schedule(
        self, members: Sequence[tuple[Self, Session]], size: int
    ) -> Sequence[tuple[Self, Session]]:
        """Choose the sequences of the next step.

        The engine calls it on the method object of the first sequence.

        Args:
            members: Unfinished sequences that have model states, in the order in which they joined.
            size: Maximum number of sequences to choose.

        Returns:
            At most `size` different members. By default the first ones.
        """
        return members[:size]

    def observe(self, session: Session, outcome: Outcome) -> Mapping[str, float] | None:
        """Update the method after a step, for example roll back the state of its draft model.

        Returns:
            The method's own counts, or None. The stored record of the output has their sums
            (`Step.extra`).
        """

    def learn(self, session: Session) -> None:
        """Learn from a request that has just ended. The time counts as a delay of the next request.

        The method needs a `state_scope` other than "prompt". The weights of
        `session.trainable(...).module` may change only in this function. Gradients are enabled
        here, and are discarded afterwards. Clone tensors that were created during decoding before
        you use them in a loss.
        """

    def generate(self, session: Session) -> Iterator[Step]:
        """Decode the session's request. Yield its steps."""
        from specbench_cli.engine.loop import draft_and_verify

        return draft_and_verify(self, session)

    def generate_batch(self, batch: Batch) -> Iterator[Step]:
        """Decode the requests of a batch together, with one copy of this method for each request.

        Raises:
            MethodFault: The method has its own decoding loop, or learns between requests.
        """
        from specbench_cli.engine.loop import draft_and_verify_batch

        if not self.batches:
            raise MethodFault(
                f"{type(self).name} does not support batches: it has its own decoding loop, or"
                " learns between requests"
            )
        return draft_and_verify_batch([type(self)(self.params) for _ in batch.sessions], batch)

    @property
    def batches(self) -> bool:
        """True if several requests can be decoded together.

        The method must use the standard decoding loop, and must not learn between requests.
        """
        return type(self).generate is Method.generate and not self.learns
