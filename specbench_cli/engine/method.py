"""What a speculative-decoding method is to the engine: it proposes, and it observes.

Plans read it, so this module does not import torch.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

from specbench_cli.engine.models.artifact import Artifact, Trained
from specbench_cli.engine.params import Claim, MethodParams
from specbench_cli.engine.types import Guarantee
from specbench_cli.engine.verify.accept import AcceptParams, AcceptRule
from specbench_cli.errors import MethodFault

if TYPE_CHECKING:
    from specbench_cli.engine.batch import Batch
    from specbench_cli.engine.session import Session
    from specbench_cli.engine.types import Draft, Outcome, Rule, Step


class Method(ABC):
    """Base of all methods. Override `propose`, or `generate` to own the control flow.

    Class attributes:
        name: the name on the command line.
        aliases: other names that the command line accepts.
        family: row of the method table by what drafts, in docs/reference/methods.md.
        lossy: True if, with default parameters, the output may differ from the target's.
        proposed_in: keys of the papers that propose the method. Only built-in methods have keys.
        builds_on: keys of further papers to cite.
        project: the project that implements the method, if no paper proposes it.
        Params: its parameters.
        needs: what it cannot run without ("draft").
        Head: class of its trained head, whose source is the parameter `head`. None means none.
        state_scope: how long what it learns lives: "prompt", "run" or "corpus".
        workers: how many workers compute at once.
        bonus: whether a draft that stands as a whole is followed by a token of the target's own.
        proposes: whether it proposes tokens at all; what does not commits one a step.
        any_vocabulary: whether its draft model may have a tokenizer of its own
            (`Transcript`).
        peer: whether it is somebody else's implementation, measured but not audited.
        baseline: the method whose times its speedups are over: where another program decodes, that
            program's own plain decoding.
        decodes: whose tokens it makes: the target's, or those of the draft model by itself.
        off: the parameters at which a lossy method is exact; audits prove it of them.
        relative: the lossless method that drafts as this lossy one does: runs bring it beside it.
        control: whether it is there for others to be held against, and no way to decode.
        paper: the parameters that its paper's results are of, where it says; rows with them say so.
        tunable: the parameters that `--tune` varies; None for all.
        citation: BibTeX entries of its sources; indented like a docstring, and read like one
            (`inspect.cleandoc`). Built-in methods name keys of `methods/papers.yaml` in
            `proposed_in` instead.
        claims: the speedups that those sources report; none where no figure was confirmed.
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

    params: Any  # an instance of the method's own Params, which says so by an annotation

    def __init__(self, params: MethodParams | None = None) -> None:
        self.params = self.Params() if params is None else params

    @property
    def accept(self) -> AcceptRule | None:
        """Which draft tokens stand, with these parameters, beside those that the lossless rule
        takes; None: none do. One that owns its control flow hands it to `session.verify`."""
        return self.params.rule if isinstance(self.params, AcceptParams) else None

    def guarantee(self, sampling: Rule) -> Guarantee:
        """What the output promises under a decoding rule, with this method's parameters: no more
        than its accept rule does."""
        rule = self.accept
        own: Guarantee = "exact_law" if sampling in ("rejection", "block") else "exact_tokens"
        if rule is None or rule.is_exact:
            return own
        return max(own, rule.guarantee, key=get_args(Guarantee).index)

    @property
    def upper_bound(self) -> bool:
        """Whether, with these parameters, it reads vanilla's output (`Harness.reference`): such a
        row is a bound on what others can reach, and not ranked with them."""
        return bool(getattr(self.params, "upper_bound", False))

    @property
    def requirements(self) -> frozenset[str]:
        """What it cannot run without, with these parameters: `needs`, unless they ask for more."""
        return self.needs

    @property
    def scope(self) -> Literal["prompt", "run", "corpus"]:
        """How long what it learns lives, with these parameters: `state_scope`, unless a parameter
        named `scope` says that it is forgotten with the prompt."""
        forgets = getattr(self.params, "scope", None) == "prompt"
        return "prompt" if forgets else self.state_scope

    @property
    def uses_costs(self) -> bool:
        """Whether, with these parameters, it asks what forwards cost (`session.verify_cost`): the
        run then measures that before it begins."""
        return self.by_load

    @property
    def by_load(self) -> bool:
        """Whether, with these parameters, how much it drafts depends on how many sequences take
        part in a step."""
        return bool(getattr(self.params, "by_load", False))

    @property
    def learns(self) -> bool:
        """Whether it learns between requests, which takes time: whether it has a `learn`."""
        return type(self).learn is not Method.learn

    @property
    def timing_free(self) -> bool:
        """Whether, with these parameters, its counters are a function of inputs and seed alone."""
        return not self.uses_costs

    def models(self) -> tuple[str, ...]:
        """Models beside target and draft that it drafts with, named as for --draft."""
        return ()

    def artifacts(self) -> tuple[Trained, ...]:
        """Return the trained modules that it needs: by default its `Head`. They are loaded before
        anything is timed."""
        return () if self.Head is None else (Trained(self.Head, self.params.head),)

    def check(self) -> None:
        """See that it can run here, with these parameters; asked before anything is loaded.

        Raises:
            UsageError: a parameter is missing. EnvironmentFault: a program is.
        """

    def processes(self) -> Sequence[int]:
        """Processes of this machine, not of the run's own tree, that decode for it: their processor
        time is no other program's."""
        return ()

    def start(self, session: Session) -> None:
        """Get ready for a prompt, inside the timer: draft prefill, index building."""

    def propose(self, session: Session, limit: int) -> Draft:
        """Propose at most `limit` levels after the last token; an empty draft is a plain step."""
        raise MethodFault(f"{type(self).__name__} defines neither `propose` nor `generate`")

    def propose_batch(self, members: Sequence[tuple[Self, Session]]) -> list[Draft]:
        """Propose for all sequences that are decoded together and have not ended; called on the
        method of the first. One after another, unless a method drafts for all at once.

        Args:
            members: a method object and a session for each sequence.
        """
        return [method.propose(session, session.max_draft_length()) for method, session in members]

    def max_sequences(self, size: int) -> int:
        """How many sequences are held at once, each with its states, where at most `size` take part
        in a step."""
        return size

    def schedule(
        self, members: Sequence[tuple[Self, Session]], size: int
    ) -> Sequence[tuple[Self, Session]]:
        """Choose which sequences take part in the next step; called on the method of the first.

        Args:
            members: those that are held and have not ended, in the order in which they joined.
        Returns:
            at most `size` of them, each once: unless a method says otherwise, the first.
        """
        return members[:size]

    def observe(self, session: Session, outcome: Outcome) -> Mapping[str, float] | None:
        """Learn what was committed of the last draft; roll the draft's state back.

        Returns:
            counts of the method's own, of which records hold the sums (`Step.extra`); or None.
        """

    def learn(self, session: Session) -> None:
        """Learn from a request that has just ended, which delays the next; needs a `state_scope`.

        The only place where weights may change: those of `session.trainable(...).module`. Gradients
        are on, and gone afterwards; tensors made while decoding take part once they are cloned.
        """

    def generate(self, session: Session) -> Iterator[Step]:
        """Decode the session's request, a step at a time."""
        from specbench_cli.engine.loop import draft_and_verify

        return draft_and_verify(self, session)

    def generate_batch(self, batch: Batch) -> Iterator[Step]:
        """Decode the requests of a batch together, with a method object like this one each.

        Raises:
            MethodFault: the method owns its control flow, which is that of one request.
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
        """Whether several requests can be decoded together: whether it only proposes, and does not
        learn from one for the next."""
        return type(self).generate is Method.generate and not self.learns
