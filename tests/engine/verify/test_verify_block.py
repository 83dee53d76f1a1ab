"""Block verification: the target's distribution exactly, and as many accepted tokens as any rule
has."""

import itertools

import pytest
import torch
from scipy.optimize import linprog

from specbench_cli.engine.verify.chain import block, rejection
from tests.engine.verify.contexts import distribution_of_target, distributions

KINDS = ("peaked", "flat", "near", "equal", "disjoint", "cut")


def rows(q, p, ids):
    """q [m, V] and p [m + 1, V] along a draft."""
    contexts = [len(p) - 1, *ids]
    return q[contexts[:-1]], p[contexts]


def distribution_of_output(exact_law, rule, q, p, m, drawn=True):
    """Exact distribution of m + 1 tokens: a draft, its verification, and target draws behind
    them."""
    vocab = p.shape[-1]

    def run(random):
        ids = []
        for _ in range(m):
            row = q[ids[-1] if ids else vocab]
            ids.append(int(random.categorical(row) if drawn else row.argmax()))
        q_rows, p_rows = rows(q, p, ids)
        accepted, following = rule(torch.tensor(ids), q_rows if drawn else None, p_rows, random)
        output = [*ids[:accepted], int(following)]
        while len(output) < m + 1:
            output.append(int(random.categorical(p[output[-1]])))
        return tuple(output)

    return exact_law(run)


def mean_accepted(exact_law, rule, q, p, m):
    """Expected number of draft tokens that stand, exactly."""

    def run(random):
        ids = []
        for _ in range(m):
            ids.append(int(random.categorical(q[ids[-1] if ids else p.shape[-1]])))
        return int(rule(torch.tensor(ids), *rows(q, p, ids), random)[0])

    return sum(n * weight for n, weight in exact_law(run).items())


