"""Tree drafting level by level, with one forward of a draft model or head per level.

Each draft node attends to the committed text, to its ancestors and to itself. The position of a
node is the text length plus its depth. The model's state first contains the rows of the committed
text. Then it contains the rows of the nodes, in the order in which the model processed them. The
model does not process the deepest level of a tree, because that level has no children.
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
    """Tree drafting with one model and its state, over all steps of a request.

    In each step, call `begin` first. Then call `feed` for each further level, or `extend` for nodes
    at any depth. After verification, call `keep` or `drop`. None of these methods needs a device
    sync.

    Args:
        session: Session of the request.
        model: A draft model or a head.
        state: A state of the model, with capacity for the text and the nodes of a step. No other
            object may write to this state.

    Attributes:
        fed: Number of nodes that the model has processed since `begin`.
    """

    def __init__(self, session: Session, model: Metered, state: State) -> None:
        self._session, self.model, self.state = session, model, state
        self.fed = self._depth = 0
        # Length of the text, and its last token's position, at `begin`.
        self._text_length = self._root_position = 0
        # For each of the n nodes of the last level: which of the processed nodes it attends to.
        # This is one byte string per node, with a byte for each processed node, or a bool tensor
        # [n, number of processed nodes].
        self._visible: list[bytes] | Tensor = [b""]
        # Features for a head's next forward: of the root, or of a level.
        self._features: Tensor | None = None
        self._reset()

    @classmethod
    def of_head(
        cls, session: Session, artifact: ArtifactSpec, *, nodes: int, fed: int | None = None
    ) -> Self:
        """Create the levels of a draft head, and capture the target features that the head needs.

        Call it in `start`.

        Args:
            nodes: Maximum number of nodes in a tree.
            fed: Maximum number of nodes that the head processes in a step. None means all nodes.
        """
        session.reserve(nodes)
        head = session.artifact(artifact)
        session.capture_layers(head.captured_layers)
        return cls(session, head, session.new_state(head, slack=nodes if fed is None else fed))

    @classmethod
    def of_draft(cls, session: Session, *, nodes: int, fed: int | None = None) -> Self:
        """Create the levels of the run's draft model, and prefill the draft model.

        Call it in `start`. The arguments are the same as those of `of_head`.
        """
        session.reserve(nodes)
        model = session.draft()
        levels = cls(session, model, session.new_state(model, slack=nodes if fed is None else fed))
        levels.begin(session.pending_tokens(0))
        return levels

    def begin(self, x: Tokens | Features) -> ModelOutput:
        """Process the tokens or features that the model's state does not have yet. Keep their rows.

        Args:
            x: `session.pending_tokens(state.length())` for a draft model, or
                `session.pending_features(state.length())` for a head. The first call processes the
                prompt.

        Returns:
            Logits [1, 1, V] after the last token. The children of the root are chosen from these
            logits.
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
        """Run one forward over n nodes of the next tree level.

        Args:
            tokens: Ids of the nodes, as a list or an int64 tensor [n] on the device.
            parents: Parent of each node, as an index among the nodes of the last `feed`. At the
                first level all are 0, which means the root. A list or an int64 tensor [n] on the
                device. The first level needs a list. After a level with a tensor, all later levels
                need a tensor.
            rows: Target features [n, w] of the parents, for heads. If None, the head uses its own
                hidden states of the parents (`ModelOutput.hidden`).

        Returns:
            Logits [1, n, V], from which the children of the nodes are chosen.
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
            assert not isinstance(self._visible, Tensor), "parents must be a tensor"
            blank = bytes(n)
            self._visible = [
                self._visible[parent] + blank[:at] + b"\1" + blank[at + 1 :]
                for at, parent in enumerate(parents)
            ]
        if self.fed == self._depth:  # a chain so far: default mask and positions
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
        """Run one forward over n nodes at any depth of the tree.

        Draft heads do not support it. `feed` must not be called in the same step.

        Args:
            tokens: Ids of the n nodes.
            parents: Parent of each node, as an index among the nodes of earlier forwards. `ROOT`
                means the root.

        Returns:
            Logits [1, n, V], from which the children of the nodes are chosen.
        """
        assert self._features is None, "`extend` does not support heads"
        assert not self._depth, "`extend` after `feed`"
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
        """Keep the rows of accepted nodes. Call it after the session has committed their tokens.

        The row of the last committed token is not kept, because this token is the root of the next
        tree.

        Args:
            path: Accepted nodes in order, starting with the child of the root, as indices among the
                processed nodes. The first node that was not processed ends the path.
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
        """Drop the rows of all draft nodes. A head later recomputes rows from the target's
        features.
        """
        self.keep(())

    def _visibility_mask(self) -> Tensor:
        """Return a bool mask [n, fed]: which processed nodes each node of the last level attends
        to.
        """
        if isinstance(self._visible, Tensor):
            return self._visible
        return _mask(tuple(self._visible), self._session.device)

    def _reset(self) -> None:
        """Drop the rows of all nodes. The last remaining row belongs to the root or to the token
        before.
        """
        self._text_length = len(self._session.tokens())
        self._root_position = self.state.position() - 1
        self._depth = self.fed = 0
        self._visible, self._features = [b""], None
        self._paths: list[bytes] = []  # nodes that each node of `extend` attends to, with itself


class HeadLevels:
    """Tree drafting with a `SequentialHead`. It works like `Levels`, but without a model state.

    Args:
        session: Session of the request, which captures the target's features.
        head: The draft head, with metered calls.
    """

    def __init__(self, session: Session, head: MeteredHead) -> None:
        self._session, self._head = session, head
        self._depth, self._features = 0, torch.empty(0)

    def begin(self) -> ModelOutput:
        """Return the logits [1, 1, V] after the last committed token.

        The head computes them from the newest target features.
        """
        self._depth, self._features = 0, self._session.features()
        return self.feed(self._session.tokens()[-1:], (0,))

    def feed(self, tokens: Sequence[int] | Tensor, parents: Sequence[int] | Tensor) -> ModelOutput:
        """Run the head on n nodes of the next tree level.

        The arguments and the result are the same as in `Levels.feed`.
        """
        device = self._session.device
        ids = tokens if isinstance(tokens, Tensor) else host.ids(tokens, device)
        rows = (
            self._features.index_select(0, _parent_indices(parents, device))
            if self._depth
            else self._features
        )
        out = self._head(rows, ids, self._depth)
        self._depth, self._features = self._depth + 1, out.rows
        return ModelOutput(out.logits[None], out.rows[None])


# The results of the following functions are cached tensors. Callers must not change them.


def _parent_indices(parents: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """Return the parent indices as an int64 tensor [n]."""
    return parents if isinstance(parents, Tensor) else host.cached_ids(tuple(parents), device)


@lru_cache(maxsize=4096)
def _positions(n: int, position: int, device: torch.device) -> Tensor:
    """Return an int64 tensor [1, n] whose elements all have the given position."""
    return torch.full((1, n), position, device=device)


@lru_cache(maxsize=1024)
def _mask(seen: tuple[bytes, ...], device: torch.device) -> Tensor:
    """Return the bool attention mask [n, fed] from the byte strings of n nodes."""
    flags = bytearray(b"".join(seen))
    return host.send(torch.frombuffer(flags, dtype=torch.bool).view(len(seen), -1), device)
