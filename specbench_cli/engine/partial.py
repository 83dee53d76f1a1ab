"""A target's forward in two halves: what its first layers say early, then the rest of it.

Early logits are those of the rows that leave the exit layer, read as if it were the last: through
the model's own final norm and output matrix (Elhoushi et al., LayerSkip, ACL 2024,
arXiv:2404.16710).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor

from specbench_cli.engine.decoder import State
from specbench_cli.engine.meter import Metered
from specbench_cli.engine.types import Hidden, Out, Tokens
from specbench_cli.errors import MethodFault


class Halves:
    """One forward over one sequence, halted behind its exit layer.

    Number for number what a whole forward gives. If the exit is the last layer there is no second
    half.

    Args:
        state: of the target; holds the new rows of the first layers alone until `end`.
        layer: how many layers run first.
        taps: layers whose outgoing rows are wanted.

    Raises:
        MethodFault: the target has no such layer.
    """

    def __init__(self, target: Metered, state: State, layer: int, taps: Sequence[int] = ()) -> None:
        self._target, self._state, self._layer, self._taps = target, state, layer, taps
        self._last: int = target.n_layers
        if not 1 <= layer <= self._last:
            raise MethodFault(
                f"{target.name} has no exit behind layer {layer}: it has {self._last} layers",
                f"choose one of 1 to {self._last}",
            )
        self._how: dict[str, Any] = {}
        self._first: Out | None = None

    def begin(self, x: Tokens, **how: Any) -> Tensor:
        """Run the first layers over new rows [1, n].

        Args:
            how: positions and mask, as `Decoder.forward` takes them.
        Returns:
            early logits [n, V].
        """
        self._how = how
        taps = [at for at in self._taps if at < self._layer]
        if self._layer == self._last:
            how = how | {"logits_at": "all"}
        else:
            how = how | {"layers": (0, self._layer), "logits_at": None, "early": True}
        self._first = self._target.forward(x, self._state, taps=taps, **how)
        return cast(Tensor, self._first.logits)[0]

    def end(self) -> Out:
        """Run the layers that are left: what a whole forward gives, with logits at all rows."""
        first = self._first
        assert first is not None, "`begin` comes first"
        if self._layer == self._last:
            return first
        rest = self._target.forward(
            Hidden(first.hidden),
            self._state,
            layers=(self._layer, self._last),
            taps=[at for at in self._taps if at >= self._layer],
            logits_at="all",
            **self._how,
        )
        return Out(rest.logits, rest.hidden, {**first.taps, **rest.taps})
