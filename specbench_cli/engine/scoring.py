"""The target's forwards: over the prompt, over the last committed token and a draft, and those of
its parts that draft for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor

from specbench_cli.engine import host
from specbench_cli.engine.models.decoder import ChainsOnly, LogitsAt, ModelInput, State, no_trees
from specbench_cli.engine.models.head import Tape
from specbench_cli.engine.models.meter import Meter, Metered, MeteredHead
from specbench_cli.engine.sequence import Text
from specbench_cli.engine.types import (
    SUBLAYERS,
    Draft,
    Features,
    Forward,
    Hidden,
    Input,
    Out,
    Skip,
    Tokens,
    skipped,
)
from specbench_cli.engine.verify.tree import rows_of
from specbench_cli.errors import MethodFault

# ---- a forward that halts -----------------------------------------------------------------------


class Halted:
    """One forward over one sequence that halts behind layers, and goes on or ends there.

    Number for number what a whole forward gives, if all layers run. Rows that earlier forwards left
    out of a layer (`leave`) are not seen there.

    Args:
        state: of the target; holds the new rows of the layers alone that have run.
        taps: layers whose outgoing rows are wanted.
        over: called with what a whole forward gives once it is one, with None once it is left.

    Attributes:
        layer: how many layers have run.

    Raises:
        MethodFault: the target has no such layer, or it has run (`begin`, `to`); or the forward is
            over (`end`, `leave`).
    """

    def __init__(
        self,
        target: Metered,
        state: State,
        taps: Sequence[int] = (),
        over: Callable[[Out | None], None] = lambda _: None,
    ) -> None:
        self._target, self._state, self._taps = target, state, taps
        self.layer, self._over = 0, over
        self._early: Tensor | None = None
        self._last: int = target.n_layers
        self._how: dict[str, Any] = {}
        self._out: Out | None = None
        self._looked: Forward | None = None

    def begin(self, x: Tokens, layer: int, *, early: bool = True, **how: Any) -> None:
        """Run the first layers over new rows [1, n].

        Args:
            early: whether early logits are wanted, as a part of this forward; there are none where
                earlier rows were left out of these layers.
            how: positions and mask, as `Decoder.forward` takes them.
        """
        self._how = how
        self._check(layer)
        have = self._state.length
        even = next((at for at in range(1, layer) if have(0, at) != have()), layer)
        if even == self._last:
            how = how | {"logits_at": "all"}
        else:
            early = early and even == layer
            how = how | {"layers": (0, even), "logits_at": "all" if early else None, "early": early}
        taps = [at for at in self._taps if at < even]
        self._out = self._target.forward(x, self._state, taps=taps, **how)
        self.layer = even
        self._early = None if self._out.logits is None else self._out.logits[0]
        if even < layer:
            self.to(layer)

    def to(self, layer: int) -> None:
        """Go on through the layers up to the `layer`th; through those that hold as many rows each
        at once."""
        self._check(layer)
        low, have = self.layer, self._state.length
        for _, same in groupby(range(low, layer), key=lambda at: have(0, at)):
            span = list(same)
            rest = self._target.forward(
                Hidden(self._ran.hidden),
                self._state,
                layers=(span[0], span[-1] + 1),
                taps=[at for at in self._taps if at in span],
                logits_at="all" if span[-1] + 1 == self._last else None,
                **self._how_at(span[0]),
            )
            self._out = Out(rest.logits, rest.hidden, {**self._ran.taps, **rest.taps})
        self.layer = layer

    def end(self) -> Out:
        """Run the layers that are left: what a whole forward gives, with logits at all rows."""
        if self.layer < self._last:
            self.to(self._last)
        self._end(out := self._ran)
        return out

    @property
    def early(self) -> Tensor:
        """Logits [n, V] behind the first layers, where `begin` was to have them."""
        assert self._early is not None, "ask for them in `begin`"
        return self._early

    def says(self, ids: Tensor) -> Tensor:
        """Early logits [n, k] of ids [k] alone: a look at all of them where the target cannot say
        some, which is metered then."""
        rows = self._target.norm(self._ran.hidden[0])
        some: Tensor | None = self._target.said(rows, ids)
        return self.look()[:, ids] if some is None else some

    def look(self) -> Tensor:
        """Early logits [n, V], as if the layers that have run were all."""
        rows, self._looked = self._target.exits_of(self._ran.hidden[0])
        return rows

    def leave(self, *, copy: bool) -> None:
        """End here: what a look said is what the forward says, and the layers above do not run.

        Args:
            copy: whether these take keys and values of the rows as they are; else they never have
                any of these places.
        """
        rows, above = self._ran.hidden, range(self.layer, self._last)
        if self._looked is None:
            raise MethodFault("a forward was left that said nothing", "`look` at what it says")
        # The output matrix was the end of a verification, not an aside.
        self._looked.role, self._looked.layers = "verify", (self._last, self._last)
        if copy and above:
            self._target.remember(rows, self._state, above, self._positions)
        else:
            self._state.leave_out(0, above, rows.shape[1])
        self._end(None)

    def _end(self, out: Out | None) -> None:
        self._out = None
        self._over(out)

    @property
    def _ran(self) -> Out:
        if self._out is None:
            raise MethodFault(
                f"a forward of {self._target.name} that has ended, or was left, does not go on"
            )
        return self._out

    @property
    def _positions(self) -> Tensor:
        """[1, n]."""
        if "positions" in self._how:
            return cast(Tensor, self._how["positions"])
        end, n = self._state.position(), self._ran.hidden.shape[1]
        return torch.arange(end - n, end, device=self._ran.hidden.device)[None]

    def _how_at(self, layer: int) -> dict[str, Any]:
        """Positions and mask at a layer, whose rows do not tell them where some were left out."""
        n = self._ran.hidden.shape[1]
        if self._state.length(0, layer) + n == self._state.length():
            return self._how
        return {"positions": self._positions} | self._how

    def _check(self, layer: int) -> None:
        if not 1 <= layer <= self._last:
            raise MethodFault(
                f"{self._target.name} has no exit behind layer {layer}: it has {self._last} layers",
                f"choose one of 1 to {self._last}",
            )
        if layer < self.layer:
            raise MethodFault(
                f"a forward of {self._target.name} that has run {self.layer} layers does not go"
                f" back to layer {layer}"
            )


# ---- parts of the target that draft -------------------------------------------------------------


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


class Partial(Metered):
    """Some of the target as a draft model: its logits are read as if those layers were all.

    On the target's own state (`Session.state`) it drafts behind the committed text, whose rows it
    shares: what it writes is forgotten before the target scores. On a state of its own it is a
    draft model like any other. One that begins behind the first layer reads `Hidden` rows.

    Args:
        scoring: the target's.
        layers: half-open range of those that run; None for all.
        skip: what is passed over, see `Decoder.forward`.
        keep: whether the target goes on from what it has made of the tokens that are scored, where
            it is a range of first layers.

    Attributes:
        attending: the layers whose attention runs, and which so hold rows.

    Raises:
        MethodFault: the target has no such layers.
        ValueError: the target cannot pass over single sublayers.
    """

    def __init__(
        self,
        scoring: Scoring,
        meter: Meter,
        *,
        layers: tuple[int, int] | None,
        skip: Skip,
        keep: bool = False,
        place: int | None = None,
    ) -> None:
        decoder = scoring.target.decoder
        super().__init__(decoder, meter, role="draft", place=place)
        low, high = layers or (0, decoder.n_layers)
        span, over = range(low, high), skipped(skip)
        if not 0 <= low < high <= decoder.n_layers:
            raise MethodFault(
                f"{decoder.name} has no layers {low} to {high}: it has {decoder.n_layers}",
                f"choose a range within (0, {decoder.n_layers})",
            )
        for at, kind in sorted(over):
            if at not in span or kind not in SUBLAYERS:
                raise MethodFault(
                    f"{(at, kind)} is no sublayer of the layers {low} to {high - 1}",
                    "pass over a layer by its number, a sublayer by (number, 'attention') or 'mlp'",
                )
        if keep and (low or over):
            raise MethodFault("the target goes on only from its first layers, none passed over")
        self._scoring = scoring
        self._how: dict[str, Any] = {"skip": skip, "early": high < decoder.n_layers}
        if (low, high) != (0, decoder.n_layers):
            self._how["layers"] = (low, high)
        self.attending = tuple(at for at in span if (at, "attention") not in over)
        self._begun = Begun(high) if keep and high < decoder.n_layers else None
        self.portion = decoder.share(self._how.get("layers"), skip)

    def forward(self, x: Input, state: State, **how: Any) -> Out:
        """See `Metered.forward`; which layers run is settled."""
        if "role" not in how:
            read = not self.attending or state.length(0, self.attending[0])
            how["role"] = "draft" if read else "prefill"
        if state is not self._scoring.state:
            return super().forward(x, state, **self._how, **how)
        begun = self._scoring.lend(self._begun)
        if begun is not None:
            how["taps"] = [at for at in self._scoring.layers if at < begun.end]
        out = super().forward(x, state, **self._how, **how)
        if begun is not None and isinstance(x, Tokens) and not how.keys() & {"mask", "positions"}:
            begun.ids.append(x.ids)
            begun.outs.append(out)
        return out

    def reread(self, ids: Sequence[int], first: int) -> Tensor:
        """Read committed tokens once more, on the target's own rows of the text before them.

        What is written is forgotten at once; the forward counts as an auxiliary one.

        Args:
            ids: n of the text's, the first of them at position `first`.
        Returns:
            logits [n, V] after each.
        """
        state, n, device = self._scoring.state, len(ids), self._scoring.target.device
        length, written = state.position(), state.length()
        sight = torch.ones(n, n, dtype=torch.bool, device=device).tril()
        hidden = torch.zeros(n, length - first, dtype=torch.bool, device=device)
        out = self.forward(
            Tokens(host.ids([ids], device)),
            state,
            role="aux",
            positions=torch.arange(first, first + n, device=device)[None],
            mask=torch.cat((hidden, sight), 1),
            logits_at="all",
        )
        state.rollback(0, length)
        assert state.length() == written
        return out.rows

    def forward_batch(self, parts: Sequence[ModelInput], *, taps: Sequence[int] = ()) -> list[Out]:
        """None: a part of the target drafts for one sequence at a time."""
        raise MethodFault(
            "a part of the target drafts for one sequence at a time: each has a state of its own",
            "call each session's own `partial`",
        )


# ---- rows beside a draft's own ------------------------------------------------------------------


class Beside:
    """A `LookAhead`'s rows in the target's forwards, and what they said behind the text.

    A forward that carries them runs in two parts: the layers below without them, the others with
    them as further branches.

    Args:
        head: behind the meter.
    """

    def __init__(self, target: Metered, head: MeteredHead) -> None:
        self._target, self._head = target, head
        self._levels: int = head.sizes["levels"]
        self._layer: int = head.layer
        self._above = (self._layer, target.n_layers)
        self._written: Tensor | None = None  # [n, levels, V], of a prompt behind its last row alone
        self._newest: Tensor | None = None

    def room(self, nodes: int) -> int:
        """Rows of a state that a forward over the root and so many nodes may take."""
        return nodes + (nodes + 1) * self._levels

    def prefill(self, x: Tokens, state: State, *, taps: Sequence[int]) -> Out:
        """A whole forward over the prompt, and one of the head's rows behind it, which are
        forgotten."""
        tapped = {*taps, *self._head.taps}
        out = self._target.forward(x, state, taps=sorted(tapped))
        last = x.ids[0, -1:]
        rows = out.taps[self._layer - 1][0, -1:] if self._layer else self._target.embed(last)
        position = state.position()
        behind = torch.arange(position, position + self._levels, device=x.ids.device)
        said = self._target.forward(
            Hidden(self._head(rows)),
            state,
            role="draft",
            layers=self._above,
            positions=behind[None],
            logits_at="all",
        )
        state.rollback(0, position)
        self._written = cast(Tensor, said.logits)
        return out

    def forward(
        self, x: Tokens, state: State, positions: Tensor, mask: Tensor, *, taps: Sequence[int]
    ) -> Out:
        """A forward over the root and a draft, with logits of all, the head's rows behind each.

        Args:
            positions: [1, n]; mask: [n, n].
        """
        n, layer = x.ids.shape[1], self._layer
        if layer:
            early = [at for at in taps if at < layer]
            first = self._target.forward(
                x,
                state,
                layers=(0, layer),
                positions=positions,
                mask=mask,
                logits_at=None,
                taps=early,
            )
            rows, below = first.hidden, dict(first.taps)
        else:
            rows, below = self._target.embed(x.ids), {}
        made = self._head(rows[0]).flatten(0, 1)
        sight, places = branches(mask, positions[0], self._levels)
        out = self._target.forward(
            Hidden(torch.cat((rows, made[None]), 1)),
            state,
            layers=self._above,
            positions=places[None],
            mask=sight,
            logits_at="all",
            taps=[at for at in taps if at >= layer],
        )
        logits = cast(Tensor, out.logits)
        self._written = logits[0, n:].unflatten(0, (n, self._levels))
        above = {at: left[:, :n] for at, left in out.taps.items()}
        return Out(logits[:, :n], out.hidden[:, :n], below | above)

    def keep(self, path: Sequence[int]) -> None:
        """Keep what was said behind the last row of `path`."""
        assert self._written is not None
        self._newest = self._written[path[-1] if len(self._written) > 1 else 0]

    def newest(self) -> Tensor:
        """What the rows behind the row that chose the last committed token said: logits [levels,
        V], of level k about the token k + 1 places behind that token.

        Raises:
            MethodFault: there was no prefill.
        """
        if self._newest is None:
            raise MethodFault("nothing was foreseen before the prefill", "ask in `propose`")
        return self._newest


def branches(mask: Tensor, positions: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Sight and positions of n rows, and of chains of k rows behind each of them.

    Args:
        mask: [n, n] bool, which row sees which.
        positions: [n].
    Returns:
        (mask [n + n k, n + n k], positions [n + n k]), the chains one after another.
    """
    n, device = len(mask), mask.device
    sight = mask.new_zeros(n + n * k, n + n * k)
    sight[:n, :n] = mask
    sight[n:, :n] = mask.repeat_interleave(k, 0)
    chain = torch.ones(k, k, dtype=torch.bool, device=device).tril()
    sight[n:, n:] = torch.block_diag(*[chain] * n)
    behind = positions[:, None] + torch.arange(1, k + 1, device=device)
    return sight, torch.cat((positions, behind.flatten()))


