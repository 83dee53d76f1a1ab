"""Drafting level by level: one forward for all nodes of a tree's level, whoever drafts.

Each node sees the committed rows, its own ancestors and itself, at the position it has on its own
path. The rows of a state are those of the committed text, then those of the nodes in the order in
which they were fed; a tree's deepest level is never fed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Self

import torch
from torch import Tensor

from specbench_cli.engine import host
from specbench_cli.engine.models.artifact import ArtifactSpec
from specbench_cli.engine.models.decoder import State
from specbench_cli.engine.models.meter import Metered, MeteredHead
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Features, ModelOutput, Tokens


class Levels:
    """A model's state while a tree is drafted with it, a step of decoding after another.

    A step: `begin`, then `feed` for each further level, or `extend` wherever the tree grows, then,
    once the target has decided, `keep` or `drop`. Nothing here waits for the device.

    Args:
        session: the request that is drafted for.
        model: a draft model, or a head.
        state: a state of it with room for the nodes fed in a step beyond the text; `Levels` alone
            writes to it.

    Attributes:
        fed: nodes fed since `begin`.
    """

    def __init__(self, session: Session, model: Metered, state: State) -> None:
        self._session, self.model, self.state = session, model, state
        self.fed = self._depth = 0
        self._text_length = self._root_position = (
            0  # length of the text, and its last token's position, at `begin`
        )
        # What each node of the last level sees of those fed: a byte a node, or [n, fed] bool.
        self._visible: list[bytes] | Tensor = [b""]
        self._features: Tensor | None = (
            None  # what a head's last forward left: the root's, a level's
        )
        self._reset()

    @classmethod
    def of_head(
        cls, session: Session, artifact: ArtifactSpec, *, nodes: int, fed: int | None = None
    ) -> Self:
        """Return the levels of a head, in `start`. The target keeps what the head reads.

        Args:
            nodes: Maximum size of a tree.
            fed: Maximum number of nodes that are fed in a step. None means all.
        """
        session.reserve(nodes)
        head = session.artifact(artifact)
        session.capture_layers(head.taps)
        return cls(session, head, session.new_state(head, slack=nodes if fed is None else fed))

    @classmethod
    def of_draft(cls, session: Session, *, nodes: int, fed: int | None = None) -> Self:
        """Return the levels of the run's draft model, in `start`, and prefill it; see `of_head`."""
        session.reserve(nodes)
        model = session.draft()
        levels = cls(session, model, session.new_state(model, slack=nodes if fed is None else fed))
        levels.begin(session.pending_tokens(0))
        return levels

    def begin(self, x: Tokens | Features) -> ModelOutput:
        """Feed committed tokens that the state has not seen, and keep their rows.

        Args:
            x: `session.pending_tokens(state.length())`, or a head's
                `session.pending_features(state.length())`; the prompt, to begin with.
        Returns:
            logits [1, 1, V] after the last of them: the root's, from which its children come.
        """
        out = self.model.forward(x, self.state)
        self.state.commit(0, range(x.ids.shape[1]))
        self._reset()
        self._features = out.hidden[0, -1:] if isinstance(x, Features) else None
        return out

    def feed(
        self,
        tokens: Sequence[int] | Tensor,
        parents: Sequence[int] | Tensor,
        rows: Tensor | None = None,
    ) -> ModelOutput:
        """One forward over n nodes of the next level.

        Args:
            tokens: n ids; [n] int64 where only the device knows them.
            parents: each one's parent by its place in the last `feed`; the first level's parent is
                the root, and 0. [n] int64 where only the device knows them: never of the first
                level, and of every one behind such a level.
            rows: [n, w], for heads: features of the parents; default: what the head's own forward
                over them left (`Out.hidden`).
        Returns:
            logits [1, n, V] of the nodes' children.
        """
        n, device = len(tokens), self._session.device
        ids = tokens[None] if isinstance(tokens, Tensor) else host.ids([tokens], device)
        if rows is None and self._features is not None:
            if self.fed:
                rows = self._features.index_select(0, _parent_indices(parents, device))
            else:
                rows = self._features.expand(n, -1)
        x = Tokens(ids) if rows is None else Features(ids, rows[None])
        self._depth, self.fed = self._depth + 1, self.fed + n
        if isinstance(parents, Tensor):
            seen = self._visibility_mask().index_select(0, parents)
            self._visible = torch.cat((seen, torch.eye(n, dtype=torch.bool, device=device)), 1)
        else:
            assert not isinstance(self._visible, Tensor), "their parents' places are on the device"
            blank = bytes(n)
            self._visible = [
                self._visible[parent] + blank[:at] + b"\1" + blank[at + 1 :]
                for at, parent in enumerate(parents)
            ]
        if self.fed == self._depth:  # a chain so far, as any text
            out = self.model.forward(x, self.state, logits_at="all")
        else:
            positions = _positions(n, self._root_position + self._depth, device)
            out = self.model.forward(
                x, self.state, positions=positions, mask=self._visibility_mask(), logits_at="all"
            )
        if self._features is not None:
            self._features = out.hidden[0]
        return out

    def extend(self, tokens: Sequence[int], parents: Sequence[int]) -> ModelOutput:
        """One forward over n nodes anywhere in the tree, in a step without `feed`; no head's.

        Args:
            tokens: n ids.
            parents: each one's parent by its place in the order of feeding, below those of this
                forward; `ROOT` for the root.
        Returns:
            logits [1, n, V] of the nodes' children.
        """
        assert self._features is None, "heads are fed level by level"
        assert not self._depth, "`feed` has gone level by level"
        n, device, start = len(tokens), self._session.device, self.fed
        depths = [1 + (self._paths[parent].count(1) if parent >= 0 else 0) for parent in parents]
        for at, parent in enumerate(parents):
            above = self._paths[parent] if parent >= 0 else b""
            self._paths.append(above + bytes(start + at - len(above)) + b"\1")
        self.fed += n
        return self.model.forward(
            Tokens(host.ids([tokens], device)),
            self.state,
            positions=host.ids([[self._root_position + depth for depth in depths]], device),
            mask=_mask(tuple(path.ljust(self.fed, b"\0") for path in self._paths[start:]), device),
            logits_at="all",
        )

    def keep(self, path: Iterable[int]) -> None:
        """Keep the rows of accepted nodes, once the session has committed them.

        Args:
            path: the nodes from the root's child down, by their places in the order of feeding; a
                node that was not fed ends it. Of the last committed token, which roots the next
                tree, no row is kept.
        """
        most = len(self._session.tokens()) - self._text_length - 1
        rows: list[int] = []
        for node in path:
            if not 0 <= node < self.fed or len(rows) == most:
                break
            rows.append(node)
        self.state.commit(0, rows)
        self._reset()

    def drop(self) -> None:
        """Forget all nodes: a head's rows are made anew of the target's true features."""
        self.keep(())

    def _visibility_mask(self) -> Tensor:
        """[n, fed] bool: what each node of the last level sees of those fed."""
        if isinstance(self._visible, Tensor):
            return self._visible
        return _mask(tuple(self._visible), self._session.device)

    def _reset(self) -> None:
        """No nodes: the last row that is kept is the root's, or comes before it."""
        self._text_length = len(self._session.tokens())
        self._root_position = self.state.position() - 1  # its position
        self._depth = self.fed = 0
        self._visible, self._features = [b""], None
        self._paths: list[bytes] = []  # what each node that `extend` fed sees, itself included


