"""The target's forwards: over the prompt, and over the last committed token and a draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor

from specbench_cli.engine.decoder import LogitsAt, State
from specbench_cli.engine.head import Tape
from specbench_cli.engine.meter import Metered
from specbench_cli.engine.partial import Halves
from specbench_cli.engine.text import Text
from specbench_cli.engine.tree import rows_of
from specbench_cli.engine.types import Draft, Features, Out, Tokens
from specbench_cli.errors import MethodFault


class Scoring:
    """The target and its state, which only `forward`, the halves of one, and `keep` change.

    Args:
        target: behind a meter.
        state: of the target.
        text: whose next tokens are scored.
    """

    def __init__(self, target: Metered, state: State, text: Text) -> None:
        self.target, self.state = target, state
        self._text = text
        self._tape: Tape | None = None
        self._halves: Halves | None = None  # a forward that is halted

    def tap(self, taps: Sequence[int]) -> None:
        """See `Session.tap`."""
        self._tape = Tape(self.target.decoder, taps)

    def features(self, tokens: Tokens) -> Features:
        """Tokens beside the features that are kept; see `Session.unread`."""
        if self._tape is None:
            raise MethodFault("no features are kept: `session.tap` in `start` says of which layers")
        return Features(tokens.ids, self._tape.read()[None])

    def forward(self, x: Tokens, draft: Draft | None, logits_at: LogitsAt) -> Tensor:
        """Logits [n, V] of a forward over the root and a draft, or over the prompt."""
        how = {} if draft is None else self._shape(draft)
        if self._tape is None:
            out = self.target.forward(x, self.state, logits_at=logits_at, **how)
        else:
            layers = self._tape.layers
            out = self.target.forward(x, self.state, taps=layers, logits_at=logits_at, **how)
            self._tape.write(out)
        return _logits(out)

    def begin(self, x: Tokens, draft: Draft, layer: int) -> Tensor:
        """See `Session.begin_score`."""
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
        """Keep, of the last forward, the rows at `path`."""
        self.state.commit(0, path)
        if self._tape is not None:
            self._tape.keep(path)

    def _shape(self, draft: Draft) -> dict[str, Any]:
        """Positions and mask of a tree."""
        if draft.parents is None:
            return {}
        mask, depths = rows_of(draft.parents, self.target.device)
        return {"positions": (depths + (len(self._text.tokens) - 1))[None], "mask": mask}


def _logits(out: Out) -> Tensor:
    return cast(Tensor, out.logits)[0]
