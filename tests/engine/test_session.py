"""Steps of a session: what is committed, where outputs are cut, and errors for malformed drafts."""

import math
import time
from dataclasses import replace

import pytest
import torch

from specbench_cli.engine import draft_validator, host
from specbench_cli.engine.drafting.chains import draw_chain
from specbench_cli.engine.peer_session import PeerSession
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Draft, ModelOutput, Outcome
from specbench_cli.engine.verify.sampling import Sampling, log_warp, warp
from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import MethodFault

CYCLE = (1, 2, 3, 4, 0)  # the greedy successor of each token
COUPLED = Sampling("coupled", 0.8, seed=5)
REJECTION = Sampling("rejection", 0.8, seed=5)


@pytest.fixture
def opened(open_session, successor_table):
    """Function that opens a prefilled greedy session on the cycle 0 1 2 3 4 0 ...

    The prompt is (4, 0), so 1 is committed.
    """

    def make(**rest):
        session = open_session(successor_table(CYCLE), **{"prompt": (4, 0)} | rest)
        session.prefill()
        return session

    return make


def step(session, *ids):
    """Make one step with a chain of these ids."""
    draft = session.chain(ids)
    return session.commit(session.verify(draft, session.score(draft)))


def after(rows):
    """Return an output whose last logits are these, [1, V]."""
    logits = torch.stack((torch.zeros_like(rows), rows), dim=1)
    return ModelOutput(logits, hidden=torch.zeros(1, 2, 1))


def assert_consistent(session):
    """Assert that the target has a row for every committed token but the last, and no other row."""
    return session.state.ids == list(session.tokens()[:-1])


# ---- outcomes -----------------------------------------------------------------------------------


def test_prefill_commits_the_first_token(opened):
    session = opened()
    assert session.tokens() == [4, 0, 1]
    assert session.output() == [1]
    assert session.harness.text.origin == ["prefill"]
    assert assert_consistent(session)


def test_a_step_without_a_draft_commits_one_plain_token(opened):
    session = opened()
    outcome = step(session)
    assert (outcome.committed, outcome.origin) == ((2,), ("plain",))
    assert (outcome.path, outcome.tested) == ((), 0)
    assert assert_consistent(session)


def test_a_fully_accepted_draft_earns_a_bonus(opened):
    session = opened()
    outcome = step(session, 2, 3)
    assert outcome.committed == (2, 3, 4)
    assert outcome.origin == ("accepted", "accepted", "bonus")
    assert (outcome.path, outcome.tested) == ((0, 1), 2)
    assert assert_consistent(session)


def test_a_rejected_token_is_replaced_and_the_rest_is_dropped(opened):
    session = opened()
    outcome = step(session, 2, 0, 1)
    assert outcome.committed == (2, 3)
    assert outcome.origin == ("accepted", "recovered")
    assert (outcome.path, outcome.tested) == ((0,), 2)
    assert assert_consistent(session)


def test_a_draft_right_after_a_rejection_continues_from_the_recovered_token(opened):
    session = opened(budget=20)
    step(session, 2, 0, 1)
    assert step(session, 4, 0).committed == (4, 0, 1)
    assert session.output() == [1, 2, 3, 4, 0, 1]


def test_origins_are_recorded_along_the_output(opened):
    session = opened(budget=20)
    step(session, 2, 0)
    step(session, 4)
    step(session)
    assert session.harness.text.origin == [
        "prefill",
        "accepted",
        "recovered",
        "accepted",
        "bonus",
        "plain",
    ]