class HeadLevels:
    """A `SequentialHead` while a tree is drafted with it: `Levels` without a state.

    Args:
        session: the request that is drafted for, whose features are tapped.
        head: behind the meter.
    """

    def __init__(self, session: Session, head: MeteredHead) -> None:
        self._session, self._head = session, head
        self._depth, self._features = 0, torch.empty(0)

    def begin(self) -> ModelOutput:
        """Logits [1, 1, V] behind the last committed token, from the target's newest features."""
        self._depth, self._features = 0, self._session.features()
        return self.feed(self._session.tokens()[-1:], (0,))

    def feed(self, tokens: Sequence[int] | Tensor, parents: Sequence[int] | Tensor) -> ModelOutput:
        """One call over n nodes of the next level; arguments and logits as of `Levels.feed`."""
        device = self._session.device
        ids = tokens if isinstance(tokens, Tensor) else host.ids(tokens, device)
        rows = (
            self._features.index_select(0, _parent_indices(parents, device))
            if self._depth
            else self._features
        )
        said = self._head(rows, ids, self._depth)
        self._depth, self._features = self._depth + 1, said.rows
        return ModelOutput(said.logits[None], said.rows[None])


# What levels of a few nodes need comes again and again; nobody changes it.


def _parent_indices(parents: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """[n] int64."""
    return parents if isinstance(parents, Tensor) else host.cached_ids(tuple(parents), device)


@lru_cache(maxsize=4096)
def _positions(n: int, position: int, device: torch.device) -> Tensor:
    """[1, n] int64, all the same."""
    return torch.full((1, n), position, device=device)


@lru_cache(maxsize=1024)
def _mask(seen: tuple[bytes, ...], device: torch.device) -> Tensor:
    """[n, fed] bool from what each of n nodes sees."""
    cells = bytearray(b"".join(seen))
    return host.send(torch.frombuffer(cells, dtype=torch.bool).view(len(seen), -1), device)
