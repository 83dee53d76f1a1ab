"""Stages of drafting: a model that drafts, sped up by a cheaper drafter of its own.

Staged speculative decoding (Spector and Re 2023, arXiv:2308.04623): what speculation does for the
target it does for the draft. A stage proposes a tree of tokens; the model above it scores them in
one forward and follows its own choices down that tree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from specbench_cli.engine import host
from specbench_cli.engine.drafting.ngram import KatzModel
from specbench_cli.engine.models.decoder import LogitsAt
from specbench_cli.engine.models.meter import Metered
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Draft, Tokens
from specbench_cli.engine.verify.siblings import match, point_mass, remaining
from specbench_cli.engine.verify.tree import ROOT, rows_of, tree_of


class Guess(NamedTuple):
    """What a stage proposes: a tree, parents before their children, `ROOT` for the text's end."""

    tokens: list[int]
    parents: tuple[int, ...]


NOTHING = Guess([], ())


class Row(NamedTuple):
    """What a model said after one token: its best children with the logarithms of their
    probabilities, and its law [V] where it draws."""

    tokens: list[int]
    values: list[float]
    law: Tensor | None


class Stage(Protocol):
    """What drafts for the next stage. `path` is what that one has guessed beyond the text."""

    def propose(self, path: Sequence[int], depth: int) -> Guess:
        """A tree of at most `depth` levels, of what may follow the text and `path`."""

    def learn(self, path: Sequence[int], tokens: Sequence[int]) -> None:
        """The next stage did generate `tokens` after the text and `path`."""

    def settle(self) -> None:
        """The text has grown: forget what was guessed in its place."""


class Counts:
    """The cheapest stage: n-gram counts of what the stage after it generates."""

    def __init__(self, session: Session, model: KatzModel, nodes: int) -> None:
        self.session, self.model, self.nodes = session, model, nodes

    def propose(self, path: Sequence[int], depth: int) -> Guess:
        """See `Stage`."""
        return Guess(*self.model.tree(self._end(path), self.nodes, depth))

    def learn(self, path: Sequence[int], tokens: Sequence[int]) -> None:
        """See `Stage`."""
        context = self._end(path)
        for token in tokens:
            self.model.add(context, token)
            context.append(token)

    def settle(self) -> None:
        """Counts stand whatever the target says: they are of the model's own text."""

    def _end(self, path: Sequence[int]) -> list[int]:
        n = self.model.order
        return [*self.session.tokens()[-n:], *path][-n:]


