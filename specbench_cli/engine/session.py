"""Session: everything that a method may use while it decodes one request.

The method builds a draft (`drafts`), the target scores it (`scoring`), and the verifier decides it
(`verify.verifier`). Then `Session.commit` appends the outcome to the text. The harness uses its own
interface, `Harness`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor

from specbench_cli.engine.drafts import DraftBuilder
from specbench_cli.engine.learning import Memory
from specbench_cli.engine.look_ahead import LookAheadRows
from specbench_cli.engine.models.decoder import Decoder, LogitsAt, ModelInput, State
from specbench_cli.engine.models.meter import Metered, MeteredHead
from specbench_cli.engine.partial import Partial
from specbench_cli.engine.paused_forward import PausedForward
from specbench_cli.engine.request import BatchSlot, Request
from specbench_cli.engine.scoring import Scoring
from specbench_cli.engine.sequence import RecordedOutput
from specbench_cli.engine.step_log import StepLog, StepRecord
from specbench_cli.engine.types import Draft, Features, Forward, Outcome, Step, Sublayer, Tokens
from specbench_cli.engine.verify.accept import AcceptRule
from specbench_cli.engine.verify.random import Random
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.verify.verifier import Verifier
from specbench_cli.engine.verify.weakened import WeakenedPromptReader
from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import MethodFault


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

    def __init__(self, session: Session, reference: Sequence[int] | None) -> None:
        self._session, self.text = session, session._text
        self.meter, self.reference = session._meter, reference
        self.workers = session._workers
        self.batch_sessions: Sequence[Session] = (session,)
        self.policy: Any = None
        self._num_reported, self._timer_started = 0, False

    def begin(self) -> None:
        """Start the timer: the ids are on the device, the states cleared and preallocated.

        Raises:
            MethodFault: it runs already. Whoever measures starts it, before the method is called.
        """
        if self._timer_started:
            raise MethodFault(
                "the clock of a request runs already: it is started once, before the method",
                "leave `session.harness` alone; all that a method does is in its time",
            )
        self._timer_started = True
        if self.text.device.type == "cuda":
            torch.cuda.synchronize(self.text.device)
        self.meter.clock.restart()
        self.text.start()

    def set_states(self, allocate_state: Callable[[Decoder, int], State]) -> None:
        """Have states: in a batch, from when the sequence joins it.

        Args:
            lend: makes a cleared state of a decoder, with so many rows beyond the longest sequence.
        """
        session = self._session
        session._allocate_state = allocate_state
        state, place = session.new_state(session.target), session._place or 0
        session._scoring = session._verifier.scoring = Scoring(
            session.target, state, self.text, place, session._validator, session._step_log
        )
        if (contrast := session.sampling.contrast) is not None:
            request, target = session.requests[0], session.target
            session._verifier.weakened = WeakenedPromptReader(
                contrast,
                target,
                allocate_state(target.decoder, 0),
                request.ids,
                request.stop.max_new_tokens,
                place,
            )

    def release(self) -> None:
        """Let go of the last step's logits and of the noise, which would be held as long as the
        session: of a batch, when the sequence has left it."""
        self._session._verifier.rows = None
        self._session._noise.clear()

    def forwards(self) -> Sequence[Forward]:
        """The forwards since the last call, for the step that they led to."""
        first, self._num_reported = self._num_reported, len(self.meter.forwards)
        return self.meter.forwards[first:]

    @property
    def scoring(self) -> Scoring:
        """The target's forwards, for a batch that runs them together."""
        return self._session._scoring

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
    def step_records(self) -> Sequence[StepRecord]:
        """What was scored, verified and committed, step by step; prefill is none."""
        return self._session._step_log.steps

    def commit_first(self, logits: Tensor) -> None:
        """Commit the first token, decided from the prompt's last logits [1, V]."""
        session = self._session
        first = session._verifier.decide(session.chain(()), logits)
        self.text.append(replace(first, origin=("prefill",)))
        if (weakened := session._verifier.weakened) is not None:
            weakened.commit(first)
        self.forwards()  # these are no step's


