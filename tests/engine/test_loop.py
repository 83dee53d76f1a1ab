"""The draft-verify loop: its counters, budget and trace, for any drafts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench_cli.engine.loop import draft_and_verify
from specbench_cli.engine.types import Draft, Outcome, Step
from specbench_cli.engine.verify.hooks import check_steps
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.errors import MethodFault

RULES = [Sampling(), Sampling("coupled", 0.9, seed=1), Sampling("rejection", 0.9, seed=1)]
CYCLE = (1, 2, 3, 4, 0)


class Scripted:
    """Method that proposes the given drafts in turn, and records the outcomes."""

    def __init__(self, *drafts):
        self.drafts = drafts
        self.heard = []
        self.lengths = []

    def start(self, session):
        self.heard.append("start")

    def propose(self, session, limit):
        assert limit == session.max_draft_length() >= 0
        turn = len(self.heard) - 1
        return session.chain(self.drafts[turn % len(self.drafts)][:limit])

    def observe(self, session, outcome):
        self.heard.append(outcome)
        self.lengths.append(session.state.length() - len(session.tokens()))


drafts = st.lists(st.lists(st.integers(0, 4), max_size=6).map(tuple), min_size=1, max_size=5)


@given(drafts, st.integers(1, 14), st.sets(st.integers(0, 4), max_size=2), st.sampled_from(RULES))
@settings(deadline=None, max_examples=150)
def test_counters_add_up_for_any_drafts(open_session, random_table, proposals, budget, eos, rule):
    session = open_session(
        random_table(5, seed=1), prompt=(3, 1, 2), budget=budget, eos=eos, sampling=rule
    )
    method = Scripted(*proposals)
    steps = list(draft_and_verify(method, session))
    output = session.output()

    assert 1 + sum(len(step.outcome.committed) for step in steps) == len(output) <= budget
    assert [x for step in steps for x in step.outcome.committed] == output[1:]
    assert [x for step in steps for x in step.outcome.origin] == session.harness.text.origin[1:]
    if session.finish == "length":
        assert len(output) == budget
        assert not eos & set(output)
    else:
        assert session.finish == "eos"
        assert output[-1] in eos
        assert not eos & set(output[:-1])
    for step in steps:
        accepted = step.outcome.origin.count("accepted")
        assert accepted == len(step.outcome.path) <= step.outcome.tested <= step.draft.levels
        assert 1 <= len(step.outcome.committed) <= step.draft.levels + 1
        assert step.outcome.path == tuple(range(accepted))
        drafted = step.draft.tokens.tolist()
        assert step.outcome.committed[:accepted] == tuple(drafted[:accepted])
    assert method.heard == ["start", *(step.outcome for step in steps)]
    assert all(length == -1 for length in method.lengths)


@pytest.mark.parametrize("rule", RULES[:2], ids=["greedy", "coupled"])
@given(drafts, st.integers(1, 14))
@settings(deadline=None, max_examples=50)
def test_the_tokens_are_vanillas_for_any_drafts(
    open_session, random_table, rule, proposals, budget
):
    def output(*drafts):
        session = open_session(random_table(5, seed=2), budget=budget, sampling=rule)
        list(draft_and_verify(Scripted(*drafts), session))
        return session.output()

    assert output(*proposals) == output(())


def test_only_the_last_step_can_be_cut(open_session, successor_table):
    session = open_session(successor_table(CYCLE), eos=[4], budget=20)
    method = Scripted((2,), (0,), (4, 0, 1, 2))
    steps = list(draft_and_verify(method, session))
    assert session.output() == [1, 2, 3, 4]
    assert [step.outcome.committed for step in steps] == [(2, 3), (4,)]


def test_an_output_that_ends_in_prefill_has_no_step(open_session, successor_table):
    session = open_session(successor_table(CYCLE), eos=[1])
    method = Scripted((2, 3))
    assert list(draft_and_verify(method, session)) == []
    assert method.heard == ["start"]


def test_drafts_are_clipped_to_the_budget(open_session, successor_table):
    session = open_session(successor_table(CYCLE), budget=6)
    steps = list(draft_and_verify(Scripted((2, 3), (0, 1)), session))
    assert [step.draft.nodes for step in steps] == [2, 1]
    assert [len(step.outcome.committed) for step in steps] == [3, 2]
    assert session.finish == "length"


def test_a_method_that_exceeds_its_limit_is_at_fault(open_session, successor_table):
    class Greedy(Scripted):
        def propose(self, session, limit):
            return session.chain((2, 3, 4))

    session = open_session(successor_table(CYCLE), budget=3)
    with pytest.raises(MethodFault, match="at most 1"):
        list(draft_and_verify(Greedy(), session))


def test_a_malformed_draft_is_reported_with_method_step_and_field(open_session, successor_table):
    class Cyclic(Scripted):
        name = "cyclic"

        def propose(self, session, limit):
            if session.max_draft_length() > 4:
                return super().propose(session, limit)
            return Draft(torch.tensor([2, 3]), parents=(1, 0))

    session = open_session(successor_table(CYCLE), budget=8)
    with pytest.raises(MethodFault, match=r"^cyclic, step 2, draft\.parents: 1 at node 0; allowed"):
        list(draft_and_verify(Cyclic((2,), (1,)), session))


def test_every_forward_is_metered_and_belongs_to_its_step(open_session, random_table):
    class Drafting(Scripted):
        """Method that makes two draft forwards per step, over the newest token."""

        def start(self, session):
            self.model = session.draft()
            self.state = session.new_state(self.model)
            self.model.forward(session.pending_tokens(0), self.state, logits_at=None)

        def propose(self, session, limit):
            for _ in range(min(2, limit)):
                self.model.forward(session.pending_tokens(len(session.tokens()) - 1), self.state)
            return session.chain((1, 2)[:limit])

        def observe(self, session, outcome):
            self.state.rollback(0, 3)

    session = open_session(
        random_table(5, seed=3), random_table(5, seed=4), prompt=(0, 1, 2), budget=9
    )
    steps = list(draft_and_verify(Drafting(), session))
    prefill = session.harness.meter.forwards[:2]
    assert [(f.model, f.role, f.n_tokens) for f in prefill] == [
        ("draft", "prefill", 3),
        ("target", "prefill", 3),
    ]
    assert [f for step in steps for f in step.forwards] == session.harness.meter.forwards[2:]
    for step in steps:
        *drafting, verifying = step.forwards
        assert [f.role for f in drafting] == ["draft"] * min(2, step.draft.nodes)
        assert (verifying.model, verifying.role) == ("target", "verify")
        assert verifying.n_tokens == step.draft.nodes + 1


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1, 2], r"Answering: propose must return a Draft, got list \[1, 2\]"),
        (None, "Answering: propose must return a Draft, got None"),
        (torch.tensor([1]), "propose must return a Draft, got Tensor"),
        (Draft([1, 2]), r"draft.tokens: list \[1, 2\], no tensor; must be \[nodes\] of int64"),
        (Draft(torch.tensor([1]), parents=3), "draft.parents: 3; must be a tuple of 1"),
        (Draft(torch.tensor([1]), (-1,), order=("a",)), r"draft.order: \('a',\); must be a tuple"),
        (
            Draft(torch.tensor([1]), draw_mode="independent", q=[0.5]),
            r"draft.q: list \[0.5\], no tensor; must",
        ),
    ],
)
def test_propose_must_return_a_draft(open_session, random_table, returned, message):
    class Answering(Scripted):
        def propose(self, session, limit):
            return returned

    drawn = Sampling("rejection", 1.0)
    session = open_session(random_table(5, seed=1), prompt=(3, 1), budget=8, sampling=drawn)
    with pytest.raises(MethodFault, match=message):
        list(draft_and_verify(Answering(), session))


def test_the_error_for_a_draft_beyond_the_limit_names_the_limit(open_session, random_table):
    class Beyond(Scripted):
        def propose(self, session, limit):
            return session.chain((1,) * (limit + 1))

    session = open_session(random_table(5, seed=1), prompt=(3, 1), budget=2, sampling=Sampling())
    with pytest.raises(
        MethodFault, match=r"1 levels proposed, but at most 0 are allowed \(`limit`\)"
    ) as caught:
        list(draft_and_verify(Beyond(), session))
    assert caught.value.hint.endswith("an empty draft if it is 0")


@pytest.mark.parametrize("returned", [3, [1], {"a": "b"}, {1: 2.0}, {"a": float("nan")}])
def test_observe_must_return_counts(open_session, random_table, returned):
    class Counting(Scripted):
        def observe(self, session, outcome):
            return returned

    session = open_session(random_table(5, seed=1), prompt=(3, 1), budget=8, sampling=Sampling())
    with pytest.raises(MethodFault, match="observe must return None or a dict of finite numbers"):
        list(draft_and_verify(Counting((1,)), session))


@pytest.mark.parametrize("returned", [None, 3, "abc", [None], [{"seq": 0}]])
def test_generate_must_yield_steps(returned):
    with pytest.raises(MethodFault, match="Scripted: generate must return an iterator of Steps"):
        list(check_steps(Scripted(), "generate", returned))


def test_a_step_of_an_unknown_sequence_is_named():
    step = Step(1, None, Outcome((), (3,), ("plain",), 0))
    assert list(check_steps(Scripted(), "generate_batch", [step], 2)) == [step]
    with pytest.raises(MethodFault, match="must return steps of sequences 0 to 0, got int 1"):
        list(check_steps(Scripted(), "generate", [step]))


def test_score_needs_a_draft(open_session, random_table):
    session = open_session(random_table(5, seed=1), prompt=(3, 1), budget=8, sampling=Sampling())
    session.prefill()
    with pytest.raises(MethodFault, match="expected a Draft to score, got a list"):
        session.score([1, 2])
