"""Verification of trees: which path stands, and which token follows it. Pure functions.

All walk down from the root. At a node they commit one of its children and go on there, or commit a
token of the target's own and stop. What tells them apart is how the children were chosen:

* `match`: the target has chosen its token at every node (argmax of its logits, or of log p +
  noise), as in `chain.match`; a child stands iff it holds it.
* `point_mass`: children chosen without a draw. The target draws its token; a child stands iff it
  holds it. Each child then stands with the target's probability of it, which is what rejection of
  a point mass comes to, whatever the order.
* `multi_round`: children drawn from a distribution of the draft, with or without replacement.

Every rule draws once at a node, or once for each child in a fixed order, never once for each path:
several draws at one node, the longest match kept, would favour drafted tokens.

`relaxed` walks by any of them and an accept rule beside it: at a node the child goes first that the
lossless rule takes, and where it takes none, the first in the order of tests that may pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specbench_cli.engine import host
from specbench_cli.engine.verify.chain import residual
from specbench_cli.engine.verify.random import Random
from specbench_cli.engine.verify.tree import ROOT, Tree, find_child


def remaining_distribution(q: Tensor, drawn: Sequence[int] | Tensor) -> Tensor:
    """The distribution of the next draw without replacement, in float64.

    Where nothing of q is left, all tokens not drawn yet are equally likely (as in Sequoia, Chen et
    al. 2024, arXiv:2402.12374), so that up to V children can be drawn.

    Args:
        q: [..., V], the distribution of the first draw.
        drawn: the ids of the earlier draws, [..., k] for many distributions.
    """
    at = drawn if isinstance(drawn, Tensor) else host.ids(drawn, q.device)
    left = q.double().scatter(-1, at, 0.0)
    others = torch.ones_like(left).scatter(-1, at, 0.0)
    left = torch.where(left.sum(-1, keepdim=True) > 0, left, others)
    return left / left.sum(-1, keepdim=True)


Path = tuple[int, ...]


def match(tree: Tree, tokens: Sequence[int], choices: Sequence[int]) -> Path:
    """The nodes that name the target's choices, from the root down.

    Args:
        tokens: m ids.
        choices: m + 1 ids, the target's choice at the root and at each node.
    """
    return _descend(tree, tokens, lambda row: choices[row])


def point_mass(tree: Tree, tokens: Sequence[int], p: Tensor, random: Random) -> tuple[Path, Tensor]:
    """Verification of children that were chosen without a draw, in any number and order.

    Args:
        tokens: m ids.
        p: [m + 1, V], the target's warped distribution at the root and at each node.
    Returns:
        (path, next): the nodes that stand and, as int64 scalar, the token after them.
    """
    drawn: list[Tensor] = []

    def draw(row: int) -> int:
        drawn.append(random.categorical(p[row]))
        token: int = host.number(drawn[-1])
        return token

    path = _descend(tree, tokens, draw)
    return path, drawn[-1]


def multi_round(
    tree: Tree,
    tokens: Sequence[int],
    q: Tensor,
    p: Tensor,
    random: Random,
    *,
    replacement: bool,
) -> tuple[Path, Tensor]:
    """Recursive rejection sampling: siblings are tested one after another, the first to stand wins.

    A child x drawn from d stands with probability min(1, r(x) / d(x)), r being the target's
    distribution at its parent; if it does not, r becomes norm(max(r - d, 0)) for the next child,
    and the distribution of the token committed where no child stands.

    * With replacement, d = q for all: multi-step speculative sampling of SpecInfer (Miao et al.,
      ASPLOS 2024, arXiv:2305.09781); each child may have a q of its own.
    * Without, d is q with the earlier siblings taken out: recursive rejection sampling of RSD (Jeon
      et al. 2024, arXiv:2402.14160).

    Args:
        tokens: m ids, siblings in `tree.children` in the order of their draws.
        q: [m, V], the distribution of each node's first sibling; equal for siblings without
            replacement.
        p: [m + 1, V], the target's warped distribution at the root and at each node.
    Returns:
        (path, next): the nodes that stand and, as int64 scalar, the token after them.
    """
    path: list[int] = []
    while True:
        node = path[-1] if path else ROOT
        child, r = _test_children(tree, tokens, q, p, random, node, replacement=replacement)
        if child is None:
            return tuple(path), random.categorical(r)
        path.append(child)


def _test_children(
    tree: Tree,
    tokens: Sequence[int],
    q: Tensor,
    p: Tensor,
    random: Random,
    node: int,
    *,
    replacement: bool,
) -> tuple[int | None, Tensor]:
    """The child of a node that stands; None, and the distribution of the token in place of all."""
    r = p[node + 1].double()  # the residuals of several rounds lose too many digits in float32
    tested: list[int] = []
    for child in tree.children[node]:
        x = tokens[child]
        d = q[child].double() if replacement else remaining_distribution(q[child], tested)
        if host.number(random.bernoulli((r[x] / d[x]).clamp_max(1.0)[None])):
            return child, r
        r = residual(r, d)
        tested.append(x)
    return None, r


# ---- with an accept rule beside it --------------------------------------------------------------

NodeDecision = tuple[int | None, Callable[[], Tensor]]
"""The child of a node that a lossless rule takes, if it takes one, and how the token is got that
it commits where no child stands."""


def walk_relaxed(
    tree: Tree, take: Callable[[int], NodeDecision], passes: Sequence[bool]
) -> tuple[Path, frozenset[int], Tensor]:
    """The walk of a lossless rule that an accept rule helps out.

    Args:
        take: the lossless rule at a node: `by_choice`, `by_draw` or `by_rounds`.
        passes: of each node, whether the accept rule lets it pass (`decide.passing`).
    Returns:
        (path, passed, next): the nodes that stand, those of them that the lossless rule had
        rejected, and the token after them.
    """
    path: list[int] = []
    passed: list[int] = []
    while True:
        node = path[-1] if path else ROOT
        child, instead = take(node)
        if child is None:
            child = next((each for each in tree.children[node] if passes[each]), None)
            if child is None:
                return tuple(path), frozenset(passed), instead()
            passed.append(child)
        path.append(child)


def choice_test(
    tree: Tree, tokens: Sequence[int], said: Sequence[int], choices: Tensor
) -> Callable[[int], NodeDecision]:
    """`match` at a node. said: the choices [m + 1] on the host."""
    return lambda node: (
        find_child(tree, tokens, node, said[node + 1]),
        lambda: choices[node + 1],
    )


def draw_test(
    tree: Tree, tokens: Sequence[int], p: Tensor, random: Random
) -> Callable[[int], NodeDecision]:
    """`point_mass` at a node."""

    def take(node: int) -> NodeDecision:
        drawn = random.categorical(p[node + 1])
        return find_child(tree, tokens, node, host.number(drawn)), lambda: drawn

    return take


def rounds_test(
    tree: Tree, tokens: Sequence[int], q: Tensor, p: Tensor, random: Random, *, replacement: bool
) -> Callable[[int], NodeDecision]:
    """`multi_round` at a node."""

    def take(node: int) -> NodeDecision:
        child, r = _test_children(tree, tokens, q, p, random, node, replacement=replacement)
        return child, lambda: random.categorical(r)

    return take


def _descend(tree: Tree, tokens: Sequence[int], choice_at: Callable[[int], int]) -> Path:
    path: list[int] = []
    node = ROOT
    while (child := find_child(tree, tokens, node, choice_at(node + 1))) is not None:
        path.append(child)
        node = child
    return tuple(path)
