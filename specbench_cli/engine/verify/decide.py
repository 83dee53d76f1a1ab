"""From a draft and the target's word on it to an outcome; chains and trees, drawn and chosen.

One transfer brings all that the host needs to know of a chain, and of a tree whose tokens are
chosen: the only wait for the device in a step. A tree whose tokens are drawn is walked from its
root, with a wait for each draw.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from specbench_cli.engine import host
from specbench_cli.engine.types import Draft, Origin, Outcome
from specbench_cli.engine.verify import chain, siblings
from specbench_cli.engine.verify.random import Random
from specbench_cli.engine.verify.sampling import Rule
from specbench_cli.engine.verify.tree import ROOT, Tree

Decision = tuple[Outcome, Tensor]
"""The outcome, and its last token again, [1] int64 on the device."""


def chosen(draft: Draft, tree: Tree | None, choices: Tensor) -> Decision:
    """Decide by the tokens [m + 1] that the target chose at the root and at each node; of a chain,
    by m of them: then no bonus follows."""
    last = choices.shape[0] == draft.nodes
    said, ids = host.lists(choices, draft.tokens)
    said += ids[-1:] if last else ()
    if tree is None:
        row = n = chain.match(ids, said)
        outcome = _of_chain(n, ids, said[row], bonus=not last)
    else:
        path = siblings.match(tree, ids, said)
        row = path[-1] + 1 if path else 0
        outcome = _of_tree(tree, path, ids, said[row])
    return outcome, draft.tokens[-1:] if row == choices.shape[0] else choices[row : row + 1]


def drawn(draft: Draft, tree: Tree | None, p: Tensor, random: Random, rule: Rule) -> Decision:
    """Decide by draws from the target's laws p [m + 1, V] at the root and at each node; of a chain,
    from m of them: then no bonus follows.

    Raises:
        ArithmeticError: a chain's q is not finite, which its method's model is to blame for.
    """
    tokens, q = draft.tokens, draft.q
    if tree is not None:
        ids = host.numbers(tokens)
        if q is None:
            path, token = siblings.point_mass(tree, ids, p, random)
        else:
            path, token = siblings.multi_round(
                tree, ids, q, p, random, replacement=draft.law == "iid"
            )
        return _of_tree(tree, path, ids, host.number(token)), token[None]
    last = p.shape[0] == draft.nodes
    if last:  # where a bonus would be drawn, the last token itself: no chance is used up
        p = torch.cat((p, F.one_hot(tokens[-1:], p.shape[-1]).to(p.dtype)))
    judge = chain.block if rule == "block" else chain.rejection
    accepted, token = judge(tokens, q, p, random)
    parts = [accepted[None], token[None], tokens]
    if q is not None:
        parts.append(q.sum().isfinite()[None])
    n, following, *ids = host.numbers(torch.cat(parts))
    if q is not None and not ids.pop():
        raise ArithmeticError("q is not finite")
    return _of_chain(n, ids, following, bonus=not last), token[None]


def _of_chain(n: int, ids: Sequence[int], following: int, *, bonus: bool) -> Outcome:
    """The outcome of a chain of which n tokens stand; without a bonus, `following` only follows a
    rejected one."""
    m = len(ids)
    if n == m and not bonus:
        accepted: list[Origin] = ["accepted"] * m
        return Outcome(tuple(range(m)), tuple(ids), origin=tuple(accepted), tested=m)
    return _outcome(tuple(range(n)), ids, following, rejected=n < m)


def _of_tree(tree: Tree, path: tuple[int, ...], ids: Sequence[int], following: int) -> Outcome:
    return _outcome(path, ids, following, rejected=bool(tree.children[path[-1] if path else ROOT]))


def _outcome(
    path: tuple[int, ...], ids: Sequence[int], following: int, *, rejected: bool
) -> Outcome:
    accepted: list[Origin] = ["accepted"] * len(path)
    last: Origin = "recovered" if rejected else "bonus" if path else "plain"
    return Outcome(
        path=path,
        committed=(*(ids[node] for node in path), following),
        origin=(*accepted, last),
        tested=len(path) + rejected,
    )
