"""Session: the interface through which a method decodes one request.

A step has four parts. The method builds a draft (`drafts`). The target scores the draft
(`scoring`). The verifier accepts or rejects its tokens (`verify.verifier`). `Session.commit`
appends the outcome to the text. The measuring code uses `Harness`, which methods must not touch.
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
from specbench_cli.engine.verify.weakened_prompt import WeakenedPromptReader
from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import MethodFault
from specbench_cli.former_names import renamed_members


class Harness:
    """Interface of a session for the code that measures methods. Methods must not use it.

    Attributes:
        text: The text, with the origin and the time of each token.
        meter: Trace of all forwards.
        workers: Drafters that run in parallel with the target.
        reference: Output of plain decoding, for methods with `upper_bound`. None for all other
            methods.
        batch_sessions: Sessions of the current step, including this session.
        policy: Rule that sets the draft lengths of all sequences of a step, or None.
    """

    def __init__(self, session: Session, reference: Sequence[int] | None) -> None:
        self._session, self.text = session, session._text
        self.meter, self.reference = session._meter, reference
        self.workers = session._workers
        self.batch_sessions: Sequence[Session] = (session,)
        self.policy: Any = None
        self._num_reported, self._timer_started = 0, False

    def begin(self) -> None:
        """Start the timer. The prompt is already on the device, and the model states are allocated.

        Raises:
            MethodFault: The timer is already running. A method must not start it.
        """
        if self._timer_started:
            raise MethodFault(
                "the timer of a request was started twice",
                "do not use `session.harness` in a method: the timer starts before the method",
            )
        self._timer_started = True
        if self.text.device.type == "cuda":
            torch.cuda.synchronize(self.text.device)
        self.meter.clock.restart()
        self.text.start()

    def set_states(self, allocate_state: Callable[[Decoder, int], State]) -> None:
        """Allocate the session's model states. In a batch, this happens when the sequence joins.

        Args:
            allocate_state: Function that returns an empty state for a decoder and a number of extra
                rows.
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
        """Free the last logits and the cached noise, after the sequence has left its batch."""
        self._session._verifier.rows = None
        self._session._noise.clear()

    def forwards(self) -> Sequence[Forward]:
        """Return the forwards since the last call. They belong to the current step."""
        first, self._num_reported = self._num_reported, len(self.meter.forwards)
        return self.meter.forwards[first:]

    @property
    def scoring(self) -> Scoring:
        """The target's forwards of this session. A batch runs them together for all
        its sessions."""
        return self._session._scoring

    def step_cost(self, sequences: int, rows: int, even: bool = True) -> float:
        """Return the time of a step, not counting the time for drafting.

        The unit is that of `verify_cost`.

        Args:
            sequences: Number of sequences in the step.
            rows: Number of rows in the target's forward.
            even: True if all sequences have the same number of rows.
        """
        return self._session._workspace.cost("target", rows, sequences, even)

    def drafting_cost(self, model: Metered | MeteredHead, sequences: int) -> float:
        """Return the time to draft one more token for each sequence, including CPU work."""
        return model.portion * self._session._workspace.cost(model.name, sequences, sequences)

    @property
    def step_records(self) -> Sequence[StepRecord]:
        """Drafts and outcome of each step, oldest first. Prefill is not a step."""
        return self._session._step_log.steps

    def commit_first(self, logits: Tensor) -> None:
        """Choose the first output token from the logits [1, V] after the prompt, and commit it."""
        session = self._session
        first = session._verifier.decide(session.chain(()), logits)
        self.text.append(replace(first, origin=("prefill",)))
        if (weakened := session._verifier.weakened) is not None:
            weakened.commit(first)
        self.forwards()  # prefill forwards belong to no step


