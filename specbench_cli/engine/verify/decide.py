"""Decisions about drafts: which tokens a step commits.

`decide_by_choice` is for greedy decoding and coupled sampling, and `decide_by_draw` is for
rejection sampling. A decision about a chain, or about a tree whose tokens were not drawn, needs one
transfer to the host. That transfer is the only device sync of a step. For a tree with drawn tokens,
the function walks down from the root, with a sync for each draw.

The argument `passes`, bool [m], contains which draft tokens an accept rule keeps (`relaxed_mask`).
None means that only the lossless rule decides.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import isfinite
from types import MappingProxyType

import torch
from torch import Tensor

from specbench_cli.engine import host
from specbench_cli.engine.models.meter import not_finite_message
from specbench_cli.engine.types import Draft, Origin, Outcome, Rule
from specbench_cli.engine.verify import chain, siblings
from specbench_cli.engine.verify.accept import AcceptRule, DraftContext
from specbench_cli.engine.verify.random import Random
from specbench_cli.engine.verify.tree import ROOT, Tree
from specbench_cli.errors import MethodFault

Decision = tuple[Outcome, Tensor]
"""The outcome, and its last token as a tensor [1] int64 on the device."""

NOT_FINITE = "the target's logits are not finite"
NONE: Mapping[str, Tensor] = MappingProxyType({})


def decide_by_choice(
    draft: Draft,
    tree: Tree | None,
    choices: Tensor,
    passes: Tensor | None = None,
    scores: Tensor | None = None,
    drafters: Mapping[str, Tensor] = NONE,
) -> Decision:
    """Accept or reject draft tokens by the tokens [m + 1] that the target chose at the root and
    nodes.

    For a chain, m choices are enough. Then no bonus token follows.

    Args:
        scores: [m + 1, V], the scores by which the target chose. None if a recorded output replaced
            the target's choices.
        drafters: For each model that drafted, its largest logit [1]. The function checks that it is
            finite.

    Raises:
        ArithmeticError: The score of a choice is not finite, because its row contains NaN or +inf.
            Or the largest logit of a draft model is not finite.
    """
    last = choices.shape[0] == draft.nodes
    tensors = [choices, draft.tokens] if passes is None else [choices, draft.tokens, passes]
    if scores is not None:
        tensors.append(scores.gather(-1, choices[:, None])[:, 0])
    choice_ids, ids, *rest = host.lists(*tensors, *drafters.values())
    rest, greatest = rest[: len(tensors) - 2], rest[len(tensors) - 2 :]
    if scores is not None and not all(map(isfinite, rest.pop())):
        raise ArithmeticError(NOT_FINITE)
    _check_drafters(drafters, [isfinite(number) for (number,) in greatest])
    relaxed_nodes = rest[0] if rest else None
    choice_ids += ids[-1:] if last else ()
    if tree is None:
        row = n = chain.match(ids, choice_ids, relaxed_nodes)
        relaxed = (
            [] if relaxed_nodes is None else [at for at in range(n) if ids[at] != choice_ids[at]]
        )
        outcome = _chain_outcome(n, ids, choice_ids[row], bonus=not last, relaxed=relaxed)
    elif relaxed_nodes is None:
        path = siblings.match(tree, ids, choice_ids)
        row = path[-1] + 1 if path else 0
        outcome = _tree_outcome(tree, path, ids, choice_ids[row])
    else:
        take = siblings.choice_test(tree, ids, choice_ids, choices)
        path, passed, _ = siblings.walk_relaxed(tree, take, relaxed_nodes)
        row = path[-1] + 1 if path else 0
        outcome = _tree_outcome(tree, path, ids, choice_ids[row], passed)
    return outcome, draft.tokens[-1:] if row == choices.shape[0] else choices[row : row + 1]


def decide_by_draw(
    draft: Draft,
    tree: Tree | None,
    p: Tensor,
    random: Random,
    rule: Rule,
    passes: Tensor | None = None,
    drafters: Mapping[str, Tensor] = NONE,
) -> Decision:
    """Accept or reject draft tokens by random draws.

    p [m + 1, V] are the target's distributions at the root and at each node. For a chain, m rows
    are enough. Then no bonus token follows.

    Raises:
        ArithmeticError: p, the draft distribution q of a chain, or the largest logit of a draft
            model is not finite.
    """
    tokens, q = draft.tokens, draft.q
    if tree is not None:
        return _decide_drawn_tree(draft, tree, p, random, passes, drafters)
    last, p_is_finite = p.shape[0] == draft.nodes, p.sum().isfinite()[None]
    if last:  # no bonus token: a one-hot row returns the last draft token and draws nothing
        p = torch.cat((p, chain.one_hot(tokens[-1:], p)))
    if passes is None:
        verify = chain.block if rule == "block" else chain.rejection
        accepted, token = verify(tokens, q, p, random)
        parts = [accepted[None], token[None], p_is_finite, tokens]
    else:
        taken, accepted, token = chain.relaxed_rejection(tokens, q, p, random, passes)
        parts = [accepted[None], token[None], p_is_finite, tokens, taken]
    if q is not None:
        parts.append(q.sum().isfinite()[None])
    parts += [greatest.isfinite() for greatest in drafters.values()]
    n, following, finite, *rest = host.numbers(torch.cat(parts))
    finite_drafters = [rest.pop() for _ in drafters][::-1]
    if q is not None and not rest.pop():
        raise ArithmeticError("q is not finite")
    if not finite:
        raise ArithmeticError(NOT_FINITE)
    _check_drafters(drafters, finite_drafters)
    ids, rest = rest[: draft.nodes], rest[draft.nodes :]
    relaxed = [at for at in range(n) if not rest[at]] if rest else ()
    return _chain_outcome(n, ids, following, bonus=not last, relaxed=relaxed), token[None]


def _decide_drawn_tree(
    draft: Draft,
    tree: Tree,
    p: Tensor,
    random: Random,
    passes: Tensor | None,
    drafters: Mapping[str, Tensor],
) -> Decision:
    finite_drafters = [greatest.isfinite() for greatest in drafters.values()]
    numbers = host.numbers(torch.cat((draft.tokens, p.sum().isfinite()[None], *finite_drafters)))
    ids = numbers[: draft.nodes]
    if not numbers[draft.nodes]:
        raise ArithmeticError(NOT_FINITE)
    _check_drafters(drafters, numbers[draft.nodes + 1 :])
    q, replacement = draft.q, draft.draw_mode == "independent"
    passed: Collection[int] = ()
    if passes is None:
        if q is None:
            path, token = siblings.point_mass(tree, ids, p, random)
        else:
            path, token = siblings.multi_round(tree, ids, q, p, random, replacement=replacement)
    else:
        if q is None:
            take = siblings.draw_test(tree, ids, p, random)
        else:
            take = siblings.rounds_test(tree, ids, q, p, random, replacement=replacement)
        path, passed, token = siblings.walk_relaxed(tree, take, host.numbers(passes))
    return _tree_outcome(tree, path, ids, host.number(token), passed), token[None]


def _check_drafters(drafters: Mapping[str, Tensor], finite: Sequence[object]) -> None:
    for model, is_finite in zip(drafters, finite, strict=True):
        if not is_finite:
            raise ArithmeticError(not_finite_message(model))


def _chain_outcome(
    n: int, ids: Sequence[int], following: int, *, bonus: bool, relaxed: Collection[int] = ()
) -> Outcome:
    """Return the outcome of a chain with n accepted tokens.

    `following` is the token after the accepted tokens. If no bonus token is wanted, it is committed
    only after a rejected token.
    """
    m, path = len(ids), tuple(range(n))
    if n == m and not bonus:
        return Outcome(path, tuple(ids), origin=_list_origins(path, relaxed), tested=m)
    return _outcome(path, ids, following, relaxed, rejected=n < m)


def _tree_outcome(
    tree: Tree,
    path: tuple[int, ...],
    ids: Sequence[int],
    following: int,
    relaxed: Collection[int] = (),
) -> Outcome:
    last = path[-1] if path else ROOT
    return _outcome(path, ids, following, relaxed, rejected=bool(tree.children[last]))


def _outcome(
    path: tuple[int, ...],
    ids: Sequence[int],
    following: int,
    relaxed: Collection[int],
    *,
    rejected: bool,
) -> Outcome:
    last: Origin = "recovered" if rejected else "bonus" if path else "plain"
    return Outcome(
        path=path,
        committed=(*(ids[node] for node in path), following),
        origin=(*_list_origins(path, relaxed), last),
        tested=len(path) + rejected,
    )


def _list_origins(path: tuple[int, ...], relaxed: Collection[int]) -> tuple[Origin, ...]:
    """Return the origin of each accepted node: "relaxed" if only the accept rule kept it, else
    "accepted".
    """
    return tuple("relaxed" if node in relaxed else "accepted" for node in path)


def relaxed_mask(
    rule: AcceptRule | None,
    p: Tensor,
    draft: Draft,
    tree: Tree | None,
    random: Random,
    *,
    scores: Tensor | None = None,
    features: Tensor | None = None,
) -> Tensor | None:
    """Return which draft tokens an accept rule keeps. Does not wait for the device.

    Args:
        p: [m, V] or more rows, the target's distributions at the root and at the nodes.
        tree: Structure of the draft. None for a chain.
        scores: Target scores at the root and at the nodes, as in `DraftContext`.
        features: [m + 1, width], captured target features of the root and of each node.

    Returns:
        bool [m]. None if there is no accept rule.

    Raises:
        MethodFault: The rule did not return one bool for each token.
    """
    tokens, m = draft.tokens, draft.nodes
    if rule is None or not m:
        return None
    parents: Sequence[int] = range(ROOT, m - 1) if tree is None else tree.parents

    def rows_at_parents(rows: Tensor) -> Tensor:
        """Return, for each token, the row of its parent. This row predicts the token."""
        return rows[:m] if tree is None else rows[host.ids([at + 1 for at in parents], p.device)]

    token_scores = None if scores is None else rows_at_parents(scores)
    token_features = None if features is None else features[1:]
    passes = rule.relaxed_mask(
        DraftContext(tokens, parents, rows_at_parents(p), draft.q, token_scores, token_features),
        random,
    )
    if passes.shape != tokens.shape or passes.dtype != torch.bool:
        raise MethodFault(
            f"accept rule {rule.name!r}: {list(passes.shape)} of {passes.dtype} for {m} tokens",
            "`lets_pass` returns [m] of bool",
        )
    return passes