@pytest.mark.parametrize("sampling", [Sampling(), REJECTION], ids=lambda s: s.rule)
def test_the_text_ends_with_the_last_committed_token_of_any_outcome(opened, sampling):
    """The next forward reads the committed token, not the one that verification chose."""
    session = opened(budget=20, sampling=sampling)
    draft = session.chain((2, 3))
    found = session.verify(draft, session.score(draft))
    # All is accepted, but the bonus is left out.
    session.commit(Outcome((0, 1), (2, 3), ("accepted", "accepted"), 2))
    assert found.committed == (2, 3, 4)
    assert session.pending_tokens(session.state.length()).ids.tolist() == [[3]]
    assert step(session, 4).committed == (4, 0)
    # Nothing was verified. Another token than the target's is committed.
    session.score(session.chain((1,)))
    session.commit(Outcome((), (3,), ("recovered",), 1))
    assert step(session).committed == (4,)
    assert session.output() == [1, 2, 3, 4, 0, 3, 4]
    assert assert_consistent(session)


def test_a_decided_token_is_not_sent_to_the_device_again(opened, monkeypatch):
    session = opened()
    draft = session.chain((2,))
    outcome = session.verify(draft, session.score(draft))
    monkeypatch.delattr(host, "ids")
    session.commit(replace(outcome, tested=0))
    assert session.pending_tokens(session.state.length()).ids.tolist() == [[3]]


# ---- cuts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("eos", "draft", "committed", "origin", "path", "tested"),
    [
        (2, (2, 3, 4), (2,), ("accepted",), (0,), 1),
        (3, (2, 3, 4), (2, 3), ("accepted",) * 2, (0, 1), 2),
        (4, (2, 3, 4), (2, 3, 4), ("accepted",) * 3, (0, 1, 2), 3),
        (0, (2, 3, 4), (2, 3, 4, 0), ("accepted",) * 3 + ("bonus",), (0, 1, 2), 3),
        (3, (2, 0), (2, 3), ("accepted", "recovered"), (0,), 2),
        (2, (0, 0), (2,), ("recovered",), (), 1),
        (2, (), (2,), ("plain",), (), 0),
    ],
    ids=["first", "inside", "last draft", "bonus", "recovered", "recovered at once", "plain"],
)
def test_eos_ends_the_output_at_any_place_of_a_step(
    opened, eos, draft, committed, origin, path, tested
):
    session = opened(eos=[eos])
    outcome = step(session, *draft)
    assert (outcome.committed, outcome.origin) == (committed, origin)
    assert (outcome.path, outcome.tested) == (path, tested)
    assert session.finish == "eos"
    assert session.output() == [1, *committed]
    assert len(session.harness.text.origin) == len(session.output())
    assert assert_consistent(session)


def test_eos_as_the_first_token_ends_the_output_in_prefill(opened):
    session = opened(eos=[1])
    assert (session.output(), session.finish) == ([1], "eos")


def test_eos_in_the_prompt_does_not_end_the_output(opened):
    assert opened(eos=[4]).finish is None


def test_eos_in_a_rejected_part_of_a_draft_does_not_end_the_output(opened):
    session = opened(eos=[0])
    assert step(session, 2, 0, 1).committed == (2, 3)
    assert session.finish is None


def test_a_stop_string_completed_inside_a_block_ends_the_output_there(opened):
    session = opened(strings=("12;3",), decode=lambda ids: "".join(f"{i}" for i in ids), budget=9)
    assert step(session, 2, 3, 4).committed == (2, 3, 4, 0)
    session = opened(strings=("123",), decode=lambda ids: "".join(f"{i}" for i in ids), budget=9)
    outcome = step(session, 2, 3, 4)
    assert (outcome.committed, outcome.path, outcome.tested) == ((2, 3), (0, 1), 2)
    assert (session.finish, session.output()) == ("stop", [1, 2, 3])
    assert assert_consistent(session)


def test_a_stop_string_in_the_prompt_does_not_end_the_output(opened):
    session = opened(strings=("40", "01"), decode=lambda ids: "".join(f"{i}" for i in ids))
    assert session.finish is None


def test_a_draft_of_the_remaining_budget_minus_one_fills_it_exactly(opened):
    session = opened(budget=4)
    assert session.max_draft_length() == 2
    assert step(session, 2, 3).committed == (2, 3, 4)
    assert (session.finish, len(session.output())) == ("length", 4)
    assert assert_consistent(session)