# ---- whole forwards -----------------------------------------------------------------------------


class Scoring:
    """The target and its state, which only `forward`, the halves of one, and `keep` change; what
    parts of the target write to it in between is forgotten (`ready`).

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
        self.beside: Beside | None = None
        self._halted: Halted | None = None  # a forward that is
        self._again = 0  # committed tokens that the last forward read once more, before the root
        self._root: Out | None = None  # what it said there, where it is apart from the draft's
        self._lent: tuple[int, int] | None = None  # position and rows, before parts wrote
        self._begun: Begun | None = None  # what the part that wrote can be gone on from

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
        self._tape = Tape(self.target.decoder, taps)

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
        return None if self._tape is None else self._tape.written

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
        if self._lent is not None:
            begun, (position, _) = self._begun, self._lent
            self._lent = self._begun = None
            if begun is not None and not how and begun.of(x):
                return self._go_on(begun, x)
            self.state.rollback(0, position)
        if self.beside is not None:
            if draft is None:
                return self.take(self.beside.prefill(x, self.state, taps=self.layers))
            parents = draft.parents or tuple(range(-1, draft.nodes - 1))
            whole = self._shape(replace(draft, parents=parents))
            return self.take(self.beside.forward(x, self.state, **whole, taps=self.layers))
        if self._tape is None:
            return _logits(self.target.forward(x, self.state, logits_at=logits_at, **how))
        layers = self._tape.layers
        return self.take(
            self.target.forward(x, self.state, taps=layers, logits_at=logits_at, **how)
        )

    def _go_on(self, begun: Begun, x: Tokens) -> Tensor:
        """Logits [n, V] at all rows of x, whose first ones have gone through the first layers."""
        outs, unread = begun.outs, x.ids[:, begun.n :]
        taps = [at for at in self.layers if at < begun.end]
        if unread.shape[1]:
            first, x = (0, begun.end), Tokens(unread)
            how: dict[str, Any] = {"layers": first, "logits_at": None, "taps": taps}
            outs = [*outs, self.target.forward(x, self.state, **how)]
        out = self.target.forward(
            Hidden(torch.cat([each.hidden for each in outs], 1)),
            self.state,
            layers=(begun.end, self.target.n_layers),
            logits_at="all",
            taps=[at for at in self.layers if at >= begun.end],
        )
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
        how = {} if draft is None else self._shape(draft)
        return ModelInput(x, self.state, logits_at=logits_at, place=self._place, **how)

    def _apart(self, x: Tokens, draft: Draft) -> ModelInput:
        """The draft's rows alone, for a state that can go back to the ends of forwards only: what
        is committed and not in it, the root included, is read by a forward before."""
        if draft.parents not in (None, tuple(range(-1, draft.nodes - 1))):
            raise no_trees(self.target.decoder)
        known = x.ids.shape[1] - draft.nodes
        self._again = known - 1
        if not draft.nodes:
            return ModelInput(x, self.state, place=self._place)
        self._root = self.target.forward(Tokens(x.ids[:, :known]), self.state, taps=self.layers)
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

    def begin(self, x: Tokens, draft: Draft, layer: int, *, early: bool) -> Halted:
        """See `Session.begin_score`."""
        if not self.state.by_row:
            raise ChainsOnly(
                f"{self.target.name} cannot be halted: its state only knows the ends of forwards",
                "choose a method that runs whole forwards of the target",
            )
        self._halted = Halted(self.target, self.state, self.layers, self._over)
        self._halted.begin(x, layer, early=early, **self._shape(draft))
        return self._halted

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
