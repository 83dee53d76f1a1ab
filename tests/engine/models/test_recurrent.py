"""Recurrent states: they return to the end of a forward, and transformers' modules continue
there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from torch import Tensor

from specbench_cli.audit.cases import Case
from specbench_cli.audit.models.table import make_table_pair
from specbench_cli.engine.models.chain_decoders import RecurrentDecoder
from specbench_cli.engine.models.decoder import ChainsOnly
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.engine.models.state import RecurrentState
from specbench_cli.engine.types import Tokens
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.errors import MethodFault, UsageError
from tests.engine.models.feeding import check_two_sequences, logits, relative_difference, some_ids

Maker = Callable[..., Path]
CLOSE = 1e-5
CAPACITY = 20
FAMILIES = ("mamba2", "mamba", "jamba", "falcon_h1")


class StopsAgainstLists(RuleBasedStateMachine):
    """Compare a recurrent state with lists of the tokens that each stop has read."""

    def __init__(self) -> None:
        super().__init__()
        self.state = RecurrentState(2, CAPACITY)
        self.stops: list[list[list[int]]] = [[[]], [[]]]
        self.committed = [0, 0]
        self.next = 1

    def returned(self, seq: int, n: int, firm: int) -> None:
        stops = [stop for stop in self.stops[seq] if len(stop) <= n] or [[]]
        least = max((len(stop) for stop in stops if len(stop) <= firm), default=0)
        self.stops[seq] = [stop for stop in stops if len(stop) >= least]

    @rule(seq=st.integers(0, 1), n=st.integers(1, 4))
    def write(self, seq: int, n: int) -> None:
        text = self.stops[seq][-1] + list(range(self.next, self.next + n))
        if len(text) > CAPACITY:
            with pytest.raises(ValueError, match="do not fit into a state of 20 rows"):
                self.state.write(seq, n, text)
            return
        self.next += n
        self.state.write(seq, n, text)
        self.stops[seq].append(text)

    @rule(seq=st.integers(0, 1), data=st.data())
    def commit(self, seq: int, data: st.DataObject) -> None:
        base = self.committed[seq]
        kept = data.draw(st.integers(0, len(self.stops[seq][-1]) - base))
        loose = data.draw(st.integers(0, kept))
        self.state.commit(seq, range(kept), loose)
        self.returned(seq, base + kept, base + kept - loose)
        self.committed[seq] = min(base + kept - loose, len(self.stops[seq][-1]))

    @rule(seq=st.integers(0, 1), n=st.integers(0, CAPACITY))
    def rollback(self, seq: int, n: int) -> None:
        self.state.rollback(seq, n)
        self.returned(seq, n, n)
        self.committed[seq] = min(self.committed[seq], len(self.stops[seq][-1]))

    @rule()
    def clear(self) -> None:
        self.state.clear()
        self.stops, self.committed = [[[]], [[]]], [0, 0]

    @invariant()
    def holds_what_the_last_stop_held(self) -> None:
        for seq in range(2):
            assert (self.state.latest_cache(seq) or []) == self.stops[seq][-1]
            assert self.state.length(seq) == self.state.position(seq) == len(self.stops[seq][-1])


StopsAgainstLists.TestCase.settings = settings(
    max_examples=60, stateful_step_count=20, deadline=None
)
TestStopsAgainstLists = StopsAgainstLists.TestCase


def test_a_path_that_was_not_written_or_has_gaps_and_too_many_rows_are_refused() -> None:
    state = RecurrentState(1, CAPACITY)
    state.write(0, 3, "abc")
    with pytest.raises(ValueError, match="outside the written ones"):
        state.commit(0, range(4))
    with pytest.raises(MethodFault, match="skips tokens"):
        state.commit(0, (0, 2))
    with pytest.raises(ValueError, match="do not fit into a state of 20 rows"):
        state.write(0, CAPACITY, "d")


@pytest.fixture(params=FAMILIES)
def decoder(request: pytest.FixtureRequest, tiny_checkpoint: Maker) -> RecurrentDecoder:
    found = load_decoder(tiny_checkpoint(request.param), name="target")
    assert isinstance(found, RecurrentDecoder)
    return found


def test_logits_equal_transformers_after_any_rollback(decoder: RecurrentDecoder) -> None:
    ids = some_ids(24)
    with torch.no_grad():
        due = decoder.module(input_ids=ids).logits
    state = decoder.new_state(64)
    found = [logits(decoder, ids[:, :9], state), logits(decoder, ids[:, 9:10], state)]
    state.commit(0, range(10))
    wrong = torch.cat((ids[:, 10:12], 196 - ids[:, 12:15]), 1)
    logits(decoder, wrong, state)
    state.commit(0, (0, 1))  # inside a forward: its tokens are fed again
    assert state.length() == 10
    found.append(logits(decoder, ids[:, 10:12], state))
    logits(decoder, 196 - ids[:, 12:13], state)
    state.rollback(0, 12)  # at the end of a forward nothing is fed again
    assert state.length() == 12
    found += [logits(decoder, ids[:, at : at + 1], state) for at in range(12, 16)]
    found.append(logits(decoder, ids[:, 16:], state))
    assert relative_difference(torch.cat(found, 1), due) <= CLOSE


def test_the_kept_state_equals_reading_from_scratch(decoder: RecurrentDecoder) -> None:
    ids, state, fresh = some_ids(14), decoder.new_state(32), decoder.new_state(32)
    for part in ids.split((5, 1, 1, 3, 4), 1):
        logits(decoder, part, state)
    state.rollback(0, 10)
    logits(decoder, ids[:, :10], fresh)
    for ours, due in zip(state.latest_cache(0).layers, fresh.latest_cache(0).layers, strict=True):
        for name, value in vars(due).items():
            state_value = getattr(ours, name)
            pairs = (
                zip(value.values(), state_value.values(), strict=True)
                if isinstance(value, dict)
                else ((value, state_value),)
            )
            for a, b in pairs:
                if isinstance(a, Tensor) and a.is_floating_point():
                    torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


def test_rows_of_one_forward_are_separate_sequences(decoder: RecurrentDecoder) -> None:
    check_two_sequences(decoder, 4)


def test_captured_layers_and_chosen_rows_equal_those_of_one_forward(
    decoder: RecurrentDecoder,
) -> None:
    ids, rows = some_ids(9), torch.tensor([1, 3])
    state = decoder.new_state(9)
    decoder.forward(Tokens(ids[:, :5]), state, logits_at=None)
    out = decoder.forward(Tokens(ids[:, 5:]), state, logits_at=rows, captured_layers=(0,))
    whole = decoder.forward(
        Tokens(ids), decoder.new_state(9), logits_at="all", captured_layers=(0,)
    )
    assert relative_difference(out.logits, whole.logits[:, [6, 8]]) <= CLOSE
    assert relative_difference(out.aux_hidden_states[0], whole.aux_hidden_states[0][:, 5:]) <= CLOSE
    assert relative_difference(out.hidden, whole.hidden[:, 5:]) <= CLOSE
    assert relative_difference(decoder.unembed(decoder.norm(whole.hidden)), whole.logits) <= CLOSE


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"mask": torch.ones(2, 2, dtype=torch.bool)}, "target supports only chains"),
        ({"positions": torch.zeros(1, 2)}, "target supports only chains"),
        ({"layers": (0, 1)}, "target runs only full forwards: mamba2 models"),
        ({"skip": frozenset({1})}, "only full forwards"),
    ],
)
def test_trees_and_parts_of_the_layers_are_refused(
    tiny_checkpoint: Maker, how: dict[str, object], why: str
) -> None:
    decoder = load_decoder(tiny_checkpoint("mamba2"), name="target")
    with pytest.raises(ChainsOnly, match=why) as refused:
        decoder.forward(Tokens(some_ids(2)), decoder.new_state(4), **how)
    assert "choose" in refused.value.hint


def test_one_token_per_call_is_one_forward_if_the_module_needs_it(
    tiny_checkpoint: Maker,
) -> None:
    calls = {}
    for family in ("mamba", "mamba2"):
        decoder = load_decoder(tiny_checkpoint(family), name="target")
        state, seen = decoder.new_state(9), []
        decoder.forward(Tokens(some_ids(4)), state)
        decoder.module.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        decoder.forward(Tokens(some_ids(3)), state)
        calls[family] = len(seen)
    assert calls == {"mamba": 3, "mamba2": 1}


def test_a_module_that_cannot_continue_from_its_cache_is_refused(tiny_checkpoint: Maker) -> None:
    with pytest.raises(UsageError, match="rwkv checkpoints cannot be decoded here"):
        load_decoder(tiny_checkpoint("rwkv"), name="target")


def test_memory_counts_the_kept_stops(tiny_checkpoint: Maker) -> None:
    decoder = load_decoder(tiny_checkpoint("mamba2"), name="target")
    state = decoder.new_state(9)
    assert state.nbytes == 0
    decoder.forward(Tokens(some_ids(4)), state)
    one = state.nbytes
    assert one > 0
    decoder.forward(Tokens(some_ids(2)), state)
    assert state.nbytes == 2 * one
    state.commit(0, range(6))
    assert state.nbytes == one


# ---- scoring ------------------------------------------------------------------------------------


def opened(**rest: object):
    case = Case(
        "equal", make_table_pair("equal", 5), Sampling(), budget=12, recurrent=frozenset({"target"})
    )
    session = case.open(**rest)
    session.prefill()
    session.harness.forwards()
    return session


def due(session, n: int) -> list[int]:
    """Return the target's next tokens."""
    other = Case("equal", make_table_pair("equal", 5), Sampling(), budget=12).open()
    other.prefill()
    while len(other.output()) < len(session.output()) + n:
        draft = other.chain(())
        other.commit(other.verify(draft, other.score(draft)))
    return list(other.output())[len(session.output()) :][:n]


