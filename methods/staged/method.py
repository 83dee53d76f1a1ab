"""Staged speculative decoding: a chain of draft models, where each model drafts for the next one.

Benjamin Spector, Chris Re: Accelerating LLM Inference with Staged Speculative Decoding, ES-FoMo
workshop at ICML 2023, arXiv:2308.04623.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple, Protocol

import torch
from pydantic import BeforeValidator, field_validator
from torch import Tensor

from methods.staged.ngram import KatzModel
from specbench_cli.api import (
    ROOT,
    Draft,
    Field,
    LogitsAt,
    Metered,
    Method,
    MethodParams,
    Outcome,
    Session,
    Tokens,
    build_tree,
    build_tree_mask,
    host,
    siblings,
)

NGRAM = "ngram"

Stages = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda value: value.split(",") if isinstance(value, str) else value),
]


class StagedParams(MethodParams):
    """Parameters of `Staged`."""

    stages: Stages = Field(
        (NGRAM, "draft"),
        min_length=1,
        description="stages from the cheapest to the last, each drafting for the next:"
        " optionally ngram, then names of draft models (draft is the run's own)",
    )
    depth: int = Field(
        12, ge=1, description="maximum number of tokens that the last stage generates per step"
    )
    threshold: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="the last stage stops after a token whose path has a lower probability; 0"
        " never stops it",
    )
    nodes: int = Field(16, ge=1, description="number of nodes of the tree that the target verifies")
    width: int = Field(3, ge=1, description="maximum number of children of a node")
    lookahead: int = Field(
        4, ge=1, description="number of nodes of the trees that the models of the stages verify"
    )
    order: int = Field(3, ge=1, description="maximum length of the counted n-grams, in tokens")
    scope: Literal["run", "prompt"] = Field(
        "run", description="keep the n-gram counts for the whole run, or for one prompt"
    )
    draw_mode: Literal["deterministic", "without_replacement"] = Field(
        "deterministic",
        description="tokens of the last stage with --verify rejection: its most likely tokens"
        " (deterministic), or draws from its distribution, with branches drawn"
        " without replacement",
    )

    @field_validator("stages")
    @classmethod
    def _models_after_counts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if NGRAM in value[1:] or value == (NGRAM,) or len(set(value)) < len(value):
            raise ValueError(
                f"must contain names of models, each once; only the first may be {NGRAM!r}"
            )
        return value


class Staged(Method):
    """Staged speculative decoding: the draft model has its own draft model, and drafts a tree.

    Lossless because the target verifies the tree as in other tree methods. The draft model's own
    draft model only changes how many forwards the draft model needs, not its tokens. By default
    these tokens are the most likely tokens. With `draw_mode=without_replacement` they are drawn
    from the draft model's distribution.
    Differs from the paper: n-grams are counted during decoding. The paper counts them before, on
    120 million tokens of the draft model. The paper leaves the shape of the tree open. Here the
    tree is a chain that the draft model generates, with further children where acceptance is most
    likely. The n-gram model uses absolute discounting.

    With `scope=run` the counts persist across prompts. The speed of a prompt then depends on
    earlier prompts, but its output does not. With `scope=prompt` each prompt starts without counts.

    One step:
    1. Each draft model is a stage, and the n-gram model may be a stage too. Drop each stage's KV
       entries of uncommitted tokens.
    2. The stage before the last one proposes a tree of at most `lookahead` nodes. A model proposes
       it by these same steps, the n-gram model by its most likely continuations. One forward of the
       last stage's model scores this tree. The tokens that the model itself would choose are
       generated, and its next choice too. Repeat until the last stage has `depth` tokens, or a
       token that is unlikely to be accepted.
    3. Add the next most likely children from the same forwards, until the tree has `nodes` nodes.
    4. (engine) One target forward over the last committed token and the tree; verify; commit.
    """

    name: ClassVar[str] = "staged"
    family: ClassVar[str] = "a draft model"
    proposed_in: ClassVar[tuple[str, ...]] = ("spector2023staged",)
    Params: ClassVar[type[MethodParams]] = StagedParams
    params: StagedParams
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})
    state_scope: ClassVar[Literal["prompt", "run", "corpus"]] = "run"

    def models(self) -> tuple[str, ...]:
        """Return the names of the additional draft models.

        Neither the n-gram model nor the run's draft model is an additional model.
        """
        return tuple(stage for stage in self.params.stages if stage not in (NGRAM, "draft"))

    def start(self, session: Session) -> None:
        """Reserve space for the draft tree, and prefill the models.

        The n-gram counts come from the run's memory.
        """
        params = self.params
        session.reserve(params.nodes)
        below: DraftStage | None = None
        for stage in params.stages:
            last = stage == params.stages[-1]
            if stage == NGRAM:
                below = NgramStage(session, self._counts(session), params.lookahead)
                continue
            below = self.last = ModelStage(
                session,
                session.draft(stage),
                below,
                nodes=params.nodes if last else params.lookahead,
                width=params.width,
                slack=params.lookahead,
                min_probability=params.threshold if last else 0.0,
                draws=last and params.draw_mode == "without_replacement" and session.sampling.draws,
            )

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the draft of one decoding step: steps 2 and 3 of the class docstring."""
        # Step 2: Each stage drafts for the next stage, as a draft model drafts for the target.
        trunk, rows = self.last.generate((), min(self.params.depth, limit))
        # Step 3: Adding leaves needs no draft forward, because the draft model already processed
        # their parents.
        if trunk and self.last.draws:
            return self.last.draw_branches(trunk, rows)
        tokens, parents = self.last.add_branches(trunk, rows)
        return session.chain(tokens) if len(tokens) == len(trunk) else session.tree(tokens, parents)

    def observe(self, session: Session, outcome: Outcome) -> None:
        """Drop uncommitted tokens from each stage: step 1 of the class docstring."""
        self.last.settle()

    def _counts(self, session: Session) -> KatzModel:
        kept = session.memory if self.params.scope == "run" else {}
        fresh = KatzModel(session.target.vocab_size, self.params.order)
        counts: KatzModel = kept.setdefault(NGRAM, fresh)
        return counts