class Generator:
    """A model that goes on from the text by itself, sped up by the stage below it.

    It scores what the stage below guesses in one forward and goes down that tree as far as it names
    its own choices: what comes out is what it would have generated alone, token by token.

    Args:
        nodes: size of the trees that it proposes; width: most children of a node in them.
        least: it stops behind a token that it would reach with less probability than this. (That
            token is kept: leaving it out for what it is would bend the law of what it draws.)
        draws: whether it draws from its law in place of choosing.
    """

    def __init__(
        self,
        session: Session,
        model: Metered,
        below: Stage | None,
        *,
        nodes: int,
        width: int,
        slack: int,
        least: float = 0.0,
        draws: bool = False,
    ) -> None:
        self.session, self.model, self.below = session, model, below
        self.nodes, self.width, self.least, self.draws = nodes, width, least, draws
        self.state = session.new_state(model, slack)
        self.held = list(session.tokens())  # the tokens of the state's rows
        self.sure = len(self.held)  # so many of them are the text's
        self.model.forward(session.since(0), self.state, logits_at=None)
        self.state.commit(0, range(self.sure))

    def propose(self, path: Sequence[int], depth: int) -> Guess:
        """See `Stage`: what `generate` gives, and its branches."""
        return self.branched(*self.generate(path, depth))

    def learn(self, path: Sequence[int], tokens: Sequence[int]) -> None:
        """A model has learned what it knows."""

    def settle(self) -> None:
        """See `Stage`."""
        self._return_to(())
        if self.below is not None:
            self.below.settle()

    def generate(self, path: Sequence[int], depth: int) -> tuple[list[int], list[Row]]:
        """At most `depth` tokens after the text and `path`, each with the row that it is from."""
        self._return_to(path)
        text, n = self.session.tokens(), len(self.held)
        unread = [*text[n:], *path[max(0, n - len(text)) :]]
        trunk: list[int] = []
        rows: list[Row] = []
        depth = min(depth, self.nodes)
        reach = 1.0  # probability that the text goes on as generated
        while len(trunk) < depth and reach >= self.least:
            before = [*path, *trunk]
            left = depth - len(trunk) - 1
            guess = NOTHING if self.below is None else self.below.propose(before, left)
            accepted, token, said = self._judged(guess, self._read(unread, guess), len(before))
            kept = [*range(len(unread)), *(len(unread) + node for node in accepted)]
            self.state.commit(0, kept)
            own = [*(guess.tokens[node] for node in accepted), token]
            if self.below is not None:
                self.below.learn(before, own)
            self.held += [*unread, *own[:-1]]
            unread = [token]
            for token, row in zip(own, said, strict=True):
                trunk.append(token)
                rows.append(row)
                reach *= math.exp(row.values[0])
                if reach < self.least:
                    break  # where it would have stopped without a stage below
        return trunk, rows

    def branched(self, trunk: Sequence[int], rows: Sequence[Row]) -> Guess:
        """What was generated and, in what is left of `nodes`, the next-best children on its way."""
        others: list[tuple[float, int, int]] = []
        reach = 0.0  # logarithm of the probability that the text goes on so far
        for node, row in enumerate(rows):
            rest = zip(row.values[1:], row.tokens[1:], strict=True)
            others += [(reach + value, node - 1, token) for value, token in rest]
            reach += row.values[0]
        others = [other for other in others if other[0] > -math.inf]
        best = sorted(others, key=lambda other: -other[0])[: self.nodes - len(trunk)]
        parents = (*range(ROOT, len(trunk) - 1), *(parent for _, parent, _ in best))
        return Guess([*trunk, *(token for _, _, token in best)], parents)

    def drawn(self, trunk: Sequence[int], rows: Sequence[Row]) -> Draft:
        """As `branched`, with children drawn without replacement after the generated ones.

        How many a node gets depends on what was drawn before, never on those draws themselves:
        a child left out for what it turned out to be would bend the law.
        """
        gains: list[tuple[float, int]] = []
        reach = 1.0
        for at, row in enumerate(rows):
            missed = max(0.0, 1.0 - math.exp(row.values[0]))
            gains += [(reach * missed**k, at) for k in range(1, self.width)]
            reach *= math.exp(row.values[0])
        best = sorted(gains, key=lambda gain: -gain[0])[: self.nodes - len(trunk)]
        tokens, places = list(trunk), list(range(len(trunk)))
        for at, row in enumerate(rows):
            assert row.law is not None
            siblings = [trunk[at]]
            for _ in range(sum(place == at and gain > 0 for gain, place in best)):
                rest = remaining(row.law, siblings)
                siblings.append(host.number(self.session.random.categorical(rest)))
            tokens += siblings[1:]
            places += [at] * (len(siblings) - 1)
        q = torch.stack([cast(Tensor, rows[at].law) for at in places])
        ids = torch.tensor(tokens, device=self.session.device)
        return Draft(ids, tuple(at - 1 for at in places), law="wor", q=q)

    def _judged(
        self, guess: Guess, logits: Tensor, ahead: int
    ) -> tuple[tuple[int, ...], int, list[Row]]:
        """Which guesses are this model's own choices, what it says after them, and its rows there.

        Args:
            logits: [1 + guesses, V].
            ahead: tokens between the text and the root of the guesses.
        """
        tree = tree_of(guess.parents)
        if self.draws:
            q = self.session.warp(logits)
            accepted, last = point_mass(tree, guess.tokens, q, self.session.random)
            token = host.number(last)
            said = [q[0], *(q[node + 1] for node in accepted)]
            own = [*(guess.tokens[node] for node in accepted), token]
            chances = host.numbers(torch.stack([law[x] for x, law in zip(own, said, strict=True)]))
            rows = zip(own, chances, said, strict=True)
            return accepted, token, [Row([x], [math.log(chance)], law) for x, chance, law in rows]
        width = min(self.width, logits.shape[-1])
        depths = [ahead, *(ahead + depth for depth in tree.depths)]
        tokens, values = self.session.ranked(logits, width, ahead=depths)
        accepted = match(tree, guess.tokens, [row[0] for row in tokens])
        at = [0, *(node + 1 for node in accepted)]
        return accepted, tokens[at[-1]][0], [Row(tokens[row], values[row], None) for row in at]

    def _read(self, unread: Sequence[int], guess: Guess) -> Tensor:
        """One forward: logits [1 + guesses, V] after the last unread token and each guess."""
        m, n = len(unread), len(guess.tokens)
        device = self.session.device
        x = Tokens(host.ids([[*unread, *guess.tokens]], device))
        wanted: LogitsAt = "all" if m == 1 else torch.arange(m - 1, m + n, device=device)
        if guess.parents == tuple(range(ROOT, n - 1)):
            out = self.model.forward(x, self.state, logits_at=wanted)
        else:
            parents = (*range(ROOT, m - 2), *(parent + m - 1 for parent in guess.parents))
            mask, depths = rows_of(parents, device)
            positions = (depths + self.state.length())[None]
            out = self.model.forward(
                x, self.state, positions=positions, mask=mask, logits_at=wanted
            )
        return self.session.chooser.align(cast(Tensor, out.logits)[0])

    def _return_to(self, path: Sequence[int]) -> None:
        """Keep the rows that agree with the text and `path`, but for their last token's."""
        text = self.session.tokens()
        most = min(len(self.held), len(text) + len(path) - 1)
        while self.sure < min(most, len(text)) and self.held[self.sure] == text[self.sure]:
            self.sure += 1
        n = self.sure
        while len(text) <= n < most and self.held[n] == path[n - len(text)]:
            n += 1
        self.state.rollback(0, n)
        del self.held[n:]