def step(session, ids):
    draft = session.chain(ids)
    committed = session.commit(session.verify(draft, session.score(draft)))
    return committed, [f.n_tokens for f in session.harness.forwards()]


def test_a_step_takes_one_forward_to_the_root_and_one_over_the_draft() -> None:
    session = opened()
    right = due(session, 3)
    committed, rows = step(session, [*right[:2], (right[2] + 1) % 5])
    assert (committed.path, rows) == ((0, 1), [1, 3])
    assert session.state.length() == len(session.tokens()) - 3
    committed, rows = step(session, due(session, 2))
    assert (committed.path, rows) == (
        (0, 1),
        [3, 2],
    )  # the tokens rejected with the third one are fed again
    assert session.state.length() == len(session.tokens()) - 1
    _, rows = step(session, ())
    assert rows == [1]


def test_a_recurrent_target_has_the_logits_of_another_target() -> None:
    plain = Case("equal", make_table_pair("equal", 5), Sampling(), budget=12).open()
    plain.prefill()
    session = opened()
    for ids in ([0, 1, 2], [3], [], [1, 1]):
        drafts = [each.chain(ids) for each in (plain, session)]
        rows = [each.score(draft) for each, draft in zip((plain, session), drafts, strict=True)]
        assert torch.equal(*rows)
        for each, draft, row in zip((plain, session), drafts, rows, strict=True):
            each.commit(each.verify(draft, row))


def test_a_tree_is_refused_and_one_branch_is_a_chain() -> None:
    session = opened()
    with pytest.raises(ChainsOnly, match="target supports only chains, not trees"):
        session.score(session.tree([0, 1], (-1, -1)))
    session.score(session.tree([0, 1], (-1, 0)))
    with pytest.raises(ChainsOnly, match="target cannot be paused"):
        session.begin_score(session.chain([0]), 1)
