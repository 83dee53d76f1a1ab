"""Prepared windows: they equal a fresh draft after the outcome, and cost no forward when used."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from specbench_cli.audit.enumeration import compute_distribution
from specbench_cli.audit.models.table import TableDecoder, random_table
from specbench_cli.audit.models.tiny import create_tiny_models
from specbench_cli.engine.models.decoder import Decoder
from specbench_cli.engine.types import Tokens
from specbench_cli.engine.verify.choosing import Chooser
from specbench_cli.engine.verify.sampling import Noise, Sampling, warp
from specbench_cli.engine.workers.drafter import DraftRequest, DraftSession
from specbench_cli.engine.workers.rollouts import Guess, Rollouts, Window, guess_outcomes

PROMPT = (1, 0, 2, 1, 0)
GREEDY = Sampling()
COUPLED = Sampling("coupled", 0.9, seed=4)
DRAWN = Sampling("rejection", 0.9, seed=4)
RULES = pytest.mark.parametrize("sampling", [GREEDY, COUPLED, DRAWN], ids=lambda s: s.rule)
ROOM = 60


def desk_of(
    model: Decoder, sampling: Sampling, text: Sequence[int] = PROMPT, **rest: Any
) -> DraftSession:
    brief = DraftRequest("table/0", 0, 1, tuple(text), sampling, 128, model.vocab_size)
    return DraftSession(brief, model, lambda decoder, slack: decoder.new_state(128 + slack), **rest)


def table(vocab: int = 4) -> TableDecoder:
    return TableDecoder("draft", random_table(vocab, 5, 1.5))


def round_of(
    rollouts: Rollouts, accepted: int, token: int, limit: int, ready: Sequence[Guess] = ()
):
    """Prepare windows for some outcomes of the current window, then settle one outcome."""
    rollouts.complete()
    rollouts.prepare(ready)
    return rollouts.settle(accepted, token, limit)


def alone(model: Decoder, sampling: Sampling, text: Sequence[int], prompt: int, limit: int) -> Any:
    """Return the window that a new draft session drafts after a text."""
    desk = desk_of(model, sampling, text[:prompt])
    desk.text[prompt:] = text[prompt:-1]
    rollouts = Rollouts(desk, 3, 1)
    return rollouts.settle(0, text[-1], limit)


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=lambda s: s.rule)
@pytest.mark.parametrize("accepted", range(4))
@pytest.mark.parametrize("token", range(4))
def test_a_reused_window_equals_a_fresh_rollout(
    sampling: Sampling, accepted: int, token: int
) -> None:
    model = table()
    desk = desk_of(model, sampling)
    rollouts = Rollouts(desk, 3, 4)
    window = rollouts.settle(0, 2, ROOM)
    every = [(place, other) for place in range(4) for other in range(4)]
    reused = round_of(rollouts, accepted, token, ROOM - accepted - 1, every)
    assert reused.reused
    assert reused.prepared == 16
    text = [*PROMPT, 2, *window.tokens[:accepted], token]
    fresh = alone(model, sampling, text, len(PROMPT), ROOM)
    assert not fresh.reused
    assert reused.tokens == fresh.tokens
    assert desk.text == [*text, *reused.tokens]


def test_a_reused_window_has_the_distributions_it_was_drawn_from() -> None:
    model = table()
    rollouts = Rollouts(desk_of(model, DRAWN), 3, 4)
    window = rollouts.settle(0, 2, ROOM)
    every = [(place, other) for place in range(4) for other in range(4)]
    reused = round_of(rollouts, 1, 3, ROOM, every)
    assert reused.q is not None
    text = [*PROMPT, 2, window.tokens[0], 3, *reused.tokens]
    for at, (token, q) in enumerate(zip(reused.tokens, reused.q, strict=True)):
        before, last = text[len(PROMPT) + 1 + at : len(PROMPT) + 3 + at]
        torch.testing.assert_close(q, warp(model.table[before, last], DRAWN))
        assert q[token] > 0


def test_a_reused_window_has_the_drafts_own_distribution() -> None:
    """Enumerate all random outcomes. The discarded branch must not influence the window."""
    model = table(2)
    first, second = (0, 1), (1, 0)

    def run(chance: Any) -> tuple[int, ...]:
        noise = Noise(0, "", 0, 2, torch.device("cpu"))
        desk = desk_of(model, DRAWN, chooser=Chooser(DRAWN, chance, noise, 2))
        rollouts = Rollouts(desk, 2, 1)
        window = rollouts.settle(0, 1, ROOM)
        return (*window.tokens, *round_of(rollouts, *first, ROOM, [first, second]).tokens)

    def distribution(before: int, last: int) -> list[float]:
        return warp(model.table[before, last], DRAWN).tolist()

    # After PROMPT and 1 comes a window (w, x), all of it rejected. After 1, 1 comes the reused one.
    for (w, x, a, b), found in compute_distribution(run).items():
        due = (
            distribution(0, 1)[w]
            * distribution(1, w)[x]
            * distribution(1, 1)[a]
            * distribution(1, a)[b]
        )
        assert found == pytest.approx(due, abs=1e-12)


def rows_due(model: Decoder, ids: Sequence[int]) -> Any:
    state = model.new_state(len(ids))
    model.forward(Tokens(torch.tensor([list(ids)])), state, logits_at=None)
    return state


@RULES
def test_after_every_outcome_the_states_rows_equal_recomputation(sampling: Sampling) -> None:
    """Use a model with attention: reused windows, partly accepted later, and misses."""
    model = create_tiny_models().workspace.decoders["draft"]
    desk = desk_of(model, sampling, range(3, 12))
    rollouts, chance = Rollouts(desk, 4, 3), random.Random(2)
    (_, state), *_ = desk.states
    window, kinds, limit = rollouts.settle(0, 5, ROOM), [], ROOM
    while limit > 0:
        accepted, token = chance.randint(0, len(window.tokens)), chance.randrange(96)
        ready = [(place, chance.randrange(96)) for place in range(5) for _ in range(2)]
        hit = chance.random() < 0.7
        ready = [*ready, (accepted, token)] if hit else [g for g in ready if g != (accepted, token)]
        limit -= accepted + 1
        window = round_of(rollouts, accepted, token, limit, ready)
        kinds.append(window.reused)
        if not window.tokens:
            break
        n = state.length()
        assert n == len(desk.text) - 1
        assert tuple(desk.text[n - len(window.tokens) + 1 :]) == window.tokens
        fresh = rows_due(model, desk.text[:n])
        for layer in range(model.n_layers):
            assert state.length(0, layer) == n
            for rows in ("keys", "values"):
                ours, due = (getattr(s, rows)(layer)[:, :, :n] for s in (state, fresh))
                torch.testing.assert_close(ours, due, rtol=1e-4, atol=1e-5)
    assert {True, False} == set(kinds)


def test_all_branches_of_a_level_take_one_forward_and_settling_takes_none() -> None:
    desk = desk_of(table(), GREEDY)
    rollouts = Rollouts(desk, 3, 2)
    rollouts.settle(0, 2, ROOM)
    assert [f.n_tokens for f in desk.meter.take()] == [5, 1, 1, 1]
    rollouts.complete()
    rollouts.prepare([(place, token) for place in range(4) for token in (0, 3)])
    assert [f.n_tokens for f in desk.meter.take()] == [1, 8, 8, 8]
    assert rollouts.settle(2, 3, ROOM).reused
    assert desk.meter.take() == []


def test_branches_are_not_longer_than_the_remaining_budget() -> None:
    desk = desk_of(table(), GREEDY)
    rollouts = Rollouts(desk, 3, 1)
    assert len(rollouts.settle(0, 2, 4).tokens) == 3
    desk.meter.take()
    rollouts.complete()
    rollouts.prepare([(place, 1) for place in range(4)])
    assert [f.n_tokens for f in desk.meter.take()] == [1, 3, 2, 1]
    assert len(rollouts.settle(1, 1, 2).tokens) == 2
    rollouts.complete()
    rollouts.prepare([(0, 0), (1, 0)])
    assert [f.n_tokens for f in desk.meter.take()] == [1, 1]
    assert len(rollouts.settle(0, 0, 1).tokens) == 1
    rollouts.complete()
    rollouts.prepare([(0, 0)])
    assert desk.meter.take() == []
    assert rollouts.settle(0, 0, 0) == Window((), None, False, 0)


def test_no_window_is_prepared_where_the_output_ends() -> None:
    desk = desk_of(table(), GREEDY)
    rollouts = Rollouts(desk, 3, 1)
    window = rollouts.settle(0, 2, ROOM)
    ended = round_of(rollouts, 1, 3, 0, [(1, 3)])
    assert ended == Window((), None, False, 1)
    assert desk.text == [*PROMPT, 2, window.tokens[0], 3]
    assert desk.states[0][1].ids == desk.text[:-1]


def test_guesses_exclude_the_rejected_token_and_outcomes_without_a_following_window() -> None:
    ranked = torch.tensor([[4, 2, 1], [0, 4, 3], [5, 1, 2]])
    assert guess_outcomes(ranked, (2, 3), 2, 9) == [(0, 4), (0, 1), (1, 0), (1, 4), (2, 5), (2, 1)]
    assert guess_outcomes(ranked, (4, 3), 1, 9) == [(0, 2), (1, 0), (2, 5)]
    assert guess_outcomes(ranked, (4, 3), 1, 3) == [(0, 2), (1, 0)]
    assert guess_outcomes(ranked, (4, 3), 1, 1) == guess_outcomes(ranked, (4, 3), 1, 0) == []


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=lambda s: s.rule)
def test_the_first_guess_after_a_fully_accepted_window_is_the_drafts_choice(
    sampling: Sampling,
) -> None:
    model = table()
    rollouts = Rollouts(desk_of(model, sampling), 2, 1)
    window = rollouts.settle(0, 2, ROOM)
    rollouts.complete()
    found = rollouts.guess(1)
    assert [accepted for accepted, _ in found] == [0, 1, 2]
    assert all(token != window.tokens[accepted] for accepted, token in found[:2])
    text = [*PROMPT, 2, *window.tokens]
    (next_one,) = alone(model, sampling, text, len(PROMPT), 1).tokens
    assert found[2] == (2, next_one)


def test_tokens_of_several_rows_are_picked_at_their_own_positions() -> None:
    rows: Tensor = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    chooser = desk_of(table(6), COUPLED).chooser
    together, _ = chooser.pick(rows, 4, [0, 3, 3])
    separate = [
        int(chooser.pick(row[None], at)[0]) for row, at in zip(rows, (4, 7, 7), strict=True)
    ]
    assert together.tolist() == separate
