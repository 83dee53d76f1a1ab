"""Block verification: it is exact, and accepts as many tokens as any exact rule can."""

import itertools

import pytest
import torch
from scipy.optimize import linprog

from specbench_cli.engine.verify.chain import block, rejection
from tests.engine.verify.contexts import distribution_of_target, distributions

KINDS = ("peaked", "flat", "near", "equal", "disjoint", "cut")


def rows(q, p, ids):
    """Return q [m, V] and p [m + 1, V] along a draft."""
    contexts = [len(p) - 1, *ids]
    return q[contexts[:-1]], p[contexts]


def distribution_of_output(exact_distribution, rule, q, p, m, drawn=True):
    """Return the exact distribution of m + 1 tokens: a draft, its verification, and target
    draws."""
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

    return exact_distribution(run)


def mean_accepted(exact_distribution, rule, q, p, m):
    """Return the expected number of accepted draft tokens."""

    def run(random):
        ids = []
        for _ in range(m):
            ids.append(int(random.categorical(q[ids[-1] if ids else p.shape[-1]])))
        return int(rule(torch.tensor(ids), *rows(q, p, ids), random)[0])

    return sum(n * weight for n, weight in exact_distribution(run).items())


# ---- exactness ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab", "m"), [(2, 3), (3, 2), (4, 1)])
def test_the_output_has_the_targets_distribution(exact_distribution, kind, vocab, m):
    q, p = distributions(kind, vocab)
    distribution = distribution_of_output(exact_distribution, block, q, p, m)
    assert distribution == pytest.approx(distribution_of_target(p, m + 1), abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_a_deterministic_draft_does_not_change_the_distribution(exact_distribution, kind):
    q, p = distributions(kind, 4)  # more tokens than rows of p
    distribution = distribution_of_output(exact_distribution, block, q, p, 2, drawn=False)
    assert distribution == pytest.approx(distribution_of_target(p, 3), abs=1e-9)


def test_a_draft_that_ends_depending_on_its_tokens_does_not_change_the_distribution(
    exact_distribution,
):
    q, p = distributions("near", 3)

    def run(random):
        ids = []
        while len(ids) < 3 and (not ids or ids[-1] != 1):  # stops after token 1
            ids.append(int(random.categorical(q[ids[-1] if ids else 3])))
        accepted, following = block(torch.tensor(ids), *rows(q, p, ids), random)
        output = [*ids[:accepted], int(following)]
        while len(output) < 3:
            output.append(int(random.categorical(p[output[-1]])))
        return tuple(output[:3])

    assert exact_distribution(run) == pytest.approx(distribution_of_target(p, 3), abs=1e-9)


def test_without_a_draft_the_token_is_the_targets(exact_distribution):
    _, p = distributions("near", 3)
    empty = torch.empty(0, dtype=torch.int64)
    distribution = exact_distribution(
        lambda random: tuple(map(int, block(empty, None, p[3:], random)))
    )
    assert distribution == pytest.approx({(0, i): x for i, x in enumerate(p[3].tolist())})


# ---- acceptance ---------------------------------------------------------------------------------


def max_accepted(q, p, m):
    """Compute the maximum that any exact verification accepts, as a linear program.

    The variables are, for each draft x, the probability that x is drawn and i of its tokens are
    accepted. In addition, for each accepted prefix, the probability of each following token y,
    after which the output continues from p.
    """
    vocab = p.shape[-1]
    every = [list(itertools.product(range(vocab), repeat=n)) for n in range(m + 2)]
    accepted_at = {
        (x, i): at for at, (x, i) in enumerate(itertools.product(every[m], range(m + 1)))
    }
    behind = {}
    for i in range(m + 1):
        for prefix in every[i]:
            for y in range(vocab):
                behind[prefix, y] = len(accepted_at) + len(behind)
    size = len(accepted_at) + len(behind)
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
        equal([(accepted_at[x, i], 1.0) for i in range(m + 1)], chance(q, x, ()))
    for i in range(m + 1):  # some token follows each accepted prefix
        for prefix in every[i]:
            terms = [(behind[prefix, y], 1.0) for y in range(vocab)]
            terms += [(accepted_at[x, i], -1.0) for x in every[m] if x[:i] == prefix]
            equal(terms, 0.0)
    for z in every[m + 1]:  # the output's distribution
        terms = [(behind[z[:i], z[i]], chance(p, z[i + 1 :], z[: i + 1])) for i in range(m + 1)]
        equal(terms, chance(p, z, ()))
    gains = [0.0] * size
    for (_, i), at in accepted_at.items():
        gains[at] = -float(i)
    best = linprog(gains, A_eq=equations, b_eq=constants, bounds=(0, None))
    assert best.status == 0
    return -best.fun


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab", "m"), [(2, 3), (3, 2), (4, 2)])
@pytest.mark.parametrize("seed", [31, 57])
def test_it_accepts_at_least_as_many_tokens_as_single_tests(
    exact_distribution, kind, vocab, m, seed
):
    q, p = distributions(kind, vocab, seed=seed)
    whole, single = (
        mean_accepted(exact_distribution, rule, q, p, m) for rule in (block, rejection)
    )
    assert whole >= single - 1e-12
    if m > 1 and kind == "flat":
        assert whole > single


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab", "m"), [(2, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize("seed", [31, 57])
def test_no_exact_verification_accepts_more(exact_distribution, kind, vocab, m, seed):
    q, p = distributions(kind, vocab, seed=seed)
    found = mean_accepted(exact_distribution, block, q, p, m)
    assert found == pytest.approx(max_accepted(q, p, m), abs=1e-6)  # the solver's tolerance


def test_two_tokens_are_accepted_as_in_the_papers_example(exact_distribution):
    # p(b) = 2/3 and q(b) = 1/3 in all contexts: single tests accept 10/9 of two tokens, blocks
    # 11/9.
    p, q = (torch.tensor([[1 - b, b]] * 3, dtype=torch.float64) for b in (2 / 3, 1 / 3))
    whole, single = (
        mean_accepted(exact_distribution, rule, q, p, 2) for rule in (block, rejection)
    )
    assert (single, whole) == (pytest.approx(10 / 9), pytest.approx(11 / 9))


@pytest.mark.parametrize("seed", [31, 57])
def test_a_draft_of_the_targets_own_distribution_is_fully_accepted(exact_distribution, seed):
    q, p = distributions("equal", 3, seed=seed)
    assert mean_accepted(exact_distribution, block, q, p, 3) == pytest.approx(3.0)


def test_a_draft_token_of_target_probability_zero_is_never_accepted(exact_distribution):
    q, p = distributions("disjoint", 4)
    assert mean_accepted(exact_distribution, block, q, p, 2) == 0.0


@pytest.mark.parametrize("seed", range(6))
def test_one_token_is_verified_as_by_rejection(exact_distribution, seed):
    q, p = distributions("flat", 4, seed=seed)
    for token in range(4):
        case = (torch.tensor([token]), *rows(q, p, [token]))
        both = (
            exact_distribution(lambda random, r=rule, c=case: tuple(map(int, r(*c, random))))
            for rule in (block, rejection)
        )
        whole, single = both
        assert whole == pytest.approx(single, abs=1e-12)
