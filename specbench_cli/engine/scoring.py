"""Forwards of the target over the prompt and over drafts. `Session` uses this module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from specbench_cli.engine import host
from specbench_cli.engine.draft_validator import DraftValidator
from specbench_cli.engine.look_ahead import LookAheadRows
from specbench_cli.engine.models.decoder import ChainsOnly, LogitsAt, ModelInput, State, trees_fault
from specbench_cli.engine.models.head import FeatureCache
from specbench_cli.engine.models.meter import Metered, MeteredHead
from specbench_cli.engine.paused_forward import PausedForward
from specbench_cli.engine.sequence import Text
from specbench_cli.engine.step_log import StepLog
from specbench_cli.engine.types import Draft, Features, Hidden, ModelOutput, Tokens
from specbench_cli.engine.verify.tree import build_tree_mask
from specbench_cli.errors import MethodFault


@dataclass
class PendingScore:
    """Output of the target's first layers for a draft chain, from which the target can continue.

    A self-drafting method runs the first layers of the target to draft. To score the draft, the
    target then needs to run only the remaining layers.

    end_layer: Number of layers that have run.
    ids: Token ids [1, n] of each drafting forward.
    outputs: Output of each drafting forward.
    """

    end_layer: int
    ids: list[Tensor] = field(default_factory=list)
    outputs: list[ModelOutput] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """Number of rows of all drafting forwards together."""
        return sum(ids.shape[1] for ids in self.ids)

    def matches(self, x: Tokens) -> bool:
        """Return True if the rows belong to the first tokens of x. Waits for the device."""
        if not 0 < self.num_rows <= x.ids.shape[1]:
            return False
        return bool(host.number((torch.cat(self.ids, 1) == x.ids[:, : self.num_rows]).all()))


class Scoring:
    """The target's forwards for one session, and the target's state.

    Parts of the target (`Partial`) may write rows to the same state while they draft.
    `discard_partial_rows` removes these rows before the target's next forward.

    Args:
        target: The target, with metered forwards.
        state: The target's state.
        text: Text that the drafts continue.
        place: Index of the sequence in its batch.
        validator: Validator of the drafts. None if only `forward` is called.
        step_log: Record of the scored drafts.
    """

    def __init__(
        self,
        target: Metered,
        state: State,
        text: Text,
        place: int = 0,
        validator: DraftValidator | None = None,
        step_log: StepLog | None = None,
    ) -> None:
        self.target, self.state = target, state
        self._place, self._text = place, text
        self._validator, self._step_log = validator, step_log
        self._feature_cache: FeatureCache | None = None
        self.look_ahead_rows: LookAheadRows | None = None
        self._paused: PausedForward | None = None  # the forward in progress
        # Committed tokens before the root that the last forward processed again.
        self._num_reread = 0
        # Output at the root if a separate forward computed it.
        self._root_output: ModelOutput | None = None
        # Position and rows before partial forwards wrote.
        self._length_before_partial: tuple[int, int] | None = None
        self._pending: PendingScore | None = None  # state of a partial forward that can continue

    def score(self, draft: Draft, proposed: int | None = None) -> Tensor:
        """Check a draft, run the target over it, and return the logits."""
        x = self._check_input(draft, self.discard_partial_rows(keep_pending=True), proposed)
        return self.forward(x, draft, "all")

    def score_input(self, draft: Draft) -> ModelInput:
        """Check a draft. Return the target's input to score it, for a forward over a whole batch.

        Pass the output of that forward to `store_output`.
        """
        return self.batch_input(self._check_input(draft, self.discard_partial_rows()), draft, "all")

    def begin_score(self, draft: Draft, layer: int, *, early: bool) -> PausedForward:
        """Check a draft and run the target's first layers over it. Return the paused forward."""
        x = self._check_input(draft, self.discard_partial_rows())
        if not self.state.by_row:
            raise ChainsOnly(
                f"{self.target.name} cannot be paused in a forward: its state is recurrent",
                "choose a method that runs only full forwards of the target",
            )
        self._paused = PausedForward(
            self.target, self.state, self.captured_layers, self._end_paused_forward
        )
        positions, mask = self._shape(draft)
        self._paused.begin(x, layer, early=early, positions=positions, mask=mask)
        return self._paused

    def prefill(self) -> Tensor:
        """Run the rest of the prompt through the target. Return the logits [1, V]
        after the prompt."""
        x = self._text.pending_tokens(self.discard_partial_rows())
        logits = self.forward(x, None, "last")
        self.keep(range(x.ids.shape[1]))
        return logits

    @property
    def pending_prompt_length(self) -> int:
        """Number of prompt tokens that the target has not processed."""
        return self._text.prompt_length - self.discard_partial_rows()

    def prompt_input(self, n: int) -> ModelInput:
        """Return the target's input of the next n prompt tokens, for a forward over a
        whole batch."""
        x = Tokens(self._text.pending_tokens(self.discard_partial_rows()).ids[:, :n])
        return self.batch_input(
            x, None, "last" if n == self.pending_prompt_length else None
        )._replace(prompt=True)

    def store_prompt_output(self, out: ModelOutput, n: int) -> Tensor | None:
        """Store the output of a forward over the input that `prompt_input` returned.

        If the prompt is complete, return the logits [1, V] after it, otherwise None.
        """
        if out.logits is None:
            self.store_prompt_chunk(out)
            return None
        logits = self.store_output(out)
        self.keep(range(n))
        return logits

    def _check_input(self, draft: Draft, state_length: int, proposed: int | None = None) -> Tokens:
        """Check a draft and log it. Return the pending tokens followed by the draft's tokens.

        Raises:
            MethodFault: The draft is malformed.
        """
        assert self._validator is not None
        assert self._step_log is not None
        self._validator.check(draft)
        self._step_log.record_scored(draft, proposed)
        return self._validator.input_with_root(draft, state_length)

    def begin_partial(self, pending: PendingScore | None) -> PendingScore | None:
        """Allow a part of the target (`Partial`) to write to the target's state.

        Returns:
            Object in which the part stores its output, so that the target can continue from it.
            None if the target cannot continue from it.

        Raises:
            MethodFault: A forward of the target is paused.
        """
        if self._paused is not None:
            raise MethodFault(
                "a part of the target drafts before `begin_score`, or after its `end`"
            )
        if self._length_before_partial is None:
            self._length_before_partial, self._pending = (
                (self.state.position(), self.state.length()),
                pending,
            )
            if pending is not None:
                pending.ids.clear()
                pending.outputs.clear()
        elif pending is not self._pending:
            self._pending = None  # two parts wrote to the state, so their rows are mixed
        return self._pending

    def discard_partial_rows(self, *, keep_pending: bool = False) -> int:
        """Discard the rows that parts of the target wrote to the target's state.

        Return the number of tokens of the text in the state.

        Args:
            keep_pending: True if `forward` follows, which may continue from these rows.

        Raises:
            MethodFault: The part also removed rows of the text.
        """
        if self._length_before_partial is None:
            return self.state.position()
        position, rows = self._length_before_partial
        extra_rows = [self.state.length(0, at) - rows for at in range(self.target.n_layers)]
        if min(extra_rows) < 0:
            raise MethodFault(
                "the target's state has lost rows of the committed text",
                "roll a part of the target back only to the length at which it began",
            )
        pending = self._pending if keep_pending else None
        expected = [
            pending.num_rows if pending and at < pending.end_layer else 0
            for at in range(len(extra_rows))
        ]
        if pending is None or not pending.num_rows or extra_rows != expected:
            self.state.rollback(0, position)
            self._length_before_partial = self._pending = None
        return position

    def capture_layers(self, layers: Sequence[int]) -> None:
        """Capture the output of some target layers in all later forwards, for a head."""
        self._feature_cache = FeatureCache(self.target.decoder, layers)

    def look_ahead(self, head: MeteredHead) -> LookAheadRows:
        """Return an object that adds the rows of a `LookAhead` head to the target's forwards.

        These rows follow text tokens. From their outputs, the head drafts.
        """
        if not self.state.by_row:
            raise ChainsOnly(
                f"{self.target.name} does not support `LookAhead` heads: its state is recurrent",
                "choose a method that runs only full forwards of the target",
            )
        self.look_ahead_rows = LookAheadRows(self.target, head)
        return self.look_ahead_rows

    def features(self, tokens: Tokens) -> Features:
        """Return the tokens that a head has not processed, with the captured target features."""
        return Features(tokens.ids, self._required_feature_cache.read()[None])

    def last_features(self, n: int) -> Tensor:
        """Return the target features [n, width] of the last n committed tokens."""
        return self._required_feature_cache.last(n)

    @property
    def last_forward_features(self) -> Tensor | None:
        """Features [n, width] of the rows of the last forward. None if no layers are captured."""
        return None if self._feature_cache is None else self._feature_cache.latest

    @property
    def _required_feature_cache(self) -> FeatureCache:
        if self._feature_cache is None:
            raise MethodFault("no features are captured: call `session.capture_layers` in `start`")
        return self._feature_cache

    def forward(self, x: Tokens, draft: Draft | None, logits_at: LogitsAt) -> Tensor:
        """Run a forward over the root and a draft, or over the prompt. Return the logits [n, V].

        Args:
            x: Pending tokens, the last of which is the root, then the draft's tokens.
            draft: The draft, or None for a forward over the prompt.
        """
        if draft is not None and not self.state.by_row:
            return self.store_output(
                self.target.execute(
                    self._input_after_root(x, draft)._replace(captured_layers=self.captured_layers)
                )
            )
        is_chain = draft is None or draft.parents is None
        if self.look_ahead_rows is not None and draft is not None and not draft.parents:
            draft = replace(draft, parents=tuple(range(-1, draft.nodes - 1)))
        model_input = self._input(x, draft, logits_at)
        if self._length_before_partial is not None:
            pending, (position, _) = self._pending, self._length_before_partial
            self._length_before_partial = self._pending = None
            if pending is not None and is_chain and pending.matches(x):
                return self._resume(pending, x)
            self.state.rollback(0, position)
        if self.look_ahead_rows is None:
            return self.store_output(self.target.execute(model_input))
        execute = self.look_ahead_rows.prefill if draft is None else self.look_ahead_rows.forward
        return self.store_output(execute(model_input))

    def _resume(self, pending: PendingScore, x: Tokens) -> Tensor:
        """Run the target layers that the drafting part has not run. Return the logits [n, V] of all
        rows of x.
        """
        outputs, pending_ids = pending.outputs, x.ids[:, pending.num_rows :]
        captured_layers = [at for at in self.captured_layers if at < pending.end_layer]
        if pending_ids.shape[1]:
            first = ModelInput(
                Tokens(pending_ids),
                self.state,
                logits_at=None,
                layers=(0, pending.end_layer),
                captured_layers=captured_layers,
            )
            outputs = [*outputs, self.target.execute(first)]
        upper_input = ModelInput(
            Hidden(torch.cat([each.hidden for each in outputs], 1)),
            self.state,
            logits_at="all",
            layers=(pending.end_layer, self.target.n_layers),
            captured_layers=[at for at in self.captured_layers if at >= pending.end_layer],
        )
        out = self.target.execute(upper_input)
        lower_states = {
            at: torch.cat([each.aux_hidden_states[at] for each in outputs], 1)
            for at in captured_layers
        }
        return self.store_output(
            ModelOutput(out.logits, out.hidden, lower_states | dict(out.aux_hidden_states))
        )

    def batch_input(self, x: Tokens, draft: Draft | None, logits_at: LogitsAt) -> ModelInput:
        """Return the input with which `forward` would run, for a forward over a whole batch.

        Pass the output of that forward to `store_output`.
        """
        if self.look_ahead_rows is not None:
            raise MethodFault("`LookAhead` heads are not supported in batches")
        if draft is not None and not self.state.by_row:
            return self._input_after_root(x, draft)
        return self._input(x, draft, logits_at)

    def _input_after_root(self, x: Tokens, draft: Draft) -> ModelInput:
        """Run a forward over the pending tokens and the root. Return the input of a forward over
        the draft.

        Recurrent states need two forwards, because they can return only to the end of a forward. If
        the draft is rejected, the state returns to the root.
        """
        if draft.parents not in (None, tuple(range(-1, draft.nodes - 1))):
            raise trees_fault(self.target.decoder)
        committed = x.ids.shape[1] - draft.nodes
        self._num_reread = committed - 1
        if not draft.nodes:
            return ModelInput(x, self.state, place=self._place)
        root = ModelInput(
            Tokens(x.ids[:, :committed]), self.state, captured_layers=self.captured_layers
        )
        self._root_output = self.target.execute(root)
        return ModelInput(
            Tokens(x.ids[:, committed:]), self.state, logits_at="all", place=self._place
        )

    @property
    def captured_layers(self) -> Sequence[int]:
        """Target layers whose output `store_output` needs."""
        return () if self._feature_cache is None else self._feature_cache.layers

    def store_prompt_chunk(self, out: ModelOutput) -> None:
        """Keep the rows and features of a prompt chunk. More chunks of the prompt follow."""
        if self._feature_cache is not None:
            self._feature_cache.write(out)
        self.keep(range(out.hidden.shape[1]))

    def store_output(self, out: ModelOutput) -> Tensor:
        """Store the features of a finished forward. Return the forward's logits [n, V]."""
        if self._num_reread or self._root_output is not None:
            out, self._root_output = _rows_from_root(self._root_output, out), None
        if self._feature_cache is not None:
            self._feature_cache.write(out)
        return _logits(out)

    def _end_paused_forward(self, out: ModelOutput | None) -> None:
        """Store the features of a paused forward that has ended. `out` is None after
        an early exit."""
        self._paused = None
        if self._feature_cache is None:
            return
        if out is None:
            raise MethodFault(
                "features cannot be captured if a forward exits early",
                "leave out `session.capture_layers`",
            )
        self._feature_cache.write(out)

    def keep(self, path: Sequence[int]) -> None:
        """Keep the rows `path` of the last forward in the target's state. Row 0 is the root."""
        self._length_before_partial = self._pending = None  # `commit` drops partial rows too
        if self._num_reread:
            num_reread, self._num_reread = self._num_reread, 0
            self.state.commit(0, (*range(num_reread), *(num_reread + row for row in path)))
        else:
            self.state.commit(0, path)
        if self._feature_cache is not None:
            self._feature_cache.keep(path)
        if self.look_ahead_rows is not None:
            self.look_ahead_rows.keep(path)

    def _input(self, x: Tokens, draft: Draft | None, logits_at: LogitsAt) -> ModelInput:
        """Return the target's input for a forward over the root and a draft, or over the prompt."""
        positions, mask = (None, None) if draft is None else self._shape(draft)
        return ModelInput(
            x,
            self.state,
            positions,
            mask,
            logits_at,
            self._place,
            captured_layers=self.captured_layers,
        )

    def _shape(self, draft: Draft) -> tuple[Tensor | None, Tensor | None]:
        """Return the positions [1, n] and the mask [n, n] of a tree. Return (None, None) for a
        chain.
        """
        if draft.parents is None:
            return None, None
        mask, depths = build_tree_mask(draft.parents, self.target.device)
        return (depths + (len(self._text.tokens) - 1))[None], mask


def _rows_from_root(root: ModelOutput | None, out: ModelOutput) -> ModelOutput:
    """Return the output for the root and the draft, without the rows of tokens before the root.

    Args:
        root: Output of a separate forward over the root, or None.
    """
    if root is None:  # the draft was empty
        return ModelOutput(
            out.logits,
            out.hidden[:, -1:],
            {at: t[:, -1:] for at, t in out.aux_hidden_states.items()},
        )
    assert root.logits is not None
    assert out.logits is not None
    return ModelOutput(
        torch.cat((root.logits, out.logits), 1),
        torch.cat((root.hidden[:, -1:], out.hidden), 1),
        {
            at: torch.cat((root.aux_hidden_states[at][:, -1:], t), 1)
            for at, t in out.aux_hidden_states.items()
        },
    )


def _logits(out: ModelOutput) -> Tensor:
    return cast(Tensor, out.logits)[0]