@renamed_members(
    tap="capture_layers", unread="pending_features", verified="verified_logits", part="batch_input"
)
class Session(DraftBuilder):
    """Interface through which a method decodes one request.

    The base class `SessionView` has the text and the models. The base class `DraftBuilder` builds
    drafts.

    Args:
        recording: Tokens of a recorded output. In a replay they replace the target's choices.
        reference: Output of plain decoding, for methods with `upper_bound`. None for all other
            methods.

    Attributes:
        harness: Interface for the measuring code. Methods must not use it.
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
            self.harness.set_states(workspace.create_allocator())

    # ---- the target's state and features --------------------------------------------------------

    @property
    def state(self) -> State:
        """State of the target (such as its KV cache). `score` appends rows, and `commit` keeps some
        of them.
        """
        return self._scoring.state

    def partial(
        self,
        layers: tuple[int, int] | None = None,
        skip: Iterable[int | Sublayer] = (),
        *,
        keep: bool = False,
    ) -> Partial:
        """Return a part of the target that serves as a draft model.

        Its forwards count as drafting, and cost their share of the target's weights. The part can
        run on `session.state`. It then needs no prefill, because it reads the target's own rows.
        The engine discards the rows that the part writes there before the target scores.
        Alternatively, the part has a state of its own.

        Args:
            layers: Half-open range of the layers that run. None means all layers. (0, E) is an
                early exit. (E, F) continues from the `Hidden` rows that layer E - 1 returned.
            skip: Layers to skip, or sublayers as (layer, "attention") and (layer, "mlp").
            keep: True if the target's next `score` runs only the layers that this part has not run
                for the draft. The part must be a range (0, E). This costs one device sync per step.

        Raises:
            MethodFault: The target has no such layers.
        """
        meter, place = self._meter, self._place
        skipped = frozenset(skip)
        return Partial(self._scoring, meter, layers=layers, skip=skipped, keep=keep, place=place)

    @overload
    def reserve(self, nodes: int) -> None: ...

    @overload
    def reserve(self, nodes: int, ahead: MeteredHead) -> LookAheadRows: ...

    def reserve(self, nodes: int, ahead: MeteredHead | None = None) -> LookAheadRows | None:
        """Reserve rows in the target's state for trees of up to `nodes` nodes.

        Call it before prefill.

        Args:
            ahead: A `LookAhead` head. The target's forwards then include the head's extra rows,
                after the last committed token and after all draft nodes.

        Returns:
            With `ahead`, an object that returns the logits of the extra rows
            (`LookAheadRows.latest_logits`). Otherwise None.

        Raises:
            MethodFault: The target is recurrent and does not support `LookAhead` heads.
        """
        look_ahead_rows = None if ahead is None else self._scoring.look_ahead(ahead)
        self._validator.slack = nodes
        rows = nodes if look_ahead_rows is None else look_ahead_rows.count_rows(nodes)
        self._scoring.state = self.new_state(self.target, rows)
        if (weakened := self._verifier.weakened) is not None:
            weakened.set_state(self._allocate_state(self.target.decoder, nodes))
        return look_ahead_rows

    def capture_layers(self, captured_layers: Sequence[int]) -> None:
        """Capture hidden states in the target's forwards, for a draft head. Call it before prefill.

        Args:
            captured_layers: Target layers whose output is captured, as in `Head.captured_layers`.
        """
        self._scoring.capture_layers(captured_layers)

    def pending_features(self, length: int) -> Features:
        """Return the tokens that a head has not processed, with the target's features.

        These are the committed tokens from index `length` + 1 on. Each token comes with the
        features of the token before it. After prefill, these tokens are the prompt without its
        first token, and the first committed token.

        Args:
            length: Number of rows in the head's state.

        Raises:
            MethodFault: `capture_layers` was not called.
        """
        return self._scoring.features(self.pending_tokens(length + 1))

    def features(self, n: int = 1) -> Tensor:
        """Return target features [n, width] for a head without a state.

        From these hidden states, the target chose the last n committed tokens.

        Args:
            n: Number of tokens, at most the number that the last step committed.

        Raises:
            MethodFault: `capture_layers` or `prefill` was not called, or n is too large.
        """
        return self._scoring.last_features(n)

    # ---- the target's steps ---------------------------------------------------------------------

    def prefill(self) -> None:
        """Run the prompt through the target and commit the first token."""
        self.harness.commit_first(self._scoring.prefill())

    def score(self, draft: Draft, proposed: int | None = None) -> Tensor:
        """Run the target over the last committed token and a draft. Return the logits [m + 1, V].

        Args:
            proposed: Number of draft nodes that the method proposes: the first nodes of the draft.
                The target only computes the remaining nodes, and they must not be verified. None
                means all nodes.

        Raises:
            MethodFault: The draft is malformed. The message names the step, the field and the
                allowed values.
        """
        return self._scoring.score(draft, proposed)

    def begin_score(self, draft: Draft, layer: int, *, early: bool = True) -> PausedForward:
        """Start to score a draft, and pause after the first `layer` layers.

        The returned forward continues with `run_to`. It ends with `end()`, whose `rows` are the
        same logits that `score` returns. The logits of an early exit at the layer are
        `early_logits` [m + 1, V], `early_logits_of` and `exit_logits`. A lossy method may end the
        forward there (`exit_early`) and pass the exit's logits to `verify`.

        Args:
            early: True to compute early logits after the first layers. A method may use them to
                prepare the next draft.

        Raises:
            MethodFault: The draft is malformed, or the target has no such layer.
        """
        return self._scoring.begin_score(draft, layer, early=early)

    def verify(self, draft: Draft, rows: Tensor, accept: AcceptRule | None = None) -> Outcome:
        """Accept or reject draft tokens, from the target's logits [m + 1, V] at the root and all
        nodes.

        For a chain, the logits [m, V] without the last node are enough. Then no bonus token
        follows. The function also applies the run's contrastive decoding and logits processor
        (`Sampling`).

        Args:
            accept: Accept rule, which may keep tokens that the lossless rule rejects. None means no
                such rule.

        Raises:
            MethodFault: The number of rows is wrong, or the run does not allow an accept rule: with
                block verification, in a replay, or with a logits processor.
        """
        return self._verifier.verify(draft, rows, accept)

    def verified_logits(self) -> Tensor:
        """Return the target's logits [m + 1, V] for the last verified draft.

        `Method.observe` may use it. The logits are valid until the next forward.

        Raises:
            MethodFault: No draft was verified yet.
        """
        if self._verifier.rows is None:
            raise MethodFault("no draft was verified yet: `verified_logits` is for `observe`")
        return self._verifier.rows

    def commit(self, outcome: Outcome) -> Outcome:
        """Append the tokens of a verification outcome to the text. Keep their rows in the target's
        state.

        The stop rule may shorten the outcome. No other method extends the text.

        Returns:
            The committed part of the outcome. Its `finish` is set if the output ends here.
        """
        committed = self._text.append(outcome)
        self._step_log.record_committed(committed)
        # Keep the rows of the root and of the accepted tokens. The last committed token is the next
        # root, so the next forward processes it.
        nodes = committed.path[: len(committed.committed) - 1]
        self._scoring.keep((0, *(node + 1 for node in nodes)))
        if (weakened := self._verifier.weakened) is not None:
            weakened.commit(committed)
        return committed

    def step(self, draft: Draft, committed: Outcome, **extra: float) -> Step:
        """Return the step that the method yields, with all forwards that have run since the last
        step.

        Args:
            extra: The method's own counts. The stored record of the output has their sums.
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
        """Return this sequence's input for a draft model's forward over a whole batch.

        The arguments are those of `Decoder.forward`. Pass the result to `Metered.forward_batch`.
        """
        return ModelInput(x, state, positions, mask, logits_at, self._place or 0)