def test_a_budget_of_one_is_spent_by_prefill(opened):
    session = opened(budget=1)
    assert (session.finish, session.output()) == ("length", [1])


def test_tokens_decoded_by_another_engine_are_cut_by_the_same_rule(opened):
    session = opened(eos=[3], kind=PeerSession)
    outcome = session.verify(session.chain((2, 3)), session.score(session.chain((2, 3))))
    adopted = session.adopt(outcome)
    assert (adopted.committed, session.finish) == ((2, 3), "eos")


def test_tokens_decoded_by_another_engine_arrive_with_the_first_reported_step(
    open_session, successor_table
):
    session = open_session(successor_table(CYCLE), prompt=(4, 0), kind=PeerSession)
    session.adopt(Outcome((), (1,), ("plain",), 0))
    text = session.harness.text
    arrived = text.last_ns
    assert text.started_ns < text.first_ns == arrived
    session.adopt(Outcome((), (2,), ("plain",), 0))
    assert (session.output(), session.harness.text.last_ns, session.harness.text.first_ns) == (
        [1, 2],
        arrived,
        arrived,
    )


# ---- trees --------------------------------------------------------------------------------------


def tree_step(session, ids, parents, **rest):
    """Make one step with a tree of these ids."""
    draft = Draft(torch.tensor(ids, dtype=torch.int64), parents=parents, **rest)
    return session.commit(session.verify(draft, session.score(draft)))


@pytest.fixture
def planted(successor_table, open_session):
    """Function that opens a greedy session with space for trees.

    The prompt is (4, 0), so 1 is committed.
    """

    def make(nodes=8, **rest):
        session = open_session(successor_table(CYCLE), **{"prompt": (4, 0), "budget": 20} | rest)
        session.reserve(nodes)
        session.prefill()
        return session

    return make


@pytest.mark.parametrize(
    ("ids", "parents", "committed", "path", "tested"),
    [
        ((0, 2, 3), (-1, -1, 1), (2, 3, 4), (1, 2), 2),
        ((2, 2, 3), (-1, -1, 0), (2, 3, 4), (0, 2), 2),
        ((0, 2, 3, 3, 4), (-1, -1, 0, 1, 3), (2, 3, 4, 0), (1, 3, 4), 3),
        ((0, 2, 1, 4), (-1, -1, 0, 1), (2, 3), (1,), 2),
        ((0, 1, 2), (-1, 0, 1), (2,), (), 1),
        ((2, 0, 1, 1), (-1, -1, 1, 2), (2, 3), (0,), 1),
    ],
    ids=["whole path", "twins", "deep", "rejected below", "rejected at once", "short leaf"],
)
def test_a_tree_commits_the_targets_path(planted, ids, parents, committed, path, tested):
    session = planted()
    outcome = tree_step(session, ids, parents)
    assert (outcome.committed, outcome.path, outcome.tested) == (committed, path, tested)
    leaf = path and path[-1] not in parents
    last = "bonus" if leaf else "recovered"
    assert outcome.origin == ("accepted",) * len(path) + (last,)
    assert assert_consistent(session)
    assert step(session, (committed[-1] + 1) % 5).origin == ("accepted", "bonus")


def test_an_empty_tree_is_a_plain_step(planted):
    assert tree_step(planted(), (), ()).origin == ("plain",)


def test_eos_inside_a_tree_ends_the_output_there(planted):
    session = planted(eos=[3])
    outcome = tree_step(session, (0, 2, 3, 4), (-1, -1, 1, 2))
    assert (outcome.committed, outcome.path, outcome.tested) == ((2, 3), (1, 2), 2)
    assert (session.finish, session.output()) == ("eos", [1, 2, 3])
    assert assert_consistent(session)


def test_siblings_are_tested_in_the_given_order(open_session, random_table):
    # The first of two equal tokens in this order is accepted.
    for order, first in (((0, 1), 0), ((1, 0), 1), (None, 0)):
        session = open_session(random_table(5, seed=1), prompt=(3,), budget=9)
        session.reserve(4)
        session.prefill()
        choice = step_choice(session)
        outcome = tree_step(session, (choice, choice), (-1, -1), order=order)
        assert outcome.path == (first,)


