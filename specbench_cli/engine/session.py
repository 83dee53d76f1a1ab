"""A session: all that a method may touch while it decodes one request.

It holds the text and its one stop rule, the drafts made for it, the target behind a meter, the one
verifier and the two sources of chance, each a part of its own. What the harness reads of it, and no
method, is its `Harness`; implementations that decode by themselves get a `PeerSession`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor

from specbench_cli.engine import host
from specbench_cli.engine.drafting.vocabulary import Vocabulary
from specbench_cli.engine.drafts import Drafts, Seen, check_rows
from specbench_cli.engine.learning import Memory, trainable
from specbench_cli.engine.models.decoder import Decoder, LogitsAt, ModelInput, State
from specbench_cli.engine.models.head import FeatureHead, Trained
from specbench_cli.engine.models.meter import Meter, Metered, MeteredHead
from specbench_cli.engine.params import MethodParams
from specbench_cli.engine.scoring import Beside, Halted, Partial, Scoring
from specbench_cli.engine.sequence import Finish, Recording, StopRule, Text
from specbench_cli.engine.types import (
    Draft,
    Features,
    Forward,
    Law,
    Origin,
    Out,
    Outcome,
    Source,
    Step,
    Sublayer,
    Tokens,
)
from specbench_cli.engine.verify import decide, ranking
from specbench_cli.engine.verify.accept import AcceptRule, passing
from specbench_cli.engine.verify.choosing import Chooser, Pick
from specbench_cli.engine.verify.random import Random, SeededRandom
from specbench_cli.engine.verify.sampling import Noise, Sampling
from specbench_cli.engine.verify.tree import tree_of
from specbench_cli.engine.verify.weakened import Weakened
from specbench_cli.engine.workers.drafter import Brief, Drafter
from specbench_cli.engine.workers.transport import Hiring, Worker
from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import MethodFault


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue. `ids` are the prompt's tokens, template included; of a target that
    reads the prompt otherwise (`Decoder.parted`) those that its text begins with. `topic` is
    its task's category, for what learns from it once it has ended."""

    prompt_id: str
    turn: int
    ids: tuple[int, ...]
    stop: StopRule
    source: Source | None = None
    topic: str = ""

    @classmethod
    def of(
        cls,
        target: Decoder,
        prompt_id: str,
        turn: int,
        ids: Sequence[int],
        stop: StopRule,
        topic: str = "",
    ) -> Request:
        """A prompt as a target reads it."""
        text, source = target.parted(ids)
        return cls(prompt_id, turn, text, stop, source, topic)

    def state(self, decoder: Decoder, capacity: int) -> State:
        """A state of a decoder for this request."""
        state = decoder.new_state(capacity)
        if self.source is not None:
            decoder.attach(state, self.source)
        return state


@dataclass(frozen=True, slots=True)
class Shared:
    """What the sessions of a batch have in common, a trace, and the place of one among them."""

    meter: Meter
    place: int