# ---- stages: which model drafts for which --------------------------------------------------------


class GuessTree(NamedTuple):
    """Tree of tokens that a stage proposes.

    Parents come before their children. The parent `ROOT` is the last token before the tree.
    """

    tokens: list[int]
    parents: tuple[int, ...]


NO_GUESS = GuessTree([], ())


class NextTokens(NamedTuple):
    """Prediction of a model after one token.

    Attributes:
        tokens: The most likely next tokens.
        values: Log-probabilities of these tokens.
        distribution: The whole distribution [V] if tokens are drawn at random. Otherwise None.
    """

    tokens: list[int]
    values: list[float]
    distribution: Tensor | None


class DraftStage(Protocol):
    """Draft stage: drafts for the next stage, which is a larger model.

    The argument `path` of the methods is the draft of the next stage that the target has not
    verified. It follows the committed text.
    """

    def propose(self, path: Sequence[int], depth: int) -> GuessTree:
        """Return a tree of at most `depth` levels that may follow the text and `path`."""

    def learn(self, path: Sequence[int], tokens: Sequence[int]) -> None:
        """Record that the next stage generated `tokens` after the text and `path`."""

    def settle(self) -> None:
        """Drop the KV entries of draft tokens that were not committed."""


class ModelStage:
    """Draft stage with a language model. The previous stage drafts for this model.

    One forward of the model verifies a draft of the previous stage. Only tokens that the model
    itself chooses are accepted, so the model generates the same tokens as without drafts.

    Args:
        nodes: Maximum number of nodes of the trees that the stage proposes.
        width: Maximum number of children of a node.
        min_probability: The model stops after a token whose path has a lower probability. The token
            itself is kept. Dropping a token because of its value would change the distribution.
        draws: Whether the model draws tokens from its distribution. Otherwise it takes the most
            likely token.
    """

    def __init__(
        self,
        session: Session,
        model: Metered,
        below: DraftStage | None,
        *,
        nodes: int,
        width: int,
        slack: int,
        min_probability: float = 0.0,
        draws: bool = False,
    ) -> None:
        self.session, self.model, self.below = session, model, below
        self.nodes, self.width, self.min_probability, self.draws = (
            nodes,
            width,
            min_probability,
            draws,
        )
        self.state = session.new_state(model, slack)
        self.state_tokens = list(session.tokens())  # the tokens of the state's KV entries
        self.num_committed = len(self.state_tokens)  # number of these tokens that are committed
        self.model.forward(session.pending_tokens(0), self.state, logits_at=None)
        self.state.commit(0, range(self.num_committed))

    def propose(self, path: Sequence[int], depth: int) -> GuessTree:
        """Return a tree for the next stage: generated tokens, and further children as branches."""
        return self.add_branches(*self.generate(path, depth))

    def learn(self, path: Sequence[int], tokens: Sequence[int]) -> None:
        """Ignore the tokens, because the weights of a language model do not change."""

    def settle(self) -> None:
        """Drop uncommitted tokens in this stage and in all previous stages."""
        self._rewind(())
        if self.below is not None:
            self.below.settle()

    def generate(self, path: Sequence[int], depth: int) -> tuple[list[int], list[NextTokens]]:
        """Generate at most `depth` tokens after the text and `path`.

        Return the tokens and the model's prediction at each of them.
        """
        self._rewind(path)
        text, n = self.session.tokens(), len(self.state_tokens)
        pending = [*text[n:], *path[max(0, n - len(text)) :]]
        trunk: list[int] = []
        rows: list[NextTokens] = []
        depth = min(depth, self.nodes)
        reach = 1.0  # probability of the tokens generated so far
        while len(trunk) < depth and reach >= self.min_probability:
            # The previous stage drafts, and this model verifies the draft in one forward.
            before, left = [*path, *trunk], depth - len(trunk) - 1
            guess = NO_GUESS if self.below is None else self.below.propose(before, left)
            logits = self._score_guess(pending, guess)
            accepted, token, predictions = self._verify_guess(guess, logits, len(before))
            # Add the accepted tokens and the model's own next token.
            self.state.commit(
                0, [*range(len(pending)), *(len(pending) + node for node in accepted)]
            )
            own = [*(guess.tokens[node] for node in accepted), token]
            if self.below is not None:
                self.below.learn(before, own)
            self.state_tokens += [*pending, *own[:-1]]
            pending = [*self._drop_lost_tokens(), token]
            for token, row in zip(own, predictions, strict=True):
                trunk.append(token)
                rows.append(row)
                reach *= math.exp(row.values[0])
                if reach < self.min_probability:
                    break  # the model alone would have stopped here
        return trunk, rows

    def add_branches(self, trunk: Sequence[int], rows: Sequence[NextTokens]) -> GuessTree:
        """Return the generated tokens with their most likely siblings, as a tree of at most `nodes`
        nodes.
        """
        others: list[tuple[float, int, int]] = []
        reach = 0.0  # log-probability of the path so far
        for node, row in enumerate(rows):
            rest = zip(row.values[1:], row.tokens[1:], strict=True)
            others += [(reach + value, node - 1, token) for value, token in rest]
            reach += row.values[0]
        others = [other for other in others if other[0] > -math.inf]
        best = sorted(others, key=lambda other: -other[0])[: self.nodes - len(trunk)]
        parents = (*range(ROOT, len(trunk) - 1), *(parent for _, parent, _ in best))
        return GuessTree([*trunk, *(token for _, _, token in best)], parents)

    def draw_branches(self, trunk: Sequence[int], rows: Sequence[NextTokens]) -> Draft:
        """Return a draft tree: the generated tokens, and further siblings drawn without
        replacement.

        The number of siblings depends only on earlier draws. If it depended on the siblings
        themselves, their distribution would change.
        """
        gains: list[tuple[float, int]] = []
        reach = 1.0
        for at, row in enumerate(rows):
            missed = max(0.0, 1.0 - math.exp(row.values[0]))
            gains += [(reach * missed**k, at) for k in range(1, self.width)]
            reach *= math.exp(row.values[0])
        best = sorted(gains, key=lambda gain: -gain[0])[: self.nodes - len(trunk)]
        tokens, places, distributions = list(trunk), list(range(len(trunk))), list[Tensor]()
        for at, row in enumerate(rows):
            assert row.distribution is not None
            drawn = [trunk[at]]
            for _ in range(sum(place == at and gain > 0 for gain, place in best)):
                rest = siblings.remaining_distribution(row.distribution, drawn)
                drawn.append(host.number(self.session.random.categorical(rest)))
            tokens += drawn[1:]
            places += [at] * (len(drawn) - 1)
            distributions.append(row.distribution)
        q = torch.stack([distributions[at] for at in places])
        ids = host.ids(tokens, self.session.device)
        return Draft(ids, tuple(at - 1 for at in places), draw_mode="without_replacement", q=q)

    def _verify_guess(
        self, guess: GuessTree, logits: Tensor, ahead: int
    ) -> tuple[tuple[int, ...], int, list[NextTokens]]:
        """Verify a draft of the previous stage.

        Args:
            guess: The draft tree.
            logits: Logits of the model after the root and after each node, [1 + nodes, vocab].
            ahead: Number of uncommitted tokens between the text and the draft.

        Returns:
            The accepted nodes, the model's own next token, and the model's predictions at all of
            these tokens.
        """
        tree = build_tree(guess.parents)
        if self.draws:
            q = self.session.warp(logits)
            accepted, last = siblings.point_mass(tree, guess.tokens, q, self.session.random)
            token = host.number(last)
            distributions = [q[0], *(q[node + 1] for node in accepted)]
            own = [*(guess.tokens[node] for node in accepted), token]
            likely = host.numbers(
                torch.stack(
                    [distribution[x] for x, distribution in zip(own, distributions, strict=True)]
                )
            )
            predictions = zip(own, likely, distributions, strict=True)
            return (
                accepted,
                token,
                [
                    NextTokens([x], [math.log(p)], distribution)
                    for x, p, distribution in predictions
                ],
            )
        width = min(self.width, self.session.target.vocab_size)
        depths = [ahead, *(ahead + depth for depth in tree.depths)]
        tokens, values = self.session.candidate_lists(logits, width, ahead=depths)
        accepted = siblings.match(tree, guess.tokens, [row[0] for row in tokens])
        at = [0, *(node + 1 for node in accepted)]
        return (
            accepted,
            tokens[at[-1]][0],
            [NextTokens(tokens[row], values[row], None) for row in at],
        )

    def _score_guess(self, pending: Sequence[int], guess: GuessTree) -> Tensor:
        """Return the logits after the last pending token and after each node, [1 + nodes,
        vocab].
        """
        m, n = len(pending), len(guess.tokens)
        device = self.session.device
        x = Tokens(host.ids([[*pending, *guess.tokens]], device))
        wanted: LogitsAt = "all" if m == 1 else torch.arange(m - 1, m + n, device=device)
        if guess.parents == tuple(range(ROOT, n - 1)):
            out = self.model.forward(x, self.state, logits_at=wanted)
        else:
            parents = (*range(ROOT, m - 2), *(parent + m - 1 for parent in guess.parents))
            mask, depths = build_tree_mask(parents, device)
            positions = (depths + self.state.length())[None]
            out = self.model.forward(
                x, self.state, positions=positions, mask=mask, logits_at=wanted
            )
        return out.rows

    def _rewind(self, path: Sequence[int]) -> None:
        """Drop all KV entries except those that match the text and `path`.

        The last token of `path` never keeps an entry, because its forward must run again.
        """
        text = self.session.tokens()
        most = min(len(self.state_tokens), len(text) + len(path) - 1)
        while (
            self.num_committed < min(most, len(text))
            and self.state_tokens[self.num_committed] == text[self.num_committed]
        ):
            self.num_committed += 1
        n = self.num_committed
        while len(text) <= n < most and self.state_tokens[n] == path[n - len(text)]:
            n += 1
        self.state.rollback(0, n)
        self._drop_lost_tokens()

    def _drop_lost_tokens(self) -> list[int]:
        """Remove from `state_tokens` the tokens that the KV cache no longer contains, and return
        them.

        In a recurrent model, `rollback` may drop more tokens than requested.
        """
        n = self.state.length()
        lost = self.state_tokens[n:]
        del self.state_tokens[n:]
        self.num_committed = min(self.num_committed, n)
        return lost


class NgramStage:
    """Draft stage with an n-gram model.

    It counts the n-grams in the text that the next stage generates.
    """

    def __init__(self, session: Session, model: KatzModel, nodes: int) -> None:
        self.session, self.model, self.nodes = session, model, nodes

    def propose(self, path: Sequence[int], depth: int) -> GuessTree:
        """Return the most likely continuations under the n-gram counts."""
        return GuessTree(*self.model.tree(self._end(path), self.nodes, depth))

    def learn(self, path: Sequence[int], tokens: Sequence[int]) -> None:
        """Count the n-grams of the tokens that the next stage generated."""
        context = self._end(path)
        for token in tokens:
            self.model.add(context, token)
            context.append(token)

    def settle(self) -> None:
        """Keep all counts, including those of tokens that the target rejects."""

    def _end(self, path: Sequence[int]) -> list[int]:
        n = self.model.order
        return [*self.session.tokens()[-n:], *path][-n:]
