"""The target's forwards: over the prompt, and over the last committed token and a draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from specbench_cli.engine.models.decoder import ChainsOnly, LogitsAt, Part, State, no_trees
from specbench_cli.engine.models.head import Tape
from specbench_cli.engine.models.meter import Metered
from specbench_cli.engine.sequence import Text
from specbench_cli.engine.types import Draft, Features, Hidden, Out, Tokens
from specbench_cli.engine.verify.tree import rows_of
from specbench_cli.errors import MethodFault

# ---- a forward in two halves --------------------------------------------------------------------


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


# ---- whole forwards -----------------------------------------------------------------------------


class Scoring:
    """The target and its state, which only `forward`, the halves of one, and `keep` change.

    Args:
        target: behind a meter.
        state: of the target.
        text: whose next tokens are scored.
        place: of the text among those that are decoded together.
    """

    def __init__(self, target: Metered, state: State, text: Text, place: int = 0) -> None:
        self.target, self.state = target, state
        self._place = place
        self._text = text
        self._tape: Tape | None = None
        self._halves: Halves | None = None  # a forward that is halted
        self._again = 0  # committed tokens that the last forward read once more, before the root
        self._root: Out | None = None  # what it said there, where it is apart from the draft's

    def tap(self, taps: Sequence[int]) -> None:
        """See `Session.tap`."""
        self._tape = Tape(self.target.decoder, taps)

    def features(self, tokens: Tokens) -> Features:
        """Tokens beside the features that are kept; see `Session.unread`."""
        return Features(tokens.ids, self._taped.read()[None])

    def newest(self) -> Tensor:
        """See `Session.features`."""
        return self._taped.last()

    @property
    def _taped(self) -> Tape:
        if self._tape is None:
            raise MethodFault("no features are kept: `session.tap` in `start` says of which layers")
        return self._tape

    def forward(self, x: Tokens, draft: Draft | None, logits_at: LogitsAt) -> Tensor:
        """Logits [n, V] of a forward over the root and a draft, or over the prompt."""
        if draft is not None and not self.state.by_row:
            part = self.part(x, draft, logits_at)
            return self.take(
                self.target.forward(part.x, self.state, taps=self.layers, logits_at=part.logits_at)
            )
        how = {} if draft is None else self._shape(draft)
        if self._tape is None:
            return _logits(self.target.forward(x, self.state, logits_at=logits_at, **how))
        layers = self._tape.layers
        return self.take(
            self.target.forward(x, self.state, taps=layers, logits_at=logits_at, **how)
        )

    def part(self, x: Tokens, draft: Draft | None, logits_at: LogitsAt) -> Part:
        """What `forward` would compute, for a forward that several sequences share; what comes of
        it goes to `take`."""
        if draft is not None and not self.state.by_row:
            return self._apart(x, draft)
        how = {} if draft is None else self._shape(draft)
        return Part(x, self.state, logits_at=logits_at, place=self._place, **how)

    def _apart(self, x: Tokens, draft: Draft) -> Part:
        """The draft's rows alone, for a state that can go back to the ends of forwards only: what
        is committed and not in it, the root included, is read by a forward before."""
        if draft.parents not in (None, tuple(range(-1, draft.nodes - 1))):
            raise no_trees(self.target.decoder)
        known = x.ids.shape[1] - draft.nodes
        self._again = known - 1
        if not draft.nodes:
            return Part(x, self.state, place=self._place)
        self._root = self.target.forward(Tokens(x.ids[:, :known]), self.state, taps=self.layers)
        return Part(Tokens(x.ids[:, known:]), self.state, logits_at="all", place=self._place)

    @property
    def layers(self) -> Sequence[int]:
        """The layers whose outgoing rows `take` needs."""
        return () if self._tape is None else self._tape.layers

    def take(self, out: Out) -> Tensor:
        """Logits [n, V] of a forward, whose features are kept."""
        if self._again or self._root is not None:
            out, self._root = _from_root(self._root, out), None
        if self._tape is not None:
            self._tape.write(out)
        return _logits(out)

    def begin(self, x: Tokens, draft: Draft, layer: int) -> Tensor:
        """See `Session.begin_score`."""
        if not self.state.by_row:
            raise ChainsOnly(
                f"{self.target.name} cannot be halted: its state only knows the ends of forwards",
                "choose a method that runs whole forwards of the target",
            )
        taps = () if self._tape is None else self._tape.layers
        self._halves = Halves(self.target, self.state, layer, taps)
        return self._halves.begin(x, **self._shape(draft))

    def end(self) -> Tensor:
        """See `Session.end_score`."""
        if self._halves is None:
            raise MethodFault("`end_score` ends what `begin_score` began; nothing was begun")
        out, self._halves = self._halves.end(), None
        if self._tape is not None:
            self._tape.write(out)
        return _logits(out)

    def keep(self, path: Sequence[int]) -> None:
        """Keep, of the last forward, the rows at `path`, counted from the root's."""
        if self._again:
            again, self._again = self._again, 0
            self.state.commit(0, (*range(again), *(again + row for row in path)))
        else:
            self.state.commit(0, path)
        if self._tape is not None:
            self._tape.keep(path)

    def _shape(self, draft: Draft) -> dict[str, Any]:
        """Positions and mask of a tree."""
        if draft.parents is None:
            return {}
        mask, depths = rows_of(draft.parents, self.target.device)
        return {"positions": (depths + (len(self._text.tokens) - 1))[None], "mask": mask}


def _from_root(root: Out | None, out: Out) -> Out:
    """The rows from the root on, where that was read apart from what follows, or behind tokens that
    were read once more."""
    if root is None:  # nothing was drafted
        return Out(out.logits, out.hidden[:, -1:], {at: t[:, -1:] for at, t in out.taps.items()})
    assert root.logits is not None
    assert out.logits is not None
    return Out(
        torch.cat((root.logits, out.logits), 1),
        torch.cat((root.hidden[:, -1:], out.hidden), 1),
        {at: torch.cat((root.taps[at][:, -1:], t), 1) for at, t in out.taps.items()},
    )


def _logits(out: Out) -> Tensor:
    return cast(Tensor, out.logits)[0]