class Harness:
    """The measuring program's half of a session: timer, trace, workers, and the session's share in
    the forwards of a batch. Methods leave it alone.

    Attributes:
        text: what is decoded: when it began, when its tokens were there, how each came to be.
        meter: the trace of all forwards.
        workers: the drafters at work beside the target.
        reference: vanilla's output, for methods that say they are an `upper_bound`; else None.
        beside: the sequences that take part in the step, this one among them.
        policy: what sets the length of its drafts by who is beside it, if anything does.
    """

    def __init__(self, session: Session, meter: Meter, reference: Sequence[int] | None) -> None:
        self._session, self.text = session, session._text
        self.meter, self.reference = meter, reference
        self.workers: list[Worker] = []
        self.beside: Sequence[Session] = (session,)
        self.policy: Any = None
        self._taken, self._begun = 0, False

    def begin(self) -> None:
        """Start the timer: the ids are on the device, the states cleared and preallocated.

        Raises:
            MethodFault: it runs already. Whoever measures starts it, before the method is called.
        """
        if self._begun:
            raise MethodFault(
                "the clock of a request runs already: it is started once, before the method",
                "leave `session.harness` alone; all that a method does is in its time",
            )
        self._begun = True
        if self.text.device.type == "cuda":
            torch.cuda.synchronize(self.text.device)
        self.meter.clock.restart()
        self.text.start()

    def seat(self, lend: Callable[[Decoder, int], State]) -> None:
        """Have states: in a batch, from when the sequence joins it.

        Args:
            lend: makes a cleared state of a decoder, with so many rows beyond the longest sequence.
        """
        session = self._session
        session._lend = lend
        state = session.new_state(session.target)
        session._scoring = Scoring(session.target, state, self.text, session._place or 0)
        if (contrast := session.sampling.contrast) is not None:
            request, target = session.requests[0], session.target
            session._weakened = Weakened(
                contrast,
                target,
                lend(target.decoder, 0),
                request.ids,
                request.stop.max_new_tokens,
                session._place or 0,
            )

    def left(self) -> None:
        """Let go of the last step's logits and of the noise, which would be held as long as the
        session: of a batch, when the sequence has left it."""
        self._session._rows = None
        self._session._noise.clear()

    def forwards(self) -> Sequence[Forward]:
        """The forwards since the last call, for the step that they led to."""
        first, self._taken = self._taken, len(self.meter.forwards)
        return self.meter.forwards[first:]

    def brings(self, draft: Draft) -> ModelInput:
        """What `score` of a draft would compute, for a forward of the target that all of a batch
        share."""
        session = self._session
        x = session._drafts.rows(draft, session._scoring.ready())
        return session._scoring.part(x, draft, "all")

    @property
    def unread(self) -> int:
        """Tokens of the prompt that the target has not read."""
        return self.text.prompt_length - self._session._scoring.ready()

    def reads(self, n: int) -> ModelInput:
        """The next n tokens of the prompt, for such a forward; see `unread`."""
        scoring, last = self._session._scoring, n == self.unread
        x = Tokens(self._session.since(scoring.ready()).ids[:, :n])
        return scoring.part(x, None, "last" if last else None)._replace(prompt=True)

    def read(self, out: Out, n: int) -> None:
        """Keep what became of `reads`; commits the first token behind the prompt's end."""
        scoring = self._session._scoring
        if out.logits is None:
            scoring.read(out)
        else:
            self.begun(scoring.take(out), n)

    def takes(self, out: Out) -> Tensor:
        """Logits of what became of `brings`, as of `score`."""
        return self._session._scoring.take(out)

    def step_cost(self, sequences: int, rows: int, even: bool = True) -> float:
        """Time of a step of so many sequences, whose target forward has so many rows in all, but
        for its drafting: with what the host does. In the unit of `verify_cost`.

        Args:
            even: whether they have as many rows each; what it costs to draft some that do not is in
                it, too.
        """
        return self._session._workspace.cost("target", rows, sequences, even)

    def drafting_cost(self, model: Metered | MeteredHead, sequences: int) -> float:
        """Time of a token more of each of so many sequences' chains, with what the host does."""
        return model.portion * self._session._workspace.cost(model.name, sequences, sequences)

    @property
    def taps(self) -> Sequence[int]:
        """The target's layers that `Session.tap` asked for."""
        return self._session._scoring.layers

    @property
    def seen(self) -> Sequence[Seen]:
        """What was scored, verified and committed, step by step; prefill is none."""
        return self._session._drafts.seen

    def begun(self, logits: Tensor, n: int) -> None:
        """Commit the first token, of logits [1, V] behind the prompt, whose last n tokens were read
        in one forward."""
        session = self._session
        session._scoring.keep(range(n))
        first = session._decide(session.chain(()), logits)
        self.text.append(replace(first, origin=("prefill",)))
        if session._weakened is not None:
            session._weakened.commit(first)
        self.forwards()  # these are no step's