def step_choice(session):
    """Return the token that a greedy target chooses next, without committing it."""
    rows = session.score(session.chain(()))
    session.state.rollback(0, len(session.tokens()) - 1)
    return int(rows[0].argmax())


def test_a_chain_as_a_tree_commits_the_same_tokens(open_session, random_table):
    for sampling in (Sampling(), COUPLED):
        outputs = []
        for parents in (None, (-1, 0, 1)):
            session = open_session(random_table(5, seed=2), sampling=sampling, budget=12)
            session.reserve(3)
            session.prefill()
            while session.max_draft_length() >= 3:
                draft = Draft(torch.tensor([1, 2, 3]), parents=parents)
                session.commit(session.verify(draft, session.score(draft)))
            outputs.append((session.output(), session.harness.text.origin))
        assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("sampling", "how"),
    [
        (Sampling(), "without_replacement"),
        (COUPLED, "without_replacement"),
        (REJECTION, "deterministic"),
        (REJECTION, "independent"),
    ],
    ids=["greedy", "coupled", "deterministic", "independent"],
)
def test_children_are_chosen_by_the_rule(open_session, random_table, sampling, how):
    rows = random_table(5, seed=5)[0, :2]
    session = open_session(random_table(5, seed=6), sampling=sampling)
    session.prefill()
    tokens, q = session.branch(rows, 2, how=how, ahead=1)
    assert tokens.shape == (2, 2)
    if how == "independent":
        assert torch.equal(q, warp(rows, sampling))
        return
    assert q is None
    scores = rows
    if sampling is COUPLED:  # all nodes of a level share the noise of their position
        scores = log_warp(rows, sampling) + session.noise(2)
    assert torch.equal(tokens, scores.topk(2).indices)


# ---- malformed drafts ---------------------------------------------------------------------------


def test_a_draft_longer_than_the_limit_is_a_fault_that_names_both(opened):
    session = opened(budget=4)
    with pytest.raises(MethodFault, match="3 levels proposed, but at most 2"):
        session.score(session.chain((2, 3, 4)))


