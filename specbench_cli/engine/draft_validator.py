"""Checks of a draft, made before the engine computes anything from the draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specbench_cli.engine import host
from specbench_cli.engine.sequence import Text
from specbench_cli.engine.types import Draft, Rule, Tokens
from specbench_cli.engine.verify.choosing import Chooser, Pick
from specbench_cli.engine.verify.tree import ROOT, Tree, build_tree
from specbench_cli.errors import MethodFault


class DraftValidator:
    """Validation of a session's drafts before the target scores them.

    The validator trusts drafts that the session built itself. It checks the ids and distributions
    of all other drafts, which requires a device sync.

    Args:
        text: The text that the draft continues.
        chooser: The object that knows the decoding rule and the target's vocabulary.

    Attributes:
        slack: Number of nodes that a draft may have beyond the remaining token budget. The target's
            state has space for them (`Session.reserve`).
        picks: Draft tokens that `Session.pick` returned since the last check.
    """

    def __init__(self, text: Text, chooser: Chooser) -> None:
        self.slack = 0
        self.picks: list[Pick] = []
        self._text, self._chooser = text, chooser
        self._trusted: Draft | None = None
        # Set by `set_chain`: the text length, the draft tokens, and a tensor of the root and the
        # draft tokens.
        self._line: tuple[int, Tensor, Tensor] | None = None

    def trust(self, draft: Draft) -> Draft:
        """Mark the ids and distributions of a draft as valid, so that no check is needed. Return
        the draft.
        """
        self._trusted = draft
        return draft

    def set_chain(self, line: Tensor) -> Tensor:
        """Return the draft tokens [m] of a tensor [m + 1]. Its first element is the root.

        The root is the last committed token. `input_with_root` then uses the whole tensor as the
        target's input, without a copy.
        """
        tokens = line[1:]
        self._line = len(self._text.tokens), tokens, line
        return tokens

    def check(self, draft: Draft) -> None:
        """Raise MethodFault if a draft is malformed.

        The error message names the step, the invalid field and the allowed values.
        """
        self.run(check_draft, draft)
        if not self._is_trusted(draft):
            self.inspect(draft)
        elif draft.nodes:
            self.run(check_structure, draft, self._bounds(), self._chooser.sampling.rule)
        self.picks.clear()

    def input_with_root(self, draft: Draft, state_length: int) -> Tokens:
        """Return the target's next input, [1, n]: the pending tokens, then the draft tokens.

        Args:
            state_length: Number of rows in the target's state. All later tokens of the text are
                pending.
        """
        text_length, tokens, line = self._line or (0, None, draft.tokens)
        if tokens is draft.tokens and text_length == len(self._text.tokens) == state_length + 1:
            return Tokens(line[None])
        pending = self._text.pending_tokens(state_length)
        return Tokens(torch.cat((pending.ids, draft.tokens[None]), 1)) if draft.nodes else pending

    def inspect(self, draft: Draft) -> None:
        """Raise MethodFault if a draft is malformed or its values are invalid. Waits for the
        device.
        """
        self.run(inspect_values, draft, self._bounds(), self._chooser.sampling.rule)

    def run(self, check: Callable[..., object], *args: object) -> None:
        """Run a check of a draft. If it fails, add the number of the step to the error."""
        try:
            check(*args)
        except MethodFault as fault:
            raise MethodFault(f"step {self._text.steps}, {fault.message}", fault.hint) from None

    def _is_trusted(self, draft: Draft) -> bool:
        trusted = self._trusted
        return draft is trusted or (
            trusted is not None and draft.tokens is trusted.tokens and draft.q is None
        )

    def _bounds(self) -> DraftBounds:
        room = self._text.max_draft_length
        return DraftBounds(self._chooser.vocab_size, room, room + self.slack, self._text.device)


# ---- the checks ---------------------------------------------------------------------------------

TOLERANCE = 1e-4
"""Maximum difference of a distribution's sum from 1.

