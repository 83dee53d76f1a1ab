"""Tests of STAND: its table of mean target distributions, and the trees drawn from it."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from methods.stand import Stand, StandParams
from specbench_cli.engine.learning import Memory
from specbench_cli.engine.verify.sampling import Sampling

SMALL = StandParams(nodes=12, depth=3)
COUPLED = Sampling("coupled", 0.8, seed=3)
REJECTION = Sampling("rejection", 0.8, seed=3)


def teach(session, *distributions, **params):
    """Return a method that observed each of the target's distributions after the text 7 8."""
    method = Stand(StandParams(**params))
    method.start(session)
    for distribution in distributions:
        seen = SimpleNamespace(
            tokens=lambda: [7, 8, 9],
            verified_logits=lambda distribution=distribution: torch.tensor([distribution]).log(),
            device=session.device,
        )
        method.observe(seen, SimpleNamespace(committed=(9,), path=()))
    return method


@pytest.mark.smoke
def test_the_table_keeps_the_best_tokens_of_the_mean_distribution(open_session):
    method = teach(open_session(0), [0.5, 0.3, 0.1, 0.1], [0.1, 0.1, 0.7, 0.1], kept=2)
    # The best two of the first distribution are 0 and 1 (0.5, 0.3), of the second 2 and 0
    # (0.7, 0.1).
    count, distribution = method.table[8,]
    assert count == 2 and method.table[7, 8] == (count, distribution)
    assert distribution == pytest.approx({2: 0.35, 0: 0.3})
    assert set(method.table) == {(8,), (7, 8)}


def test_the_longest_known_n_gram_gives_the_distribution(open_session):
    method = teach(open_session(0), [0.1, 0.9])
    method.table[8,] = (1, {5: 1.0})
    assert method._distribution((-1, (), (3, 7, 8))) == pytest.approx({1: 0.9, 0: 0.1})
    assert method._distribution((-1, (), (3, 6, 8))) == {5: 1.0}
    assert method._distribution((-1, (), (3, 6, 4))) is None


def test_memory_is_bounded_and_the_oldest_n_gram_goes_first(open_session):
    session = open_session(0, budget=30)
    method = Stand(StandParams(memory=20, nodes=4, depth=2))
    for _ in method.generate(session):
        assert len(method.table) <= 20
    assert tuple(session.tokens()[-2:-1]) in method.table


def test_under_rejection_siblings_come_in_the_order_of_draws_without_replacement(open_session):
    distribution = {1: 0.5, 2: 0.3, 3: 0.2}
    orders = Counter()
    for prompt in range(40):
        session = open_session(prompt, Sampling("rejection", 1.0, seed=prompt))
        session.prefill()
        method = Stand(StandParams(nodes=3, depth=1))
        method.start(session)
        method.table[session.tokens()[-1],] = (1, distribution)
        for _ in range(25):
            draft = method.propose(session, 1)
            assert draft.draw_mode == "without_replacement" and draft.parents == (-1, -1, -1)
            assert draft.q[0][[1, 2, 3]].tolist() == pytest.approx([0.5, 0.3, 0.2])
            assert draft.q[0].sum() == pytest.approx(1)
            orders[tuple(draft.tokens.tolist())] += 1
    for first, second, third in orders:  # Plackett-Luce; 1,000 draws
        expected = distribution[first] * distribution[second] / (1 - distribution[first])
        assert orders[first, second, third] / 1000 == pytest.approx(expected, abs=0.06)
    assert len(orders) == 6


def test_a_node_carries_the_distribution_after_its_own_parent(open_session):
    """The audit does not test this: its outputs are too short for two n-grams of one level."""
    session = open_session(0, Sampling("rejection", 1.0, seed=1))
    session.prefill()
    method = Stand(StandParams(nodes=12, depth=2))
    method.start(session)
    distributions = {
        session.tokens()[-1]: {1: 0.5, 2: 0.5},
        1: {3: 0.9, 4: 0.1},
        2: {3: 0.2, 5: 0.8},
    }
    method.table |= {(token,): (1, distribution) for token, distribution in distributions.items()}
    draft = method.propose(session, 2)
    ids, seen = draft.tokens.tolist(), set()
    for node, parent in enumerate(draft.parents):
        token = ids[parent] if parent >= 0 else session.tokens()[-1]
        seen.add(token)
        distribution = {
            at: float(draft.q[node, at]) for at in draft.q[node].nonzero().flatten().tolist()
        }
        assert distribution == pytest.approx(distributions[token])
    assert seen == set(distributions)


@pytest.mark.parametrize("sampling", [Sampling(), COUPLED], ids=lambda s: s.rule)
def test_memory_of_other_prompts_saves_steps_and_keeps_the_output(open_session, plain, sampling):
    memory, counts = Memory(), {"cold": 0, "hot": 0}
    for prompt in (4, 9, 4):
        cold, hot = open_session(prompt, sampling), open_session(prompt, sampling, memory=memory)
        counts["cold"] += len(list(Stand(SMALL).generate(cold)))
        counts["hot"] += len(list(Stand(SMALL).generate(hot)))
        assert cold.output() == hot.output() == plain(prompt, sampling).ids
    assert counts["hot"] < counts["cold"]


def test_the_root_has_at_most_the_children_of_its_template(open_session):
    session = open_session(4, REJECTION)
    method = Stand(SMALL)
    for step in method.generate(session):
        parents = step.draft.parents
        assert len(parents) <= 12 and step.draft.levels <= 3
        children = Counter(parents)
        assert children[-1] <= method.children[()]