class Session:
    """One request being decoded by one method.

    Attributes:
        requests: what is decoded (one request today).
        target: the target behind a meter; its forwards count as verification.
        device: where the target computes.
        sampling: the decoding rule.
        memory: what the method keeps between prompts when its state scope is "run".
        harness: for the measuring program.

    With a `recording`, its tokens decide in place of the target (`replay`).
    """

    def __init__(
        self,
        workspace: Workspace,
        request: Request,
        sampling: Sampling,
        *,
        pass_: int = 1,
        memory: Memory | None = None,
        random: Random | None = None,
        recording: Sequence[int] | None = None,
        reference: Sequence[int] | None = None,
        shared: Shared | None = None,
    ) -> None:
        self._workspace = workspace
        decoder = self._decoder("target")
        self.device = decoder.device
        self._lend: Callable[[Decoder, int], State]
        self._scoring: Scoring
        self._place = None if shared is None else shared.place
        self._own_chance = random is None
        self.requests = (request,)
        self.sampling = sampling
        self._pass = pass_
        self.memory = Memory() if memory is None else memory
        processor = sampling.processor
        self._processing = None if processor is None else processor.begin()
        self._weakened: Weakened | None = None
        size = workspace.output_vocab_size or decoder.vocab_size
        self._noise = Noise(sampling.seed, request.prompt_id, request.turn, size, self.device)
        self._chooser = Chooser(
            sampling,
            random
            or SeededRandom(sampling.seed, request.prompt_id, request.turn, pass_, self.device),
            self._noise,
            size,
        )
        meter = Meter(self.device) if shared is None else shared.meter
        self._text = Text(request.ids, request.stop, self.device, meter.clock.now)
        self.harness = Harness(self, meter, reference)
        self._drafts = Drafts(self._text, self._chooser, self._processing)
        self.target = Metered(decoder, meter, role=workspace.role, place=self._place)
        self._rows: Tensor | None = None  # that the last draft was verified by
        self._recording = None if recording is None else Recording(recording, self.device)
        if shared is None:
            self.harness.seat(workspace.loans())

    # ---- what there is --------------------------------------------------------------------------

    def draft(self, name: str = "draft") -> Metered:
        """Another decoder of the run, behind the meter; its forwards count as drafting."""
        return Metered(self._decoder(name), self.harness.meter, role="draft", place=self._place)

    def partial(
        self,
        layers: tuple[int, int] | None = None,
        skip: Iterable[int | Sublayer] = (),
        *,
        keep: bool = False,
    ) -> Partial:
        """Some of the target as a draft model; its forwards count as drafting, by their share.

        On `session.state` it needs no prefill: it reads the target's own rows of the text. What it
        writes there is forgotten before the target scores. It can have a state of its own too.

        Args:
            layers: half-open range of those that run; default: all. An early exit is (0, E), and
                (E, F) goes on from `Hidden` rows that leave it.
            skip: what is passed over: layers, or sublayers as (layer, "attention"), (layer, "mlp").
            keep: whether the target's next score goes on from what (0, E) made of the tokens
                scored, which costs one wait for the device.
        Raises:
            MethodFault: the target has no such layers.
        """
        meter, place = self.harness.meter, self._place
        over = frozenset(skip)
        return Partial(self._scoring, meter, layers=layers, skip=over, keep=keep, place=place)

    def new_state(self, decoder: Metered, slack: int = 0) -> State:
        """A cleared state, preallocated for the longest sequence of the run plus `slack` rows."""
        state = self._lend(decoder.decoder, slack)
        source = self.requests[0].source
        if source is not None:
            read = decoder.decoder.attach(state, source)
            if not read and decoder.decoder is self._decoder("target"):
                raise MethodFault(
                    f"{decoder.name} reads text alone, and the request holds more beside it"
                )
        return state

    @overload
    def reserve(self, nodes: int) -> None: ...

    @overload
    def reserve(self, nodes: int, ahead: MeteredHead) -> Beside: ...

    def reserve(self, nodes: int, ahead: MeteredHead | None = None) -> Beside | None:
        """Have rows in the target's state for trees of so many nodes; only before prefill.

        Args:
            ahead: a `LookAhead`, whose rows the target's forwards shall carry behind the last
                committed token and all nodes.
        Returns:
            of `ahead`, what keeps what its rows said: see `Beside.newest`.
        Raises:
            MethodFault: nothing looks ahead in a target that runs whole forwards alone.
        """
        beside = None if ahead is None else self._scoring.look_ahead(ahead)
        self._drafts.slack = nodes
        rows = nodes if beside is None else beside.room(nodes)
        self._scoring.state = self.new_state(self.target, rows)
        if self._weakened is not None:
            self._weakened.seat(self._lend(self.target.decoder, nodes))
        return beside

    def hire(self, kind: type[Drafter], params: MethodParams) -> Worker:
        """A drafter that works beside the target, where the run has it work; its prefill has begun.

        Args:
            kind: its class, at the top level of a module.
            params: the method's, handed on to it.
        Raises:
            WorkerLost: its process does not start.
        """
        request = self.requests[0]
        brief = Brief(
            request.prompt_id,
            request.turn,
            self._pass,
            request.ids,
            # What drafts there is not processed.
            replace(self.sampling, processor=None, contrast=None),
            self._workspace.capacity,
            self.target.vocab_size,
            request.source,
        )
        chooser = None if self._own_chance else self._chooser
        worker = self._workspace.transport.hire(
            Hiring(
                kind,
                params,
                brief,
                self._workspace.decoders,
                self._workspace.recipes,
                self.harness.meter,
                self._lend,
                chooser,
            )
        )
        self.harness.workers.append(worker)
        return worker

    def artifact(self, wanted: Trained) -> Any:
        """A trained module of the run; a head comes behind the meter, as a draft."""
        made = self._workspace.artifact(wanted)
        if isinstance(made, FeatureHead):
            return MeteredHead(made, self.harness.meter, place=self._place)
        if not isinstance(made, Decoder):
            return made
        return Metered(made, self.harness.meter, role="draft", place=self._place)

    def trainable(self, wanted: str | Trained = "draft", topic: str = "") -> Any:
        """This row's own copy of a decoder of the run, behind the meter as a draft, or of a trained
        module: made at first use and kept, so `start` should ask for it; needs a `state_scope`.

        Its weights are the parameters of its `module`, which is called as transformers' are,
        `module(ids).logits`. They change in `Method.learn` and nowhere else, none come or go, and a
        request is decoded by those that it began with.

        Args:
            topic: of a row that has a copy for each topic, whose it is.
        Raises:
            MethodFault: there is no such decoder, or it has no torch module.
        """
        if isinstance(wanted, str):
            source: Any = self._decoder(wanted)
        else:
            source = self._workspace.artifact(wanted)
        make = partial(trainable, source, self._workspace.decoders.values())
        made = self.memory.copy_of((wanted, topic), make)
        if wanted == "target":
            made.name = "target's copy"  # whose forwards are none of the target's
        if not isinstance(made, Decoder):
            return made
        return Metered(made, self.harness.meter, role="draft", place=self._place)

    def verify_cost(self, rows: int) -> float:
        """Time of a target forward over so many rows, the root's included, as a multiple of that
        over one; measured, and the same for all of a run. Needs `Method.uses_costs`."""
        return self._workspace.cost("target", rows)

    def draft_cost(self, model: Metered | MeteredHead, rows: int = 1) -> float:
        """Time of a draft model's or head's forward, in that of a target forward over one row; of
        a part of the target, its share of a whole forward's."""
        return model.portion * self._workspace.cost(model.name, rows)

    def tap(self, taps: Sequence[int]) -> None:
        """Have the target's forwards keep a head's features (see `Head.taps`); before prefill."""
        self._scoring.tap(taps)

    # ---- the text -------------------------------------------------------------------------------

    @property
    def words(self) -> Vocabulary:
        """What the target's ids stand for, as bytes (`spelt`), and how a text is cut into them.

        Raises:
            MethodFault: its tokenizer spells in a way that is not known here.
        """
        return self._workspace.vocabulary()

    def tokens(self) -> Sequence[int]:
        """All ids so far: the prompt and what was committed. Read only."""
        return self._text.tokens

    def output(self) -> Sequence[int]:
        """The committed ids."""
        return self._text.output

    @property
    def finish(self) -> Finish | None:
        """Why the output ended; None while it has not."""
        return self._text.finish

    def room(self) -> int:
        """Most draft levels of use: the remaining budget, less the token that verification adds."""
        return self._text.room

    def since(self, length: int) -> Tokens:
        """The committed tokens that a state of `length` rows has not seen."""
        return self._text.since(length)

    def unread(self, length: int) -> Features:
        """What a head whose state has `length` rows has not read: the committed tokens from
        `length` + 1 on, each beside the target's features of the token before it.

        After prefill that is all of the prompt but its first token, and the first committed one.

        Raises:
            MethodFault: `tap` was not called.
        """
        return self._scoring.features(self.since(length + 1))

    def features(self, n: int = 1) -> Tensor:
        """What a head without a state reads: the target's features [n, width] of the tokens before
        the last n committed ones, those that these were chosen from.

        Args:
            n: at most what the last step committed.
        Raises:
            MethodFault: `tap` was not called, there was no prefill, or that step had fewer.
        """
        return self._scoring.newest(n)

    # ---- drafts ---------------------------------------------------------------------------------

    def chain(self, ids: Sequence[int] | Tensor, q: Tensor | None = None) -> Draft:
        """A chain of tokens that are known.

        Args:
            ids: as of `tree`.
            q: [m, V], the laws that they were drawn from, token after token, as a worker says; None
                where they were chosen without a draw.
        Raises:
            MethodFault: an id outside the target's vocabulary, or q of another shape.
        """
        return self._drafts.chain(ids, q)

    def tree(
        self, ids: Sequence[int] | Tensor, parents: tuple[int, ...], laws: Sequence[Tensor] = ()
    ) -> Draft:
        """A tree of tokens chosen without a draw, or drawn; `parents` as in `Draft`.

        Args:
            ids: of m nodes; [m] int64 where the host has not seen them, which are of `branch` or
                `candidates`: they are looked at only where that takes no wait.
            laws: of nodes that were drawn without replacement, for each [V], that of the first draw
                among its siblings; none where nodes were chosen.
        Raises:
            MethodFault: an id outside the target's vocabulary.
        """
        return self._drafts.tree(ids, parents, laws)

    # ---- laws and chance ------------------------------------------------------------------------

    @property
    def random(self) -> Random:
        """The primitives `categorical` and `bernoulli`."""
        return self._chooser.random

    def warp(self, rows: Tensor) -> Tensor:
        """The laws [..., V] that logits stand for under this session's temperature and cuts."""
        return self._chooser.warp(rows)

    def noise(self, first: int, n: int = 1) -> Tensor:
        """Keyed noise of output positions first..first+n-1, [n, V]; the same for every method."""
        return self._chooser.noise(first, n)

    def scores(self, rows: Tensor, first: int, depths: Sequence[int] | None = None) -> Tensor:
        """Decision scores of logits [n, V] at output positions first...: their argmax is the
        choice.

        Args:
            depths: how far behind `first` each row stands; default: one after another.
        """
        return self._chooser.scores(rows, first, depths)

    def pick(self, out: Out, ahead: int = 0) -> Pick:
        """Draw a draft token from the last row of a draft model's logits, as the rule asks.

        Args:
            out: a forward's result; its vocabulary agrees with the target's where they overlap.
            ahead: how many draft tokens stand between the last committed token and this one.
        Returns:
            (token [1] int64, q [1, V] or None): q where verification needs the law drawn from.
        """
        return self._drafts.pick(out, ahead)

    def drawn(self, picks: Sequence[Pick]) -> Draft:
        """The chain that consecutive `pick`s make."""
        return self._drafts.drawn(picks)

    def branch(
        self, rows: Tensor, width: int, *, how: Law = "iid", ahead: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Choose the children of draft nodes of one level, as the rule asks.

        Where tokens are drawn, `how` says how: "iid" and "wor" draw from the draft's law, "point"
        takes the likeliest tokens. Greedy and coupled decoding take those of the best scores.

        Args:
            rows: [r, V'] logits of a draft model at the r nodes.
            width: children of each node; best first.
            ahead: how many draft tokens stand between the last committed token and the children.
        Returns:
            (tokens [r, width] int64, q [r, V] or None): q where verification needs the law.
        """
        return self._chooser.branch(rows, width, self._text.position + ahead, how)

    def candidates(
        self, rows: Tensor, width: int, *, ahead: int | Sequence[int] = 0
    ) -> tuple[Tensor, Tensor]:
        """The best children of draft nodes, without a draw, and how good they are.

        Args:
            rows: [r, V'] logits of a draft model at the r nodes.
            width: children of each node; best first.
            ahead: how many draft tokens stand between the last committed token and the children;
                for each node, or the same for all.
        Returns:
            (tokens, values), [r, width] each: int64, and the log-softmax of the scores that the
            session decides by.
        """
        depths = [ahead] * rows.shape[0] if isinstance(ahead, int) else ahead
        return self._chooser.candidates(rows, width, self._text.position, depths)

    def ranked(
        self, rows: Tensor, width: int, *, ahead: int | Sequence[int] = 0
    ) -> tuple[list[list[int]], list[list[float]]]:
        """As `candidates`, on the host; waits for the device."""
        depths = [ahead] * rows.shape[0] if isinstance(ahead, int) else ahead
        return self._chooser.ranked(rows, width, self._text.position, depths)

    # ---- the target's steps ---------------------------------------------------------------------

    @property
    def state(self) -> State:
        """The target's state, of which `score` writes and `commit` keeps rows."""
        return self._scoring.state

    def part(
        self,
        x: Tokens | Features,
        state: State,
        *,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        logits_at: LogitsAt = "last",
    ) -> ModelInput:
        """What this sequence brings to a draft model's forward that all of a batch share
        (`Metered.forward_batch`); arguments as of `Decoder.forward`."""
        return ModelInput(x, state, positions, mask, logits_at, self._place or 0)

    def prefill(self) -> None:
        """Run the prompt through the target and commit the first token."""
        x = self.since(self._scoring.ready())
        self.harness.begun(self._scoring.forward(x, None, "last"), x.ids.shape[1])

    def score(self, draft: Draft, proposed: int | None = None) -> Tensor:
        """One target forward over the last committed token and a draft: logits [m + 1, V].

        Args:
            proposed: how many of its nodes are up for verification, the first ones; the others are
                there for their rows alone. None: all. Who has seen the rows cannot say any more.
        Raises:
            MethodFault: the draft is malformed; says the step, the field and what is allowed.
        """
        x = self._drafts.rows(draft, self._scoring.ready(keep=True), proposed)
        return self._scoring.forward(x, draft, "all")

    def begin_score(self, draft: Draft, layer: int, *, early: bool = True) -> Halted:
        """A `score` that halts behind its first `layer` layers.

        It goes on (`to`), says what an exit there would (`early` logits [m + 1, V], `says`,
        `look`), and ends with `end().rows`, the logits of `score`. A lossy method may have it end
        where it is (`leave`), and hand to `verify` what a look said.

        Args:
            early: whether early logits are wanted behind the first layers: they are read as if
                these were all, may steer what is prepared, and decide nothing.
        Raises:
            MethodFault: as `score`; or the target has no such layer.
        """
        x = self._drafts.rows(draft, self._scoring.ready())
        return self._scoring.begin(x, draft, layer, early=early)

    def verify(self, draft: Draft, rows: Tensor, accept: AcceptRule | None = None) -> Outcome:
        """Decide a draft from the target's logits [m + 1, V] at its root and nodes.

        Without the last node's row, [m, V], all m tokens of a chain are tested all the same, and no
        bonus follows where all of them stand.
        Where the run has a contrast or a processor (`Sampling`) it is applied here.

        Args:
            accept: what stands beside what the lossless rule takes; None: nothing.
        Raises:
            MethodFault: another number of rows; or nothing for an accept rule to decide: blocks are
                judged as one, a replay commits what was recorded, and what a processor forbids
                is no rule's to let pass.
        """
        if rows.shape[0] != draft.nodes + 1:
            self._drafts.checked(check_rows, draft, rows.shape[0])
        self._rows = rows
        self._drafts.verified(draft)
        if accept is None or accept.off:
            return self._decide(draft, rows)
        self._check_rule(accept)
        return self._decide(draft, rows, accept)

    def verified(self) -> Tensor:
        """The target's logits [m + 1, V] at the root and the nodes of the draft that was verified
        last, rejected ones included: for `Method.observe`, until the next forward.

        Raises:
            MethodFault: nothing was verified yet.
        """
        if self._rows is None:
            raise MethodFault("no draft was verified yet: `verified` is for `observe`")
        return self._rows

    def commit(self, outcome: Outcome) -> Outcome:
        """Take an outcome: cut it by the stop rule, append it, keep its rows of the target's state.

        Whoever made it, this alone moves the text on.

        Returns:
            the outcome as far as it was committed; `finish` is set if the output ends here.
        """
        committed = self._text.append(outcome)
        self._drafts.committed(committed)
        # Rows: the root's and the drafted tokens', but for the last committed token, which roots
        # the next.
        nodes = committed.path[: len(committed.committed) - 1]
        self._scoring.keep((0, *(node + 1 for node in nodes)))
        if self._weakened is not None:
            self._weakened.commit(committed)
        return committed

    def step(self, draft: Draft, committed: Outcome, **extra: float) -> Step:
        """A step to yield: a draft, what was committed of it, and the forwards since the last step.

        Args:
            extra: counts of the method's own; records hold their sums.
        """
        return Step(0, draft, committed, self.harness.forwards(), extra)

    # ---- inside ---------------------------------------------------------------------------------

    def _decoder(self, name: str) -> Decoder:
        decoder = self._workspace.decoders.get(name)
        if decoder is None:
            raise MethodFault(f"this run has no decoder called {name!r}")
        return decoder

    def _distributions(self, rows: Tensor) -> Tensor:
        """What an accept rule is given: the warped distributions; under greedy decoding, which has
        no temperature, softmax."""
        if self.sampling.rule != "greedy":
            return self.warp(rows)
        return rows.to(torch.promote_types(rows.dtype, torch.float32)).softmax(-1)

    def _check_rule(self, accept: AcceptRule) -> None:
        if self._recording is not None:
            why, instead = "tokens are replayed", "leave out --verify replay"
        elif self.sampling.rule == "block":
            why, instead = "whole blocks are judged", "--verify rejection, or coupled"
        elif self._processing is not None:
            why, instead = "a grammar forbids some that it would let pass", "leave out --grammar"
        else:
            return
        raise MethodFault(
            f"accept rule {accept.name!r} decides on single tokens, and {why}",
            f"{instead}; or leave out the accept rule",
        )

    def _decide(self, draft: Draft, rows: Tensor, accept: AcceptRule | None = None) -> Outcome:
        tree = None if draft.parents is None else tree_of(draft.parents, draft.order)
        drafters = self.harness.meter.greatest(self._place)
        rows = self._chooser.align(rows)
        rows = self._processed(draft, rows)  # where tokens are replayed too: it takes its time
        if self._recording is not None:
            levels = range(rows.shape[0]) if tree is None else (0, *tree.depths)
            choices = self._recording.choices(self._text.position, levels)
            outcome, last = decide.chosen(draft, tree, choices, drafters=drafters)
        elif self.sampling.draws:
            p = self.warp(rows)
            passes = passing(accept, p, draft, tree, self.random, features=self._scoring.read_last)
            try:
                outcome, last = decide.drawn(
                    draft, tree, p, self.random, self.sampling.rule, passes, drafters
                )
            except ArithmeticError as fault:
                self._drafts.inspected(draft)
                raise self._at_step(fault) from None
        else:
            depths = None if tree is None else (0, *tree.depths)
            scores = self.scores(rows, self._text.position, depths)
            passes = None
            if accept is not None:
                passes = passing(
                    accept,
                    self._distributions(rows),
                    draft,
                    tree,
                    self.random,
                    scores=scores,
                    features=self._scoring.read_last,
                )
            try:
                choices = ranking.argmax(scores)
                outcome, last = decide.chosen(draft, tree, choices, passes, scores, drafters)
            except ArithmeticError as fault:
                raise self._at_step(fault) from None
        self._text.decided = outcome.committed[-1], last
        return outcome

    def _processed(self, draft: Draft, rows: Tensor) -> Tensor:
        """Rows as the run's contrast and its processor make them of the text that leads to each."""
        if self._weakened is not None:
            rows = self._weakened.contrasted(draft, rows)
        if self._processing is None:
            return rows
        try:
            return self._processing(
                rows, self._text.output, host.numbers(draft.tokens), draft.parents
            )
        except ArithmeticError as fault:
            raise self._at_step(fault) from None

    def _at_step(self, fault: ArithmeticError) -> ArithmeticError:
        """A fault in the target's numbers with its place: prefill is step 0."""
        at = f"{self.requests[0].prompt_id}, step {self._text.steps}"
        return ArithmeticError(f"{at}: {fault}")


class PeerSession(Session):
    """One request being decoded by somebody else's implementation, with its own means.

    It gets transformers' own objects, and hands over what it decoded (`adopt`) in place of having
    it verified and committed.

    Attributes:
        counted: what it counted itself, of a request whose steps it does not tell (`count`).
        sees_first: whether it said when the first token was there.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counted: dict[str, float] = {}
        self.sees_first = False

    @property
    def pass_(self) -> int:
        """The pass of the run, from 1; under rejection another pass draws anew."""
        return self._pass

    @property
    def tokenizer(self) -> Any:
        """transformers' own tokenizer of the target."""
        return self._workspace.tokenizer

    def module(self, name: str) -> Any:
        """transformers' own module of a decoder of the run, "target" or "draft"."""
        if self._workspace.modules is None:
            raise MethodFault(f"this run holds no transformers module of {name!r}")
        return self._workspace.modules(name)

    def now(self) -> int:
        """Nanoseconds of the clock that the request is timed by."""
        return self.harness.meter.clock.now()

    def adopt(self, outcome: Outcome, at: int | None = None) -> Outcome:
        """Take what was decoded: cut by the stop rule and appended; no state is touched.

        A peer tells its steps once it has all of them: they arrived with the first one told.

        Args:
            at: when its tokens were there, by `now`, of a peer that saw them come.
        """
        first = self._text.position == 0
        arrived = self._text.last_ns
        kept = self._text.append(outcome)
        if at is not None:
            self._text.last_ns = at
            if first:
                self._text.first_ns, self.sees_first = at, True
        elif not first:
            self._text.last_ns = arrived
        return kept

    def adopt_tokens(self, ids: Sequence[int], first: int, last: int) -> None:
        """Take tokens whose steps are not told.

        Args:
            ids: of the whole output.
            first, last: when the first and the last of them were there, by `now`.
        """
        self.adopt(Outcome((), tuple(ids[:1]), ("prefill",), 0), first)
        if self.finish is None and len(ids) > 1:
            rest = tuple(ids[1:])
            plain: list[Origin] = ["plain" for _ in rest]
            self.adopt(Outcome((), rest, tuple(plain), 0), last)

    def count(self, **counted: float) -> None:
        """Tell what the other program counted of this request: "drafted" and "accepted" tokens."""
        self.counted |= counted
