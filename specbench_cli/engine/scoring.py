"""Forwards of the target over the prompt, and over the last committed token and a draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from specbench_cli.engine import host
from specbench_cli.engine.draft_checks import DraftChecks
from specbench_cli.engine.halted import Halted
from specbench_cli.engine.look_ahead import Beside
from specbench_cli.engine.models.decoder import ChainsOnly, LogitsAt, ModelInput, State, trees_fault
from specbench_cli.engine.models.head import FeatureCache
from specbench_cli.engine.models.meter import Metered, MeteredHead
from specbench_cli.engine.seen import SeenSteps
from specbench_cli.engine.sequence import Text
from specbench_cli.engine.types import Draft, Features, Hidden, Out, Tokens
from specbench_cli.engine.verify.tree import rows_of
from specbench_cli.errors import MethodFault


@dataclass
class Begun:
    """What a part of the target's first layers has made of a chain, for the target to go on from.

    ids: [1, n] each; outs: of each, with the rows that leave layer `end` - 1.
    """

    end: int
    ids: list[Tensor] = field(default_factory=list)
    outs: list[Out] = field(default_factory=list)

    @property
    def n(self) -> int:
        """How many rows."""
        return sum(ids.shape[1] for ids in self.ids)

    def of(self, x: Tokens) -> bool:
        """Whether they are those of the first tokens of x; waits for the device."""
        if not 0 < self.n <= x.ids.shape[1]:
            return False
        return bool(host.number((torch.cat(self.ids, 1) == x.ids[:, : self.n]).all()))


class Scoring:
    """Target model and its state.

    Only `forward`, the two halves of a forward, and `keep` change the state. `ready` discards rows
    that parts of the target wrote in between.

    Args:
        target: the metered target.
        state: the target's state.
        text: the text that drafts continue.
        place: index of the sequence in its batch.
        checks: Checks of the drafts. None if only `forward` is called.
        seen: Record of what was scored.
    """

    def __init__(
        self,
        target: Metered,
        state: State,
        text: Text,
        place: int = 0,
        checks: DraftChecks | None = None,
        seen: SeenSteps | None = None,
    ) -> None:
        self.target, self.state = target, state
        self._place, self._text = place, text
        self._checks, self._seen = checks, seen
        self._tape: FeatureCache | None = None
        self.beside: Beside | None = None
        self._halted: Halted | None = None  # the forward in progress
        self._again = 0  # committed tokens before the root that the last forward read again
        self._root: Out | None = None  # output at the root if a separate forward computed it
        self._lent: tuple[int, int] | None = None  # position and rows before partial forwards wrote
        self._begun: Begun | None = None  # state of a partial forward that can continue

    def score(self, draft: Draft, proposed: int | None = None) -> Tensor:
        """Check a draft and run the target over it; see `Session.score`."""
        x = self._checked(draft, self.ready(keep=True), proposed)
        return self.forward(x, draft, "all")

    def score_part(self, draft: Draft) -> ModelInput:
        """Check a draft and return the input to score it in a shared batch forward.

        The result of the forward goes to `take`.
        """
        return self.part(self._checked(draft, self.ready()), draft, "all")

    def begin_score(self, draft: Draft, layer: int, *, early: bool) -> Halted:
        """Check a draft and run the target's first layers over it; see `Session.begin_score`."""
        x = self._checked(draft, self.ready())
        if not self.state.by_row:
            raise ChainsOnly(
                f"{self.target.name} cannot be halted: its state only knows the ends of forwards",
                "choose a method that runs whole forwards of the target",
            )
        self._halted = Halted(self.target, self.state, self.layers, self._over)
        positions, mask = self._shape(draft)
        self._halted.begin(x, layer, early=early, positions=positions, mask=mask)
        return self._halted

    def prefill(self) -> Tensor:
        """Run the rest of the prompt through the target. Return the logits [1, V] after its end."""
        x = self._text.since(self.ready())
        logits = self.forward(x, None, "last")
        self.keep(range(x.ids.shape[1]))
        return logits

    @property
    def unread(self) -> int:
        """Tokens of the prompt that the target has not read."""
        return self._text.prompt_length - self.ready()

    def prompt_part(self, n: int) -> ModelInput:
        """Return the input of a shared batch forward over the next n prompt tokens."""
        x = Tokens(self._text.since(self.ready()).ids[:, :n])
        return self.part(x, None, "last" if n == self.unread else None)._replace(prompt=True)

    def take_prompt(self, out: Out, n: int) -> Tensor | None:
        """Keep the result of `prompt_part`. Return logits [1, V] at the prompt's end, else None."""
        if out.logits is None:
            self.read(out)
            return None
        logits = self.take(out)
        self.keep(range(n))
        return logits

    def _checked(self, draft: Draft, length: int, proposed: int | None = None) -> Tokens:
        """Return the pending tokens followed by a draft. Raise MethodFault if it is malformed."""
        assert self._checks is not None
        assert self._seen is not None
        self._checks.check(draft)
        self._seen.scored(draft, proposed)
        return self._checks.rooted(draft, length)

    def lend(self, begun: Begun | None) -> Begun | None:
        """Have a part of the target write to the state; returns where it keeps what it makes, if
        the target can go on from that.

        Raises:
            MethodFault: a forward of the target is halted.
        """
        if self._halted is not None:
            raise MethodFault(
                "a part of the target drafts before `begin_score`, or after its `end`"
            )
        if self._lent is None:
            self._lent, self._begun = (self.state.position(), self.state.length()), begun
            if begun is not None:
                begun.ids.clear()
                begun.outs.clear()
        elif begun is not self._begun:
            self._begun = None  # another part's rows are among its own
        return self._begun

    def ready(self, *, keep: bool = False) -> int:
        """Forget what parts of the target wrote; returns how many tokens of the text were fed.

        Args:
            keep: whether `forward` comes next, which may go on from it.
        Raises:
            MethodFault: rows of the text are gone too.
        """
        if self._lent is None:
            return self.state.position()
        position, rows = self._lent
        beyond = [self.state.length(0, at) - rows for at in range(self.target.n_layers)]
        if min(beyond) < 0:
            raise MethodFault(
                "the target's state has lost rows of the committed text",
                "roll a part of the target back to the length it began at, and no further",
            )
        begun = self._begun if keep else None
        due = [begun.n if begun and at < begun.end else 0 for at in range(len(beyond))]
        if begun is None or not begun.n or beyond != due:
            self.state.rollback(0, position)
            self._lent = self._begun = None
        return position

    def tap(self, taps: Sequence[int]) -> None:
        """See `Session.tap`."""
        self._tape = FeatureCache(self.target.decoder, taps)

    def look_ahead(self, head: MeteredHead) -> Beside:
        """See `Session.reserve`."""
        if not self.state.by_row:
            raise ChainsOnly(
                f"{self.target.name} cannot look ahead: its state only knows the ends of forwards",
                "choose a method that runs whole forwards of the target",
            )
        self.beside = Beside(self.target, head)
        return self.beside

    def features(self, tokens: Tokens) -> Features:
        """Tokens beside the features that are kept; see `Session.unread`."""
        return Features(tokens.ids, self._taped.read()[None])

    def newest(self, n: int) -> Tensor:
        """See `Session.features`."""
        return self._taped.last(n)

    @property
    def read_last(self) -> Tensor | None:
        """The features [n, width] of the last forward's rows; None where none are kept."""
        return None if self._tape is None else self._tape.latest

    @property
    def _taped(self) -> FeatureCache:
        if self._tape is None:
            raise MethodFault("no features are kept: `session.tap` in `start` says of which layers")
        return self._tape

    def forward(self, x: Tokens, draft: Draft | None, logits_at: LogitsAt) -> Tensor:
        """Logits [n, V] of a forward over the root and a draft, or over the prompt."""
        if draft is not None and not self.state.by_row:
            return self.take(self.target.execute(self._apart(x, draft)._replace(taps=self.layers)))
        usual = draft is None or draft.parents is None
        if self.beside is not None and draft is not None and not draft.parents:
            draft = replace(draft, parents=tuple(range(-1, draft.nodes - 1)))
        model_input = self._input(x, draft, logits_at)
        if self._lent is not None:
            begun, (position, _) = self._begun, self._lent
            self._lent = self._begun = None
            if begun is not None and usual and begun.of(x):
                return self._go_on(begun, x)
            self.state.rollback(0, position)
        if self.beside is None:
            return self.take(self.target.execute(model_input))
        run = self.beside.prefill if draft is None else self.beside.forward
        return self.take(run(model_input))

    def _go_on(self, begun: Begun, x: Tokens) -> Tensor:
        """Logits [n, V] at all rows of x, whose first ones have gone through the first layers."""
        outs, unread = begun.outs, x.ids[:, begun.n :]
        taps = [at for at in self.layers if at < begun.end]
        if unread.shape[1]:
            first = ModelInput(
                Tokens(unread), self.state, logits_at=None, layers=(0, begun.end), taps=taps
            )
            outs = [*outs, self.target.execute(first)]
        rest = ModelInput(
            Hidden(torch.cat([each.hidden for each in outs], 1)),
            self.state,
            logits_at="all",
            layers=(begun.end, self.target.n_layers),
            taps=[at for at in self.layers if at >= begun.end],
        )
        out = self.target.execute(rest)
        early = {at: torch.cat([each.taps[at] for each in outs], 1) for at in taps}
        return self.take(Out(out.logits, out.hidden, early | dict(out.taps)))

    def part(self, x: Tokens, draft: Draft | None, logits_at: LogitsAt) -> ModelInput:
        """What `forward` would compute, for a forward that several sequences share; what comes of
        it goes to `take`."""
        if self.beside is not None:
            raise MethodFault(
                "rows that look ahead are of one request's forward: no batch shares it"
            )
        if draft is not None and not self.state.by_row:
            return self._apart(x, draft)
        return self._input(x, draft, logits_at)

    def _apart(self, x: Tokens, draft: Draft) -> ModelInput:
        """The draft's rows alone, for a state that can go back to the ends of forwards only: what
        is committed and not in it, the root included, is read by a forward before."""
        if draft.parents not in (None, tuple(range(-1, draft.nodes - 1))):
            raise trees_fault(self.target.decoder)
        known = x.ids.shape[1] - draft.nodes
        self._again = known - 1
        if not draft.nodes:
            return ModelInput(x, self.state, place=self._place)
        root = ModelInput(Tokens(x.ids[:, :known]), self.state, taps=self.layers)
        self._root = self.target.execute(root)
        return ModelInput(Tokens(x.ids[:, known:]), self.state, logits_at="all", place=self._place)

    @property
    def layers(self) -> Sequence[int]:
        """The layers whose outgoing rows `take` needs."""
        return () if self._tape is None else self._tape.layers

    def read(self, out: Out) -> None:
        """Keep rows and features of a part of the prompt behind which more of it follows."""
        if self._tape is not None:
            self._tape.write(out)
        self.keep(range(out.hidden.shape[1]))

    def take(self, out: Out) -> Tensor:
        """Logits [n, V] of a forward, whose features are kept."""
        if self._again or self._root is not None:
            out, self._root = _from_root(self._root, out), None
        if self._tape is not None:
            self._tape.write(out)
        return _logits(out)

    def _over(self, out: Out | None) -> None:
        """A halted forward has come to its end, or was left before that."""
        self._halted = None
        if self._tape is None:
            return
        if out is None:
            raise MethodFault(
                "features are kept of whole forwards, and this one ends before its last layer",
                "leave out `session.tap`",
            )
        self._tape.write(out)

    def keep(self, path: Sequence[int]) -> None:
        """Keep, of the last forward, the rows at `path`, counted from the root's."""
        self._lent = self._begun = None  # what was written since goes as well
        if self._again:
            again, self._again = self._again, 0
            self.state.commit(0, (*range(again), *(again + row for row in path)))
        else:
            self.state.commit(0, path)
        if self._tape is not None:
            self._tape.keep(path)
        if self.beside is not None:
            self.beside.keep(path)

    def _input(self, x: Tokens, draft: Draft | None, logits_at: LogitsAt) -> ModelInput:
        """Return the input of a forward over the root and a draft, or over the prompt."""
        positions, mask = (None, None) if draft is None else self._shape(draft)
        return ModelInput(x, self.state, positions, mask, logits_at, self._place, taps=self.layers)

    def _shape(self, draft: Draft) -> tuple[Tensor | None, Tensor | None]:
        """Return the positions [1, n] and the mask [n, n] of a tree, or None for a chain."""
        if draft.parents is None:
            return None, None
        mask, depths = rows_of(draft.parents, self.target.device)
        return (depths + (len(self._text.tokens) - 1))[None], mask


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