# ---- exactness ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab", "m"), [(2, 3), (3, 2), (4, 1)])
def test_the_output_has_the_targets_distribution(exact_law, kind, vocab, m):
    q, p = distributions(kind, vocab)
    distribution = distribution_of_output(exact_law, block, q, p, m)
    assert distribution == pytest.approx(distribution_of_target(p, m + 1), abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_chosen_without_a_draw_bends_nothing(exact_law, kind):
    q, p = distributions(kind, 4)  # more tokens than there are rows of p
    distribution = distribution_of_output(exact_law, block, q, p, 2, drawn=False)
    assert distribution == pytest.approx(distribution_of_target(p, 3), abs=1e-9)


def test_a_draft_that_stops_where_its_own_tokens_say_so_bends_nothing(exact_law):
    q, p = distributions("near", 3)

    def run(random):
        ids = []
        while len(ids) < 3 and (not ids or ids[-1] != 1):  # stops behind token 1
            ids.append(int(random.categorical(q[ids[-1] if ids else 3])))
        accepted, following = block(torch.tensor(ids), *rows(q, p, ids), random)
        output = [*ids[:accepted], int(following)]
        while len(output) < 3:
            output.append(int(random.categorical(p[output[-1]])))
        return tuple(output[:3])

    assert exact_law(run) == pytest.approx(distribution_of_target(p, 3), abs=1e-9)


def test_without_a_draft_the_token_is_the_targets(exact_law):
    _, p = distributions("near", 3)
    empty = torch.empty(0, dtype=torch.int64)
    distribution = exact_law(lambda random: tuple(map(int, block(empty, None, p[3:], random))))
    assert distribution == pytest.approx({(0, i): x for i, x in enumerate(p[3].tolist())})


# ---- acceptance ---------------------------------------------------------------------------------


def most_accepted(q, p, m):
    """The most that any exact verification accepts of drafts of m tokens, as a linear program.

    Variables: for each draft x the chance that it comes and i of its tokens stand; for each prefix
    that stands, the chance of each token y behind it, after which the target goes on.
    """
    vocab = p.shape[-1]
    every = [list(itertools.product(range(vocab), repeat=n)) for n in range(m + 2)]
    stands = {(x, i): at for at, (x, i) in enumerate(itertools.product(every[m], range(m + 1)))}
    behind = {}
    for i in range(m + 1):
        for prefix in every[i]:
            for y in range(vocab):
                behind[prefix, y] = len(stands) + len(behind)
    size = len(stands) + len(behind)
    equations, constants = [], []

    def equal(terms, constant):
        row = [0.0] * size
        for at, factor in terms:
            row[at] += factor
        equations.append(row)
        constants.append(constant)

    def chance(distribution, ids, before):
        contexts = [*before, *ids][len(before) - 1 : -1] if before else [vocab, *ids[:-1]]
        return float(distribution[contexts, list(ids)].prod()) if ids else 1.0

    for x in every[m]:  # the draft's own distribution
        equal([(stands[x, i], 1.0) for i in range(m + 1)], chance(q, x, ()))
    for i in range(m + 1):  # some token follows
        for prefix in every[i]:
            terms = [(behind[prefix, y], 1.0) for y in range(vocab)]
            terms += [(stands[x, i], -1.0) for x in every[m] if x[:i] == prefix]
            equal(terms, 0.0)
    for z in every[m + 1]:  # the output's distribution
        terms = [(behind[z[:i], z[i]], chance(p, z[i + 1 :], z[: i + 1])) for i in range(m + 1)]
        equal(terms, chance(p, z, ()))
    accepted = [0.0] * size
    for (_, i), at in stands.items():
        accepted[at] = -float(i)
    best = linprog(accepted, A_eq=equations, b_eq=constants, bounds=(0, None))
    assert best.status == 0
    return -best.fun


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab", "m"), [(2, 3), (3, 2), (4, 2)])
@pytest.mark.parametrize("seed", [31, 57])
def test_it_accepts_no_less_than_single_tokens_do(exact_law, kind, vocab, m, seed):
    q, p = distributions(kind, vocab, seed=seed)
    whole, single = (mean_accepted(exact_law, rule, q, p, m) for rule in (block, rejection))
    assert whole >= single - 1e-12
    if m > 1 and kind == "flat":
        assert whole > single


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab", "m"), [(2, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize("seed", [31, 57])
def test_no_exact_verification_accepts_more(exact_law, kind, vocab, m, seed):
    q, p = distributions(kind, vocab, seed=seed)
    found = mean_accepted(exact_law, block, q, p, m)
    assert found == pytest.approx(most_accepted(q, p, m), abs=1e-6)  # the program's own tolerance


def test_two_tokens_are_accepted_as_in_the_papers_example(exact_law):
    # p(b) = 2/3 and q(b) = 1/3 in all contexts: 10/9 of two by single tokens, 11/9 by blocks.
    p, q = (torch.tensor([[1 - b, b]] * 3, dtype=torch.float64) for b in (2 / 3, 1 / 3))
    whole, single = (mean_accepted(exact_law, rule, q, p, 2) for rule in (block, rejection))
    assert (single, whole) == (pytest.approx(10 / 9), pytest.approx(11 / 9))


@pytest.mark.parametrize("seed", [31, 57])
def test_a_draft_of_the_targets_own_distribution_stands_whole(exact_law, seed):
    q, p = distributions("equal", 3, seed=seed)
    assert mean_accepted(exact_law, block, q, p, 3) == pytest.approx(3.0)


def test_a_draft_that_the_target_rules_out_never_stands(exact_law):
    q, p = distributions("disjoint", 4)
    assert mean_accepted(exact_law, block, q, p, 2) == 0.0


@pytest.mark.parametrize("seed", range(6))
def test_one_token_is_judged_as_by_rejection(exact_law, seed):
    q, p = distributions("flat", 4, seed=seed)
    for token in range(4):
        case = (torch.tensor([token]), *rows(q, p, [token]))
        both = (
            exact_law(lambda random, r=rule, c=case: tuple(map(int, r(*c, random))))
            for rule in (block, rejection)
        )
        whole, single = both
        assert whole == pytest.approx(single, abs=1e-12)