NAN, INF = math.nan, math.inf
FINE = [0.2] * 5
MALFORMED = {
    "an id beyond the vocabulary": ({"tokens": [2, 5]}, "tokens: id 5 at node 1; the target's are"),
    "a negative id": ({"tokens": [-1, 2]}, "tokens: id -1 at node 0"),
    "ids of another type": ({"tokens": torch.tensor([2.0, 3.0])}, r"tokens: \[2\] of float32"),
    "ids of another shape": ({"tokens": torch.tensor([[2, 3]])}, r"tokens: \[1, 2\] of int64"),
    "a cycle": ({"parents": (1, 0)}, "parents: 1 at node 0; allowed are -1, the root, and lower"),
    "its own parent": ({"parents": (-1, 1)}, "parents: 1 at node 1"),
    "a parent below the root": ({"parents": (-1, -2)}, "parents: -2 at node 1"),
    "a parent that is no number": ({"parents": (-1, 0.0)}, "parents: 0.0 at node 1"),
    "too few parents": ({"parents": (-1,)}, r"parents: \(-1,\); must be a tuple of 2"),
    "a list of parents": ({"parents": [-1, 0]}, r"parents: \[-1, 0\]; must be a tuple"),
    "a node left out of the order": ({"parents": (-1, -1), "order": (0, 0)}, r"order: \(0, 0\)"),
    "too deep": ({"tokens": [1] * 8, "parents": tuple(range(-1, 7))}, "tokens: 8 levels"),
    "too many nodes": ({"tokens": [1] * 12, "parents": (-1,) * 12}, "tokens: 12 nodes where .* 10"),
    "no q for its draw mode": ({"draw_mode": "independent"}, "draw_mode: 'independent' without q"),
    "q for no draw": ({"q": [FINE] * 2}, "draw_mode: 'deterministic' with q"),
    "a chain without replacement": (
        {"draw_mode": "without_replacement", "q": [FINE] * 2},
        "draw_mode: 'without_replacement' with q",
    ),
    "too few rows of q": ({"draw_mode": "independent", "q": [FINE]}, r"q: \[1, 5\] of float32"),
    "too many rows of q": (
        {"draw_mode": "independent", "q": [FINE] * 3},
        r"q: \[3, 5\] of float32",
    ),
    "too narrow a q": (
        {"draw_mode": "independent", "q": [[0.25] * 4] * 2},
        r"q: \[2, 4\] of float32",
    ),
    "a q that is no number": (
        {"draw_mode": "independent", "q": [FINE, [NAN] * 5]},
        "q: .* node 1 is not finite",
    ),
    "an infinite q": (
        {"draw_mode": "independent", "q": [[INF] * 5, FINE]},
        "q: .* node 0 is not finite",
    ),
    "a negative q": (
        {"draw_mode": "independent", "q": [FINE, [-0.2, 0.3, 0.3, 0.3, 0.3]]},
        "q: the distribution of node 1 has negative entries",
    ),
    "a q that is no distribution": (
        {"draw_mode": "independent", "q": [FINE, [0.3] * 5]},
        "q: .* node 1 sums to 1.5, not",
    ),
    "a token that q rules out": (
        {"draw_mode": "independent", "q": [FINE, [0.5, 0.5, 0.0, 0.0, 0.0]]},
        "q: .* node 1 gives its own token probability 0",
    ),
    "siblings drawn twice": (
        {
            "tokens": [2, 2],
            "parents": (-1, -1),
            "draw_mode": "without_replacement",
            "q": [FINE] * 2,
        },
        r"tokens: siblings \(0, 1\) repeat an id",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_draft_is_a_fault_that_names_step_field_and_what_is_allowed(
    open_session, random_table, case
):
    fields, message = MALFORMED[case]
    session = open_session(random_table(5, seed=1), sampling=REJECTION, budget=8)
    session.reserve(4)
    session.prefill()
    fields = {"tokens": [2, 3]} | fields
    for name in ("tokens", "q"):
        if isinstance(fields.get(name), list):
            fields[name] = torch.tensor(fields[name])
    before = session.state.length()
    with pytest.raises(MethodFault, match=f"^step 1, draft.{message}"):
        session.score(Draft(**fields))
    assert session.state.length() == before  # nothing was computed from it


def test_siblings_drawn_with_replacement_may_be_equal(open_session, random_table):
    session = open_session(random_table(5, seed=1), sampling=REJECTION, budget=8)
    session.reserve(4)
    session.prefill()
    q = torch.tensor([FINE] * 2)
    draft = Draft(torch.tensor([2, 2]), parents=(-1, -1), draw_mode="independent", q=q)
    assert session.score(draft).shape == (3, 5)


def test_nan_logits_of_a_draft_model_are_found_before_anything_is_committed(
    open_session, random_table
):
    session = open_session(random_table(5, seed=6), sampling=REJECTION)
    session.prefill()
    draft = session.chain_of_picks([session.pick(after(torch.full((1, 5), math.nan)))])
    rows = session.score(draft)
    with pytest.raises(
        MethodFault, match=r"^step 1, draft.q: the distribution of node 0 is not finite"
    ):
        session.verify(draft, rows)
    assert len(session.output()) == 1


def test_a_chain_of_ids_outside_the_vocabulary_is_a_fault(opened):
    with pytest.raises(MethodFault, match=r"step 1, draft\.tokens: id 7 at node 1"):
        opened().chain((2, 7))


def test_a_distribution_that_a_method_replaced_is_checked(open_session, random_table):
    session = open_session(random_table(5, seed=6), sampling=REJECTION)
    session.prefill()
    token, q = session.pick(after(random_table(5, seed=5)[0, :1]))
    with pytest.raises(MethodFault, match="sums to 2"):
        session.score(session.chain_of_picks([(token, 2 * q)]))


def test_valid_ids_of_another_type_are_not_checked_again(opened, monkeypatch):
    session = opened()
    tokens = session.tree((2, 3), (-1, 0)).tokens
    checked = []
    monkeypatch.setattr(draft_validator, "inspect_values", lambda draft, *_: checked.append(draft))
    session.score(Draft(tokens))
    assert not checked
    session.state.rollback(0, len(session.tokens()) - 1)
    session.score(Draft(tokens.clone()))
    assert len(checked) == 1


def test_tree_ids_are_checked_where_that_needs_no_wait(opened, monkeypatch):
    session = opened()
    assert session.tree(torch.tensor([2, 4]), (-1, 0)).tokens.tolist() == [2, 4]
    with pytest.raises(MethodFault, match="id 5 at node 1"):
        session.tree(torch.tensor([2, 5]), (-1, 0))


def test_block_verification_refuses_trees(open_session, random_table):
    session = open_session(random_table(5, seed=6), sampling=Sampling("block", 0.8))
    session.reserve(2)
    session.prefill()
    with pytest.raises(MethodFault, match="block verification takes chains"):
        session.score(Draft(torch.tensor([1, 2]), parents=(-1, -1)))


# ---- sampling rules -----------------------------------------------------------------------------


def test_coupled_commits_the_same_tokens_for_any_draft(open_session, random_table):
    table = random_table(5, seed=2)
    outputs = set()
    for proposals in ((), (0,), (1, 2), (3, 3, 3, 3), (4, 1, 0)):
        session = open_session(table, sampling=COUPLED, budget=12)
        session.prefill()
        while session.finish is None:
            step(session, *proposals[: session.max_draft_length()])
            assert assert_consistent(session)
        outputs.add(tuple(session.output()))
    assert len(outputs) == 1


def test_coupled_chooses_by_log_probability_plus_the_noise_of_the_output_position(
    open_session, random_table
):
    table = random_table(5, seed=3)
    session = open_session(table, prompt=(1, 2, 3), sampling=COUPLED, budget=6)
    session.prefill()
    while session.finish is None:
        step(session)
    text = [1, 2, 3, *session.output()]
    for at, token in enumerate(session.output()):
        log_p = log_warp(table[text[at + 1], text[at + 2]], COUPLED)
        assert token == int((log_p + session.noise(at)[0]).argmax())


def test_greedy_chooses_by_the_logits_as_they_are(open_session, random_table):
    session = open_session(random_table(5, seed=3))
    rows = torch.randn(3, 5)
    assert session.scores(rows, 4) is rows


def test_rejection_draws_differ_by_pass_and_coupled_ones_do_not(open_session, random_table):
    table = random_table(5, seed=4, scale=0.1)

    def output(sampling, pass_):
        session = open_session(table, sampling=sampling, budget=40, pass_=pass_)
        session.prefill()
        while session.finish is None:
            step(session)
        return session.output()

    assert output(REJECTION, 1) == output(REJECTION, 1) != output(REJECTION, 2)
    assert output(COUPLED, 1) == output(COUPLED, 2)


# ---- drafting -----------------------------------------------------------------------------------


def test_a_draft_token_is_picked_by_the_rule(open_session, random_table):
    rows = random_table(5, seed=5)[0, :1]
    greedy = open_session(random_table(5, seed=6))
    token, q = greedy.pick(after(rows))
    assert (token.tolist(), q) == (rows.argmax(-1).tolist(), None)

    coupled = open_session(random_table(5, seed=6), sampling=COUPLED)
    coupled.prefill()
    even = torch.zeros(1, 5)  # so that the noise decides
    token, q = coupled.pick(after(even), ahead=2)
    assert (token.tolist(), q) == (coupled.noise(3).argmax(-1).tolist(), None)
    token, q = coupled.pick(after(even))
    assert (token.tolist(), q) == (coupled.noise(1).argmax(-1).tolist(), None)
    token, q = coupled.pick(after(rows), ahead=2)
    scores = log_warp(rows, COUPLED) + coupled.noise(3)
    assert (token.tolist(), q) == (scores.argmax(-1).tolist(), None)

    rejection = open_session(random_table(5, seed=6), sampling=REJECTION)
    token, q = rejection.pick(after(rows))
    assert torch.equal(q, warp(rows, REJECTION))
    assert token.shape == (1,)


def test_picks_make_a_chain_with_the_distributions_that_they_were_drawn_from(
    open_session, random_table
):
    rows = random_table(5, seed=5)[0, :2]
    session = open_session(random_table(5, seed=6), sampling=REJECTION)
    picks = [session.pick(after(rows[i : i + 1]), i) for i in range(2)]
    draft = session.chain_of_picks(picks)
    assert draft.draw_mode == "independent"
    assert draft.tokens.tolist() == [int(token) for token, _ in picks]
    assert torch.equal(draft.q, warp(rows, REJECTION))

    greedy = open_session(random_table(5, seed=6))
    draft = greedy.chain_of_picks([greedy.pick(after(rows[:1]))])
    assert (draft.draw_mode, draft.q, draft.nodes) == ("deterministic", None, 1)
    assert greedy.chain_of_picks([]).nodes == 0


def test_rows_of_one_forward_make_the_same_chain_as_their_picks(open_session, random_table):
    rows = random_table(5, seed=5)[0, :3]
    for sampling in (Sampling(), COUPLED, REJECTION):
        one, other = (open_session(random_table(5, seed=6), sampling=sampling) for _ in range(2))
        due = one.chain_of_picks([one.pick(after(row[None]), k) for k, row in enumerate(rows)])
        draft = draw_chain(other, rows)
        assert (draft.tokens.tolist(), draft.draw_mode) == (due.tokens.tolist(), due.draw_mode)
        assert draft.q is due.q is None or torch.equal(draft.q, due.q)


def test_a_tree_takes_distributions_per_node_or_per_level(open_session, random_table):
    session = open_session(random_table(5, seed=6), sampling=REJECTION)
    distributions = warp(random_table(5, seed=5)[0, :3], REJECTION)
    single = session.tree((1, 2, 3), (-1, -1, 0), list(distributions))
    levels = session.tree((1, 2, 3), (-1, -1, 0), [distributions[:2], distributions[2:]])
    assert torch.equal(single.q, distributions)
    assert torch.equal(levels.q, distributions)
    assert (
        single.draw_mode,
        session.tree((1,), (-1,), [distributions[:1]], "independent").draw_mode,
    ) == ("without_replacement", "independent")


@pytest.mark.parametrize("width", [3, 5, 8])
def test_logits_of_another_width_are_cut_or_padded_to_the_targets(
    open_session, random_table, width
):
    session = open_session(random_table(5, seed=6), sampling=REJECTION)
    rows = torch.randn(1, width, generator=torch.Generator().manual_seed(1))
    _, q = session.pick(after(rows))
    filled = torch.full((1, 5), -math.inf)
    filled[:, : min(width, 5)] = rows[:, :5]
    torch.testing.assert_close(q, warp(filled, REJECTION))
    assert q.sum().item() == pytest.approx(1.0)


def test_pending_tokens_are_those_a_state_has_not_read(opened):
    session = opened(budget=20)
    assert session.pending_tokens(0).ids.tolist() == [[4, 0, 1]]
    step(session, 2, 3)
    assert session.tokens() == [4, 0, 1, 2, 3, 4]
    assert session.pending_tokens(5).ids.tolist() == [[4]]
    assert session.pending_tokens(4).ids.tolist() == [[3, 4]]
    assert session.pending_tokens(0).ids.tolist() == [[4, 0, 1, 2, 3, 4]]


def test_the_newest_token_is_already_on_the_device(opened, monkeypatch):
    session = opened(budget=20)
    step(session, 2, 3)
    monkeypatch.setattr(host, "ids", lambda *_: pytest.fail("sent again"))
    assert session.pending_tokens(5).ids.tolist() == [[4]]
    monkeypatch.undo()
    assert session.pending_tokens(4).ids.tolist() == [[3, 4]]


def test_before_prefill_the_prompt_is_pending(open_session, successor_table):
    session = open_session(successor_table(CYCLE), prompt=(4, 0))
    assert session.pending_tokens(0).ids.tolist() == [[4, 0]]


# ---- workspace ----------------------------------------------------------------------------------


@pytest.fixture
def workspace(table_decoder, random_table):
    decoders = {
        "target": table_decoder("target", random_table(5, seed=1)),
        "draft": table_decoder("draft", random_table(5, seed=2)),
    }
    return Workspace(decoders, capacity=16)


def request(prompt_id="mini/0"):
    return Request(prompt_id, 0, (1, 2), StopRule(frozenset(), 8))


def test_states_are_reused_between_sessions_and_cleared(workspace):
    first = Session(workspace, request(), Sampling())
    first.prefill()
    allocated = workspace.state_bytes
    second = Session(workspace, request("mini/1"), Sampling())
    assert second.state is first.state
    assert second.state.length() == 0
    assert workspace.state_bytes == allocated


def test_every_state_of_a_session_is_separate(workspace):
    session = Session(workspace, request(), Sampling())
    draft = session.draft()
    states = [session.state, *(session.new_state(draft) for _ in range(2))]
    states.append(session.new_state(draft, slack=3))
    assert len({id(state) for state in states}) == 4
    assert states[-1].capacity == 16 + 3


def test_a_draft_that_is_the_target_has_a_state_of_its_own(workspace, table_decoder):
    target = workspace.decoders["target"]
    session = Session(Workspace({"target": target, "draft": target}, 16), request(), Sampling())
    assert session.new_state(session.draft()) is not session.state


def test_reserving_only_increases_the_capacity(workspace):
    workspace.reserve(40)
    assert Session(workspace, request(), Sampling()).state.capacity == 40
    workspace.reserve(20)
    assert workspace.capacity == 40


def test_allocated_bytes_count_all_weights_and_states(workspace):
    assert workspace.weight_bytes == 2 * 8 * 5**3
    session = Session(workspace, request(), Sampling())
    own = session.new_state(session.draft())
    assert workspace.state_bytes == session.state.nbytes + own.nbytes > 0


def test_a_missing_decoder_or_module_is_a_fault_that_names_it(workspace):
    session = Session(workspace, request(), Sampling())
    with pytest.raises(MethodFault, match="'medusa'"):
        session.draft("medusa")
    with pytest.raises(MethodFault, match="'target'"):
        PeerSession(workspace, request(), Sampling()).module("target")


def test_modules_and_tokenizer_are_the_runs(workspace):
    workspace.modules = {"target": "a module"}.__getitem__
    workspace.tokenizer = "a tokenizer"
    session = PeerSession(workspace, request(), Sampling())
    assert session.module("target") == "a module"
    assert session.tokenizer == "a tokenizer"


def test_memory_outlives_a_session_only_if_it_is_passed_in(workspace):
    memory = {}
    Session(workspace, request(), Sampling(), memory=memory).memory["seen"] = 1
    assert memory == {"seen": 1}
    assert Session(workspace, request(), Sampling()).memory == {}


def test_the_timer_runs_from_begin_to_the_last_token(opened):
    session = opened()
    text = session.harness.text
    assert text.started_ns < text.first_ns == text.last_ns
    first = text.first_ns
    step(session, 2)
    assert text.first_ns == first < text.last_ns


def test_forward_times_count_from_the_requests_start(opened):
    session = opened()
    before = time.perf_counter_ns()
    session.harness.begin()
    assert before <= session.harness.meter.clock.zero_ns <= session.harness.text.started_ns
