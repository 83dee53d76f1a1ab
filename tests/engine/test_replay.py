"""Replay of a recorded output: it decides verification, for any drafts and temperature."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specbench_cli.engine.sequence import PAST_END, RecordedOutput
from specbench_cli.engine.types import Draft
from specbench_cli.engine.verify.sampling import Sampling

VOCAB = 5
CPU = torch.device("cpu")
SAMPLINGS = [Sampling(), Sampling("rejection", 0.8, seed=5)]


@pytest.fixture(scope="session")
def replayed(open_session, random_table):
    """Function that opens a session on random tables which replays `recording`, after prefill."""

    def make(recording, sampling=SAMPLINGS[0], **rest):
        session = open_session(
            random_table(VOCAB, 1),
            random_table(VOCAB, 2),
            prompt=(4, 0),
            sampling=sampling,
            recording=recording,
            **{"budget": len(recording)} | rest,
        )
        session.prefill()
        return session

    return make


def step(session, draft):
    return session.commit(session.verify(draft, session.score(draft)))


def test_choices_are_the_recorded_tokens_and_end_with_them():
    recording = RecordedOutput([3, 1, 2], CPU)
    assert recording.choices(0, range(3)).tolist() == [3, 1, 2]
    assert recording.choices(2, range(3)).tolist() == [2, PAST_END, PAST_END]
    assert recording.choices(0, (0, 1, 1, 2)).tolist() == [3, 1, 1, 2]


def test_a_draft_is_accepted_as_far_as_it_matches_the_recording(replayed):
    session = replayed([1, 3, 3, 0, 2])
    outcome = step(session, session.chain([3, 3, 1]))
    assert outcome.committed == (3, 3, 0)
    assert outcome.origin == ("accepted", "accepted", "recovered")
    assert outcome.tested == 3
    assert session.output() == [1, 3, 3, 0]


def test_a_tree_is_accepted_along_the_recorded_path(replayed):
    session = replayed([1, 3, 2, 0, 2, 4])
    tree = Draft(torch.tensor([0, 3, 1, 2]), parents=(-1, -1, 1, 1))
    outcome = step(session, tree)
    assert outcome.path == (1, 3)
    assert outcome.committed == (3, 2, 0)
    assert session.state.ids == list(session.tokens()[:-1])


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "rejection"])
@given(data=st.data())
def test_any_drafts_give_the_recording(replayed, sampling, data):
    recording = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=10))
    session = replayed(recording, sampling)
    while session.finish is None:
        limit = session.max_draft_length()
        ids = data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=limit))
        step(session, session.chain(ids))
        assert session.state.ids == list(session.tokens()[:-1]) or session.finish
    assert session.output() == recording


def test_an_end_of_sequence_inside_an_accepted_block_ends_it(replayed):
    session = replayed([1, 2, 0], eos=(0,), budget=8)
    step(session, session.chain([2, 0, 3, 3]))
    assert (session.output(), session.finish) == ([1, 2, 0], "eos")


def test_drawn_drafts_are_also_verified_by_the_recording(replayed):
    session = replayed([1, 2, 2, 2, 2, 2], SAMPLINGS[1])
    model = session.draft()
    state = session.new_state(model)
    pick = session.pick(model.forward(session.pending_tokens(0), state))
    outcome = step(session, session.chain_of_picks([pick]))
    assert outcome.committed[: outcome.origin.count("accepted")] in ((), (2,))
    assert session.output() == [1, *outcome.committed] == [1, 2, 2][: len(session.output())]
