"""Lossless verification of trees, as pure functions that return the accepted path.

All functions walk down from the root. At each node they accept one of the node's children and
continue there, or they commit a token of the target and stop. The functions differ in how the
children were chosen:

* `match` is for greedy decoding and coupled sampling. The target has chosen a token at each node,
  as in `chain.match`. A child with this token is accepted.
* `point_mass` is for children that were not drawn. The target draws a token, and a child with this
  token is accepted. This equals rejection sampling with one-hot draft distributions.
* `multi_round` is for children that were drawn from a draft distribution, with or without
  replacement.

Each function draws random numbers once per node, or once per child in a fixed order. It must not
draw once per path and keep the longest path, because that would favour draft tokens.

`walk_relaxed` combines one of these rules with a lossy accept rule. If the lossless rule accepts no
child of a node, `walk_relaxed` takes the first child that the accept rule keeps.
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

    If all tokens with q > 0 were already drawn, the remaining tokens are equally likely (as in
    Sequoia, Chen et al. 2024, arXiv:2402.12374). So up to V children can be drawn.

    Args:
        q: [..., V], the distribution of the first draw.
        drawn: Token ids of the earlier draws. [..., k] for several distributions.
    """
    at = drawn if isinstance(drawn, Tensor) else host.ids(drawn, q.device)
    left = q.double().scatter(-1, at, 0.0)
    others = torch.ones_like(left).scatter(-1, at, 0.0)
    left = torch.where(left.sum(-1, keepdim=True) > 0, left, others)
    return left / left.sum(-1, keepdim=True)


Path = tuple[int, ...]


def match(tree: Tree, tokens: Sequence[int], choices: Sequence[int]) -> Path:
    """Return the path of nodes that equal the target's choices, from the root down.

    Args:
        tokens: m token ids, one per node.
        choices: m + 1 token ids, the target's choice at the root and at each node.
    """
    return _descend(tree, tokens, lambda row: choices[row])


def point_mass(tree: Tree, tokens: Sequence[int], p: Tensor, random: Random) -> tuple[Path, Tensor]:
    """Verify children that were chosen without a random draw, in any number and order.

    Args:
        tokens: m token ids, one per node.
        p: [m + 1, V], the target's distribution at the root and at each node, after temperature,
            top-k and top-p.

    Returns:
        (path, next): the accepted nodes, and the token after them as an int64 scalar.
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
    """Verify siblings one after another by recursive rejection sampling.

    Let r be the target's distribution after the parent. A child x that was drawn from d is accepted
    with probability min(1, r(x) / d(x)). If it is rejected, r becomes norm(max(r - d, 0)) for the
    next child. If all children are rejected, the next token is drawn from r.

    * With replacement, d = q for each child. This is the multi-step speculative sampling of
      SpecInfer (Miao et al., ASPLOS 2024, arXiv:2305.09781). Each child may have its own q.
    * Without replacement, d is q without the earlier siblings. This is the recursive rejection
      sampling of RSD (Jeon et al. 2024, arXiv:2402.14160).

    Args:
        tokens: m token ids, one per node. `tree.children` lists siblings in the order of their
            draws.
        q: [m, V], for each node the draft distribution of its first sibling. Siblings drawn without
            replacement have equal rows.
        p: [m + 1, V], the target's distribution at the root and at each node, after temperature,
            top-k and top-p.

    Returns:
        (path, next): the accepted nodes, and the token after them as an int64 scalar.
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
    """Return the accepted child of a node. If all are rejected, return None and the next token's
    distribution.
    """
    r = p[node + 1].double()  # float32 is too imprecise for the residuals of several rounds
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
"""Decision of a lossless rule at a node: the accepted child or None, and a function.

The function returns the token to commit if no child is kept."""


def walk_relaxed(
    tree: Tree, take: Callable[[int], NodeDecision], passes: Sequence[bool]
) -> tuple[Path, frozenset[int], Tensor]:
    """Walk down a tree with a lossless rule and a lossy accept rule.

    Args:
        take: Function that applies the lossless rule at one node: the result of `choice_test`,
            `draw_test` or `rounds_test`.
        passes: For each node, whether the accept rule keeps it (`decide.relaxed_mask`).

    Returns:
        (path, passed, next): the kept nodes, those kept nodes that the lossless rule rejected, and
        the token after them.
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
    """Return a function that applies the rule `match` at one node, for `walk_relaxed`.

    Args:
        choice_ids: The target's choices [m + 1] on the host.
        choices: The same choices on the device.
    """
    return lambda node: (
        find_child(tree, tokens, node, choice_ids[node + 1]),
        lambda: choices[node + 1],
    )


def draw_test(
    tree: Tree, tokens: Sequence[int], p: Tensor, random: Random
) -> Callable[[int], NodeDecision]:
    """Return a function that applies the rule `point_mass` at one node, for `walk_relaxed`."""

    def take(node: int) -> NodeDecision:
        drawn = random.categorical(p[node + 1])
        return find_child(tree, tokens, node, host.number(drawn)), lambda: drawn

    return take


def rounds_test(
    tree: Tree, tokens: Sequence[int], q: Tensor, p: Tensor, random: Random, *, replacement: bool
) -> Callable[[int], NodeDecision]:
    """Return a function that applies the rule `multi_round` at one node, for `walk_relaxed`."""

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
