"""Enumeration of all outcomes, and the reference distribution."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench_cli.audit.enumeration import (
    compute_distribution,
    enumerate_outcomes,
    total_variation,
)
from specbench_cli.audit.models.table import (
    TableDecoder,
    make_table_pair,
    random_table,
    successor_table,
)
from specbench_cli.audit.reference import Reference, truncate_output, warp_logits
from specbench_cli.engine.types import Tokens
from specbench_cli.engine.verify.sampling import Sampling, warp

DISTRIBUTION = torch.tensor([0.5, 0.0, 0.25, 0.25])


def test_every_outcome_is_enumerated_once_with_its_probability():
    def run(random):
        first = int(random.categorical(DISTRIBUTION))
        runs = int(random.bernoulli(torch.tensor([0.5, 0.5])).sum()) if first == 2 else 0
        return first, runs

    distribution = compute_distribution(run)
    assert distribution == {
        (0, 0): 0.5,
        (2, 0): 0.125,
        (2, 1): 0.0625,
        (2, 2): 0.0625,
        (3, 0): 0.25,
    }
    assert sum(weight for _, weight in enumerate_outcomes(run)) == pytest.approx(1.0)


def test_the_distance_of_distributions_is_the_total_variation():
    assert total_variation({"a": 0.5, "b": 0.5}, {"a": 0.25, "c": 0.75}) == pytest.approx(0.75)


@settings(deadline=None)
@given(
    st.lists(st.floats(-8, 8), min_size=2, max_size=6, unique_by=lambda x: round(x, 3)),
    st.floats(0.2, 3.0),
    st.integers(0, 4),
    st.floats(0.1, 1.0),
)
def test_two_implementations_of_warping_agree(logits, temperature, top_k, top_p):
    sampling = Sampling("rejection", temperature, top_k=top_k, top_p=top_p)
    ours, theirs = (
        warp_logits(logits, sampling),
        warp(torch.tensor(logits, dtype=torch.float64), sampling),
    )
    if sum(a > 0 for a in ours) == int(
        (theirs > 0).sum()
    ):  # top-p cuts exactly at a token's boundary
        assert ours == pytest.approx(theirs.tolist(), abs=1e-12)


def test_the_reference_distribution_is_the_product_of_its_rows():
    table, sampling = random_table(3, 1), Sampling("rejection", 0.7)
    reference = Reference(table, sampling)
    distribution = reference.joint_distribution((0, 1), (), 2)
    assert sum(distribution.values()) == pytest.approx(1.0)
    assert distribution[2, 0] == pytest.approx(
        reference.distribution(0, 1)[2] * reference.distribution(1, 2)[0]
    )
    ended = reference.joint_distribution((0, 1), (2,), 2)
    assert ended[(2,)] == pytest.approx(reference.distribution(0, 1)[2])


def test_the_reference_follows_a_table():
    assert Reference(successor_table([1, 2, 0]), Sampling()).decode("x", (0, 0), 4) == [1, 2, 0, 1]
    assert truncate_output([4, 5, 6, 7], {6}, 10) == [4, 5, 6]
    assert truncate_output([4, 5, 6, 7], (), 2) == [4, 5]


def test_a_table_reads_a_tree_if_a_mask_is_given():
    table = random_table(4, 3)
    decoder = TableDecoder("target", table)
    state = decoder.new_state(9)
    decoder.forward(Tokens(torch.tensor([[2, 3]])), state)
    state.commit(0, (0, 1))
    # The root, token 1, has the children 0 and 2. Node 3 is a child of the second.
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()
    positions = torch.tensor([[2, 3, 3, 4]])
    x = Tokens(torch.tensor([[1, 0, 2, 3]]))
    rows = decoder.forward(x, state, mask=mask, positions=positions, logits_at="all").logits[0]
    assert torch.equal(rows, table[[3, 1, 1, 2], [1, 0, 2, 3]])
    state.commit(0, (0, 2, 3))
    assert state.ids == [2, 3, 1, 2, 3]
    following = decoder.forward(Tokens(torch.tensor([[0]])), state).logits[0, -1]
    assert torch.equal(following, table[3, 0])


def test_a_row_at_a_wrong_position_reads_as_another_token():
    table = random_table(4, 3)
    decoder = TableDecoder("target", table)
    state = decoder.new_state(4)
    decoder.forward(Tokens(torch.tensor([[2]])), state)
    wrong = decoder.forward(Tokens(torch.tensor([[1]])), state, positions=torch.tensor([[2]]))
    assert torch.equal(wrong.logits[0, -1], table[2, 2])


def test_disjoint_tables_have_distance_one():
    target, draft = make_table_pair("disjoint", 4)
    assert (torch.minimum(target.softmax(-1), draft.softmax(-1)) == 0).all()
    assert not math.isnan(float(target.softmax(-1).sum()))