class Session(DraftBuilder):
    """Decoding of one request by one method: its view of the text, its drafts and its steps.

    Attributes:
        harness: interface for the measuring program.

    With a `recording`, the recorded tokens decide instead of the target (`replay`).
    """

    _scoring: Scoring

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
        shared: BatchSlot | None = None,
    ) -> None:
        super().__init__(
            workspace, request, sampling, pass_=pass_, memory=memory, random=random, shared=shared
        )
        self._step_log = StepLog()
        self._verifier = Verifier(
            request.prompt_id,
            self._text,
            self._chooser,
            self._validator,
            processing=self._processing,
            meter=self._meter,
            place=self._place,
            step_log=self._step_log,
            recording=None if recording is None else RecordedOutput(recording, self.device),
        )
        self.harness = Harness(self, reference)
        if shared is None:
            self.harness.set_states(workspace.loans())

    # ---- the target's state and features --------------------------------------------------------

    @property
    def state(self) -> State:
        """The target's state, of which `score` writes and `commit` keeps rows."""
        return self._scoring.state

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
        meter, place = self._meter, self._place
        skipped = frozenset(skip)
        return Partial(self._scoring, meter, layers=layers, skip=skipped, keep=keep, place=place)

    @overload
    def reserve(self, nodes: int) -> None: ...

    @overload
    def reserve(self, nodes: int, ahead: MeteredHead) -> LookAheadRows: ...

    def reserve(self, nodes: int, ahead: MeteredHead | None = None) -> LookAheadRows | None:
        """Have rows in the target's state for trees of so many nodes; only before prefill.

        Args:
            ahead: a `LookAhead`, whose rows the target's forwards shall carry behind the last
                committed token and all nodes.
        Returns:
            of `ahead`, what keeps what its rows said: see `LookAheadRows.newest`.
        Raises:
            MethodFault: nothing looks ahead in a target that runs whole forwards alone.
        """
        beside = None if ahead is None else self._scoring.look_ahead(ahead)
        self._validator.slack = nodes
        rows = nodes if beside is None else beside.count_rows(nodes)
        self._scoring.state = self.new_state(self.target, rows)
        if (weakened := self._verifier.weakened) is not None:
            weakened.set_state(self._allocate_state(self.target.decoder, nodes))
        return beside

    def capture_layers(self, taps: Sequence[int]) -> None:
        """Have the target's forwards keep a head's features (see `Head.taps`); before prefill."""
        self._scoring.capture_layers(taps)

    def pending_features(self, length: int) -> Features:
        """What a head whose state has `length` rows has not read: the committed tokens from
        `length` + 1 on, each beside the target's features of the token before it.

        After prefill that is all of the prompt but its first token, and the first committed one.

        Raises:
            MethodFault: `tap` was not called.
        """
        return self._scoring.features(self.pending_tokens(length + 1))

    def features(self, n: int = 1) -> Tensor:
        """What a head without a state reads: the target's features [n, width] of the tokens before
        the last n committed ones, those that these were chosen from.

        Args:
            n: at most what the last step committed.
        Raises:
            MethodFault: `tap` was not called, there was no prefill, or that step had fewer.
        """
        return self._scoring.last_features(n)

    # ---- the target's steps ---------------------------------------------------------------------

    def prefill(self) -> None:
        """Run the prompt through the target and commit the first token."""
        self.harness.commit_first(self._scoring.prefill())

    def score(self, draft: Draft, proposed: int | None = None) -> Tensor:
        """One target forward over the last committed token and a draft: logits [m + 1, V].

        Args:
            proposed: how many of its nodes are up for verification, the first ones; the others are
                there for their rows alone. None: all. Who has seen the rows cannot say any more.
        Raises:
            MethodFault: the draft is malformed; says the step, the field and what is allowed.
        """
        return self._scoring.score(draft, proposed)

    def begin_score(self, draft: Draft, layer: int, *, early: bool = True) -> PausedForward:
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
        return self._scoring.begin_score(draft, layer, early=early)

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
        return self._verifier.verify(draft, rows, accept)

    def verified_logits(self) -> Tensor:
        """The target's logits [m + 1, V] at the root and the nodes of the draft that was verified
        last, rejected ones included: for `Method.observe`, until the next forward.

        Raises:
            MethodFault: nothing was verified yet.
        """
        if self._verifier.rows is None:
            raise MethodFault("no draft was verified yet: `verified` is for `observe`")
        return self._verifier.rows

    def commit(self, outcome: Outcome) -> Outcome:
        """Take an outcome: cut it by the stop rule, append it, keep its rows of the target's state.

        Whoever made it, this alone moves the text on.

        Returns:
            the outcome as far as it was committed; `finish` is set if the output ends here.
        """
        committed = self._text.append(outcome)
        self._step_log.record_committed(committed)
        # Rows: the root's and the drafted tokens', but for the last committed token, which roots
        # the next.
        nodes = committed.path[: len(committed.committed) - 1]
        self._scoring.keep((0, *(node + 1 for node in nodes)))
        if (weakened := self._verifier.weakened) is not None:
            weakened.commit(committed)
        return committed

    def step(self, draft: Draft, committed: Outcome, **extra: float) -> Step:
        """A step to yield: a draft, what was committed of it, and the forwards since the last step.

        Args:
            extra: counts of the method's own; records hold their sums.
        """
        return Step(0, draft, committed, self.harness.forwards(), extra)

    def batch_input(
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