The rounding error of a float32 sum over 100,000 tokens is far smaller."""


@dataclass(frozen=True, slots=True)
class DraftBounds:
    """Limits that a draft must not exceed.

    vocab: Vocabulary size of the target.
    levels: Maximum number of tree levels, from the remaining token budget.
    nodes: Maximum number of tree nodes, from the capacity of the target's state.
    device: Device that the draft's tensors must be on.
    """

    vocab: int
    levels: int
    nodes: int
    device: torch.device


def inspect_values(draft: Draft, bounds: DraftBounds, rule: Rule) -> None:
    """Raise MethodFault unless the target can score and verify a draft under a decoding rule.

    Waits for the device. Draft distributions are checked only under decoding rules that draw random
    tokens.
    """
    tokens = draft.tokens
    if (
        not _is_tensor(tokens)
        or tokens.dim() != 1
        or tokens.dtype != torch.int64
        or tokens.device != bounds.device
    ):
        raise draft_fault(
            "tokens",
            f"{_describe(tokens)}; must be [nodes] of int64 on {bounds.device}",
            "flatten trees level by level; ids are the target's",
        )
    ids = host.numbers(tokens)
    check_ids(ids, bounds.vocab)
    tree = check_structure(draft, bounds, rule)
    if rule in ("rejection", "block"):
        if draft.q is not None:
            _check_q(draft.q, draft, bounds)
        if tree is not None and draft.draw_mode == "without_replacement":
            _check_distinct(tree, ids)


def check_draft(draft: object) -> None:
    """Raise MethodFault unless the value is a `Draft`."""
    if not isinstance(draft, Draft):
        raise MethodFault(
            f"expected a Draft to score, got a {type(draft).__name__}",
            "create it with `session.chain(ids)` or `session.tree(...)`",
        )


def check_structure(draft: Draft, bounds: DraftBounds, rule: Rule) -> Tree | None:
    """Check a draft without reading its ids and distributions. This needs no device sync.

    Raises:
        MethodFault: The draft is malformed.
    """
    tree = None if draft.parents is None else _check_tree(draft)
    check_levels(draft.nodes if tree is None else tree.levels, bounds.levels)
    if draft.nodes > bounds.nodes:
        raise draft_fault(
            "tokens",
            f"{draft.nodes} nodes where the target's state has room for {bounds.nodes}",
            "call `session.reserve(nodes)` with the largest tree's size in `start`",
        )
    if rule in ("rejection", "block"):
        _check_rule(draft, rule)
    return tree


def check_ids(ids: Sequence[int], vocab: int) -> None:
    """Raise MethodFault unless all token ids are in the vocabulary."""
    if ids and (min(ids) < 0 or max(ids) >= vocab):
        node = next(at for at, token in enumerate(ids) if not 0 <= token < vocab)
        raise draft_fault(
            "tokens", f"id {ids[node]} at node {node}; the target's are 0..{vocab - 1}"
        )


def check_levels(levels: int, allowed: int) -> None:
    """Raise MethodFault if a draft has more tree levels than the remaining token budget allows."""
    if levels > allowed:
        raise draft_fault(
            "tokens",
            f"{levels} levels proposed, but at most {allowed} are allowed (`limit`)",
            "propose at most `session.max_draft_length()` levels, an empty draft if it is 0",
        )


def check_shape(q: Tensor, shape: tuple[int, int]) -> None:
    """Raise MethodFault unless the draft distributions q have one row for each node."""
    if not _is_probs(q, shape):
        raise draft_fault("q", f"{_describe(q)}; must be {list(shape)} of float32")


def check_rows(draft: Draft, rows: int) -> None:
    """Raise MethodFault unless each draft node has a row of q. The last node of a chain may have
    none.
    """
    if rows != draft.nodes or draft.parents is not None or not rows:
        raise draft_fault(
            "tokens", f"{draft.nodes} nodes cannot be verified by {rows} rows of logits"
        )


def draft_fault(field: str, what: str, hint: str | None = None) -> MethodFault:
    """Return an error message about one field of a draft, as a `MethodFault`."""
    return MethodFault(f"draft.{field}: {what}", hint)


def _check_tree(draft: Draft) -> Tree:
    parents, order = draft.parents, draft.order
    assert parents is not None
    if type(parents) is not tuple or len(parents) != draft.nodes:
        raise draft_fault(
            "parents", f"{_short(parents)}; must be a tuple of {draft.nodes}, one a node"
        )
    for node, parent in enumerate(parents):
        if type(parent) is not int or not ROOT <= parent < node:
            raise draft_fault(
                "parents",
                f"{parent!r} at node {node}; allowed are {ROOT}, the root, and lower nodes",
                "number parents before their children",
            )
    if order is not None and (
        type(order) is not tuple
        or any(type(node) is not int for node in order)
        or sorted(order) != list(range(draft.nodes))
    ):
        raise draft_fault("order", f"{_short(order)}; must be a tuple of all nodes, each once")
    return build_tree(parents, order)


def _check_rule(draft: Draft, rule: Rule) -> None:
    if rule == "block" and draft.parents is not None:
        raise draft_fault(
            "parents",
            "a tree was proposed; block verification takes chains",
            "choose --verify rejection",
        )
    drawn = ("independent",) if draft.parents is None else ("independent", "without_replacement")
    if (draft.draw_mode in drawn) if draft.q is not None else (draft.draw_mode == "deterministic"):
        return
    held = "without q" if draft.q is None else "with q"
    raise draft_fault(
        "draw_mode",
        f"{draft.draw_mode!r} {held}; allowed are 'deterministic' without q and"
        f" {' and '.join(map(repr, drawn))}"
        " with the q that the tokens were drawn from",
        "take each drawn token and its q from `session.pick` or `session.branch`",
    )


def _check_q(q: Tensor, draft: Draft, bounds: DraftBounds) -> None:
    shape = (draft.nodes, bounds.vocab)
    if not _is_probs(q, shape) or q.device != bounds.device:
        raise draft_fault(
            "q", f"{_describe(q)}; must be {list(shape)} of float32 on {bounds.device}"
        )
    if draft.nodes == 0:
        return
    own_probs = q.gather(1, draft.tokens[:, None])[:, 0]
    wrong = torch.stack(
        (
            ~q.isfinite().all(-1),
            (q < 0).any(-1),
            (q.sum(-1) - 1).abs() > TOLERANCE,
            # If draw_mode is not "independent", a token may have q = 0. Draws without replacement
            # can include such tokens.
            (own_probs <= 0) & (draft.draw_mode == "independent"),
        )
    )
    for what, rows in zip(_Q_FAULTS, host.numbers(wrong), strict=True):
        if True in rows:
            node = rows.index(True)
            (mass,), (chance,) = host.lists(q[node].sum()[None], own_probs[node][None])
            raise draft_fault("q", what.format(node=node, sum=mass, own=chance))


_Q_FAULTS = (
    "the distribution of node {node} is not finite",
    "the distribution of node {node} has negative entries",
    "the distribution of node {node} sums to {sum:.6g}, not 1",
    "the distribution of node {node} gives its own token probability {own:g}:"
    " it was not drawn from it",
)


def _check_distinct(tree: Tree, ids: Sequence[int]) -> None:
    for children in tree.children:
        if len({ids[child] for child in children}) < len(children):
            raise draft_fault(
                "tokens",
                f"siblings {_short(children)} repeat an id; distribution is 'without_replacement'",
            )


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _is_probs(q: object, shape: tuple[int, int]) -> bool:
    return isinstance(q, Tensor) and tuple(q.shape) == shape and q.is_floating_point()


def _describe(tensor: object) -> str:
    if not isinstance(tensor, Tensor):
        return f"{type(tensor).__name__} {_short(tensor)}, no tensor"
    return f"{list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
