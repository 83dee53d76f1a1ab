"""Verification of trees: accepted path, and the next token. Pure functions.

All functions walk down from the root. At each node they accept one of its children and continue
there, or commit a token of the target and stop. They differ in how the children were chosen:

* `match`: the target has chosen its token at every node (argmax of its logits, or of log p +
  noise), as in `chain.match`. A child is accepted if it holds this token.
* `point_mass`: children chosen without a draw. The target draws its token, and a child is accepted
  if it holds it. Each child is then accepted with the target's probability of it, which equals
  rejection sampling with a one-hot draft distribution, in any order.
* `multi_round`: children drawn from a draft distribution, with or without replacement.

Every rule draws once per node, or once per child in a fixed order, but never once per path: keeping
the longest of several draws at one node would favour drafted tokens.

`walk_relaxed` combines any of them with an accept rule. At a node the lossless rule's child comes
first. If it accepts none, the first child in test order that the accept rule keeps is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specbench_cli.engine import host
from specbench_cli.engine.verify.chain import residual
from specbench_cli.engine.verify.random import Random
from specbench_cli.engine.verify.tree import ROOT, Tree, find_child
from specbench_cli.former_names import get_renamed


def remaining_distribution(q: Tensor, drawn: Sequence[int] | Tensor) -> Tensor:
    """Return the distribution of the next draw without replacement, in float64.

    If nothing of q is left, all tokens not drawn yet are equally likely (as in Sequoia, Chen et al.
    2024, arXiv:2402.12374), so that up to V children can be drawn.

    Args:
        q: [..., V], the distribution of the first draw.
        drawn: Ids of the earlier draws, [..., k] for many distributions.
    """
    at = drawn if isinstance(drawn, Tensor) else host.ids(drawn, q.device)
    left = q.double().scatter(-1, at, 0.0)
    others = torch.ones_like(left).scatter(-1, at, 0.0)
    left = torch.where(left.sum(-1, keepdim=True) > 0, left, others)
    return left / left.sum(-1, keepdim=True)


Path = tuple[int, ...]


def match(tree: Tree, tokens: Sequence[int], choices: Sequence[int]) -> Path:
    """Return the nodes that hold the target's choices, from the root down.

    Args:
        tokens: m ids.
        choices: m + 1 ids, the target's choice at the root and at each node.
    """
    return _descend(tree, tokens, lambda row: choices[row])


def point_mass(tree: Tree, tokens: Sequence[int], p: Tensor, random: Random) -> tuple[Path, Tensor]:
    """Verify children that were chosen without a draw, in any number and order.

    Args:
        tokens: m ids.
        p: [m + 1, V], the target's warped distribution at the root and at each node.

    Returns:
        (path, next): the accepted nodes and, as int64 scalar, the token after them.
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
    """Verify siblings one after another by recursive rejection sampling, until one is accepted.

    A child x drawn from d is accepted with probability min(1, r(x) / d(x)), where r is the target's
    distribution at its parent. If it is rejected, r becomes norm(max(r - d, 0)) for the next child.
    If no child is accepted, the next token is drawn from r.

    * With replacement, d = q for all: multi-step speculative sampling of SpecInfer (Miao et al.,
      ASPLOS 2024, arXiv:2305.09781). Each child may have its own q.
    * Without replacement, d is q without the earlier siblings: recursive rejection sampling of RSD
      (Jeon et al. 2024, arXiv:2402.14160).

    Args:
        tokens: m ids, siblings in `tree.children` in the order of their draws.
        q: [m, V], the distribution of each node's first sibling. Equal for siblings without
            replacement.
        p: [m + 1, V], the target's warped distribution at the root and at each node.

    Returns:
        (path, next): the accepted nodes and, as int64 scalar, the token after them.
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
    """Return the accepted child of a node, or None and the distribution of the next token."""
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


# ---- with an accept rule ------------------------------------------------------------------------

NodeDecision = tuple[int | None, Callable[[], Tensor]]
"""Child of a node that a lossless rule accepts, or None, and a function that returns the token to
commit if no child is accepted."""


def walk_relaxed(
    tree: Tree, take: Callable[[int], NodeDecision], passes: Sequence[bool]
) -> tuple[Path, frozenset[int], Tensor]:
    """Walk down a tree with a lossless rule and an accept rule.

    Args:
        take: The lossless rule at a node: `choice_test`, `draw_test` or `rounds_test`.
        passes: For each node, whether the accept rule keeps it (`decide.relaxed_mask`).

    Returns:
        (path, passed, next): the accepted nodes, those of them that the lossless rule had rejected,
        and the token after them.
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
    tree: Tree, tokens: Sequence[int], choice_ids: Sequence[int], choices: Tensor
) -> Callable[[int], NodeDecision]:
    """Return `match` as a test of one node. `choice_ids` are the choices [m + 1] on the host."""
    return lambda node: (
        find_child(tree, tokens, node, choice_ids[node + 1]),
        lambda: choices[node + 1],
    )


def draw_test(
    tree: Tree, tokens: Sequence[int], p: Tensor, random: Random
) -> Callable[[int], NodeDecision]:
    """Return `point_mass` as a test of one node."""

    def take(node: int) -> NodeDecision:
        drawn = random.categorical(p[node + 1])
        return find_child(tree, tokens, node, host.number(drawn)), lambda: drawn

    return take


def rounds_test(
    tree: Tree, tokens: Sequence[int], q: Tensor, p: Tensor, random: Random, *, replacement: bool
) -> Callable[[int], NodeDecision]:
    """Return `multi_round` as a test of one node."""

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


_FORMER_NAMES = {
    "remaining": "remaining_distribution",
}


def __getattr__(name: str) -> Any:
    return get_renamed(__name__, _FORMER_NAMES, name)
