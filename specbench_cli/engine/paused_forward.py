"""Target forwards that pause after a layer, for early-exit and parallel methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from torch import Tensor

from specbench_cli.engine.models.decoder import ModelInput, State
from specbench_cli.engine.models.meter import Metered
from specbench_cli.engine.types import Forward, Hidden, ModelOutput, Tokens
from specbench_cli.errors import MethodFault
from specbench_cli.former_names import renamed_members


@renamed_members(
    to="run_to",
    early="early_logits",
    says="early_logits_of",
    look="exit_logits",
    leave="exit_early",
)
class PausedForward:
    """A forward over one sequence that pauses after a layer, and then continues or exits early.

    If all layers run, the result is exactly that of a full forward. After `exit_early`, the layers
    that did not run have no rows of these tokens. Later forwards cannot attend to such rows.

    Args:
        state: State of the target. Only layers that have run contain the new rows.
        captured_layers: Layers whose output is captured.
        on_end: Function that is called at the end. Its argument is the output of the full forward,
            or None after an early exit.

    Attributes:
        layer: Number of layers that have run.

    Raises:
        MethodFault: The target has no such layer, the layer has run already, or the forward has
            ended.
    """

    def __init__(
        self,
        target: Metered,
        state: State,
        captured_layers: Sequence[int] = (),
        on_end: Callable[[ModelOutput | None], None] = lambda _: None,
    ) -> None:
        self._target, self._state, self._captured_layers = target, state, captured_layers
        self.layer, self._on_end = 0, on_end
        self._early_logits: Tensor | None = None
        self._last: int = target.n_layers
        self._input: ModelInput
        self._out: ModelOutput | None = None
        self._exit_forward: Forward | None = None

    def begin(
        self,
        x: Tokens,
        layer: int,
        *,
        early: bool = True,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> None:
        """Run the first layers over new rows [1, n].

        Args:
            early: True to also compute early logits. They are not available if earlier forwards
                skipped some of these layers.
            positions, mask: Positions and attention mask, as in `ModelInput`.
        """
        self._input = ModelInput(x, self._state, positions, mask, logits_at="all")
        self._check(layer)
        have = self._state.length
        common_end = next((at for at in range(1, layer) if have(0, at) != have()), layer)
        captured_layers = [at for at in self._captured_layers if at < common_end]
        first, early = (
            self._input._replace(captured_layers=captured_layers),
            early and common_end == layer,
        )
        if common_end == self._last:
            early = False  # all layers run, so these are the normal logits
        else:
            first = first._replace(layers=(0, common_end), logits_at="all" if early else None)
        self._out = self._target.execute(first, early=early)
        self.layer = common_end
        self._early_logits = None if self._out.logits is None else self._out.logits[0]
        if common_end < layer:
            self.run_to(layer)

    def run_to(self, layer: int) -> None:
        """Run further layers, until the first `layer` layers have run."""
        self._check(layer)
        low, have = self.layer, self._state.length
        for _, same in groupby(range(low, layer), key=lambda at: have(0, at)):
            span = list(same)
            rest = self._target.execute(
                self._input._replace(
                    x=Hidden(self._last_output.hidden),
                    positions=self._positions_at(span[0]),
                    layers=(span[0], span[-1] + 1),
                    captured_layers=[at for at in self._captured_layers if at in span],
                    logits_at="all" if span[-1] + 1 == self._last else None,
                )
            )
            self._out = ModelOutput(
                rest.logits,
                rest.hidden,
                {**self._last_output.aux_hidden_states, **rest.aux_hidden_states},
            )
        self.layer = layer

    def end(self) -> ModelOutput:
        """Run the remaining layers. Return the output of the full forward, with the logits of all
        rows.
        """
        if self.layer < self._last:
            self.run_to(self._last)
        self._end(out := self._last_output)
        return out

    @property
    def early_logits(self) -> Tensor:
        """Logits [n, V] computed from the output of the first layers, if `begin` computed them."""
        assert self._early_logits is not None, "`begin` did not compute early logits"
        return self._early_logits

    def early_logits_of(self, ids: Tensor) -> Tensor:
        """Return the early logits [n, k] of only the token ids [k].

        If the target can compute only the logits of all ids, the function calls `exit_logits`.
        """
        rows = self._target.norm(self._last_output.hidden[0])
        some: Tensor | None = self._target.unembed_ids(rows, ids)
        return self.exit_logits()[:, ids] if some is None else some

    def exit_logits(self) -> Tensor:
        """Return the logits [n, V] of an early exit after the layers that have run so far."""
        rows, self._exit_forward = self._target.record_exits(self._last_output.hidden[0])
        return rows

    def exit_early(self, *, copy: bool) -> None:
        """End the forward without running the remaining layers. Call `exit_logits` before.

        Args:
            copy: True to compute keys and values of the remaining layers from the current hidden
                states, and to cache them. If False, the caches of these layers get no rows for
                these tokens.
        """
        rows, above = self._last_output.hidden, range(self.layer, self._last)
        if self._exit_forward is None:
            raise MethodFault(
                "`exit_early` was called without logits", "call `exit_logits` before `exit_early`"
            )
        # The exit logits decide the draft, so their forward counts as verification.
        self._exit_forward.role, self._exit_forward.layers = "verify", (self._last, self._last)
        if copy and above:
            self._target.append_kv(rows, self._state, above, self._positions)
        else:
            self._state.leave_out(0, above, rows.shape[1])
        self._end(None)

    def _end(self, out: ModelOutput | None) -> None:
        self._out = None
        self._on_end(out)

    @property
    def _last_output(self) -> ModelOutput:
        if self._out is None:
            raise MethodFault(f"this forward of {self._target.name} has already ended")
        return self._out

    @property
    def _positions(self) -> Tensor:
        """Positions [1, n] of the new rows."""
        if self._input.positions is not None:
            return self._input.positions
        end, n = self._state.position(), self._last_output.hidden.shape[1]
        return torch.arange(end - n, end, device=self._last_output.hidden.device)[None]

    def _positions_at(self, layer: int) -> Tensor | None:
        """Return the positions [1, n] of the new rows at a layer. None means
        consecutive positions."""
        n = self._last_output.hidden.shape[1]
        if self._state.length(0, layer) + n == self._state.length():
            return self._input.positions
        return self._positions

    def _check(self, layer: int) -> None:
        if not 1 <= layer <= self._last:
            raise MethodFault(
                f"{self._target.name} cannot exit after {layer} layers: it has {self._last} layers",
                f"choose a number from 1 to {self._last}",
            )
        if layer < self.layer:
            raise MethodFault(
                f"this forward of {self._target.name} has run {self.layer} layers already and"
                f" cannot go back to layer {layer}"
            )
