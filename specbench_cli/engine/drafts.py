"""The drafts of a session: made of tokens that were chosen, drawn or delivered, and checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import cast

import torch
from torch import Tensor

from specbench_cli.engine import host, proposal
from specbench_cli.engine.choosing import Chooser, Pick
from specbench_cli.engine.text import Text
from specbench_cli.engine.types import Draft, Out, Tokens
from specbench_cli.errors import MethodFault


class Drafts:
    """Makes the drafts that a method asks for, and checks those that it makes itself.

    A draft made here is `sound`: its ids and laws need no inspection, which would be a wait for the
    device.

    Args:
        text: what is drafted for.
        chooser: how tokens are chosen.

    Attributes:
        slack: nodes that the target's state has room for beyond the longest text.
    """

    def __init__(self, text: Text, chooser: Chooser) -> None:
        self.slack = 0
        self._text, self._chooser = text, chooser
        self._nothing = host.ids((), text.device)
        self._picks: list[Pick] = []
        self._sound: Draft | None = None
        self._line: tuple[int, Tensor, Tensor] | None = None  # see `_rooted`

    def chain(self, ids: Sequence[int]) -> Draft:
        """See `Session.chain`."""
        self.checked(proposal.check_ids, ids, self._chooser.vocab_size)
        text = self._text
        line = host.ids([text.tokens[-1], *ids], text.device) if ids else None
        self._sound = Draft(self._nothing if line is None else self._rooted(line))
        return self._sound

    def tree(self, ids: Sequence[int], parents: tuple[int, ...]) -> Draft:
        """See `Session.tree`."""
        draft = self.chain(ids)
        self._sound = draft = Draft(draft.tokens, parents)
        return draft

    def delivered(self, ids: Sequence[int], q: Tensor | None) -> Draft:
        """See `Session.delivered`."""
        draft = self.chain(ids)
        if q is not None and self._chooser.sampling.draws:
            whole = (draft.nodes, self._chooser.vocab_size)
            self.checked(proposal.check_shape, q, whole)
            self._sound = draft = Draft(draft.tokens, law="iid", q=q)
        return draft

    def pick(self, out: Out, ahead: int) -> Pick:
        """See `Session.pick`."""
        rows = cast(Tensor, out.logits)[:, -1]
        pick = self._chooser.pick(rows, self._text.position + ahead)
        self._picks.append(pick)
        return pick

    def drawn(self, picks: Sequence[Pick]) -> Draft:
        """See `Session.drawn`."""
        if not picks:
            return self.chain(())
        tokens = self._rooted(torch.cat([self._text.end, *[token for token, _ in picks]]))
        laws = [q for _, q in picks if q is not None]
        draft = Draft(tokens, law="iid", q=torch.cat(laws)) if laws else Draft(tokens)
        own = self._picks[-len(picks) :]
        if len(own) == len(picks) and all(map(is_, own, picks)):
            self._sound = draft
        return draft

    def rows(self, draft: Draft, length: int) -> Tokens:
        """The last committed token and a draft, once it is checked, for the target's forward.

        Args:
            length: rows of the target's state.
        Raises:
            MethodFault: the draft is malformed; says the step, the field and what is allowed.
        """
        if draft is not self._sound:
            self.inspected(draft)
        elif draft.nodes:
            self.checked(proposal.check_form, draft, self._bounds(), self._chooser.sampling.rule)
        self._picks.clear()
        text = self._text
        written, tokens, line = self._line or (0, None, draft.tokens)
        if tokens is draft.tokens and written == len(text.tokens) == length + 1:
            return Tokens(line[None])
        root = text.since(length)
        return Tokens(torch.cat((root.ids, draft.tokens[None]), 1)) if draft.nodes else root

    def inspected(self, draft: Draft) -> None:
        """Raise MethodFault unless a draft is well formed, its ids and laws too; waits."""
        self.checked(proposal.inspect, draft, self._bounds(), self._chooser.sampling.rule)

    def checked(self, check: Callable[..., object], *args: object) -> None:
        """Run a check of a draft; its fault gets the number of the step."""
        try:
            check(*args)
        except MethodFault as fault:
            raise MethodFault(f"step {self._text.steps}, {fault.message}", fault.hint) from None

    def _rooted(self, line: Tensor) -> Tensor:
        """Draft tokens behind the last committed one, kept as they go into the target's forward."""
        tokens = line[1:]
        self._line = len(self._text.tokens), tokens, line
        return tokens

    def _bounds(self) -> proposal.Bounds:
        room = self._text.room
        nodes = room + self.slack
        return proposal.Bounds(self._chooser.vocab_size, room, nodes, self._text.device)
