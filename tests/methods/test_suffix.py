"""Tests of SuffixDecoding: its drafts, compared with a naive search, and its memory."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from methods.suffix.method import Suffix, SuffixParams
from specbench_cli.engine.batch import Batch
from specbench_cli.engine.learning import Memory
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.types import Outcome
from specbench_cli.engine.verify.sampling import Sampling

NOTHING = Outcome((), (), (), 0)
texts = st.lists(st.integers(0, 2), min_size=2, max_size=20)


class FakeSession(SimpleNamespace):
    """The part of a session that drafting uses, with a prompt and the output so far."""

    def __init__(self, prompt, output=(), memory=None):
        super().__init__(text=[*prompt, *output], prompt=len(prompt), finish=None)
        self.memory = {} if memory is None else memory
        self.tokens, self.output = lambda: self.text, lambda: self.text[self.prompt :]
        self.chain, self.reserve = list, lambda nodes: None
        self.tree = lambda ids, parents: (ids, parents)


def propose(prompt, output=(), *, store=None, limit=100, **params):
    method, session = Suffix(SuffixParams(**params)), FakeSession(prompt, output, store)
    method.start(session)
    return method.propose(session, limit)


def remember_outputs(store, outputs, **params):
    """Add outputs to the store, as if they had been decoded before."""
    for output in outputs:
        method, session = Suffix(SuffixParams(**params)), FakeSession((), output, store)
        method.start(session)
        method.propose(session, 5)
        session.finish = "length"
        method.observe(session, NOTHING)


def count_occurrences(sequences, string):
    n = len(string)
    return sum(text[at : at + n] == string for text in sequences for at in range(len(text)))


def naive_score(text, earlier, *, depth, factor, nodes, least, limit):
    """Return the best score, by searching all texts for every suffix.

    Return None if two next tokens are equally frequent, because either may be drafted.
    """
    best = 0.0
    for sequences in ([text], earlier):
        for n in range(1, min(depth, len(text) + 1)):
            string, score, p = text[-n:], 0.0, 1.0
            longest = min(int(factor * n), nodes, limit)
            known = count_occurrences(sequences, string) - (sequences == [text])
            while known > 0 and longest and len(string) < depth:
                after = [count_occurrences(sequences, [*string, token]) for token in range(3)]
                p *= max(after) / count_occurrences(sequences, string)
                if p < least:
                    break
                score += p
                if after.count(max(after)) > 1:
                    return None
                string, longest = [*string, after.index(max(after))], longest - 1
            best = max(best, score)
    return best


@pytest.mark.smoke
def test_the_draft_grows_with_the_match():
    text = [5, 6, 7, 8, 9, 1, 5, 6]
    assert propose(text) == [7, 8]
    assert propose([*text, 7]) == [8, 9, 1]
    assert propose([*text, 7], factor=2) == [8, 9, 1, 5, 6, 7]
    assert propose([*text, 7], nodes=1) == [8]
    assert propose([*text, 7], limit=2) == [8, 9]
    assert propose([*text, 7], limit=0) == []


def test_a_token_below_the_least_probability_is_not_drafted():
    text = [1, 2, 1, 3, 1, 4, 1]  # 1/4 each: the 1 at the end counts as an occurrence
    assert propose(text, least=0.25) == [2]
    assert propose(text, least=0.3) == []


@given(
    texts,
    st.lists(texts, max_size=3),
    st.integers(2, 8),
    st.integers(1, 3),
    st.integers(0, 6),
    st.integers(0, 20),
)
@settings(max_examples=200, deadline=None)
def test_the_score_of_the_draft_is_the_best_of_a_naive_search(
    text, earlier, depth, factor, limit, prompt
):
    params = {"depth": depth, "factor": factor, "nodes": 4, "least": 0.1}
    memory = {}
    remember_outputs(memory, earlier, **params)
    draft = propose(text[:prompt], text[prompt:], store=memory, limit=limit, **params)
    earlier = [*earlier, text[prompt:]]
    expected = naive_score(text, earlier, limit=limit, **params)
    if expected is None:
        return
    assert bool(draft) == (expected > 0)
    scores = []
    for sequences in ([text], earlier):
        for n in range(1, min(depth, len(text) + 1)):
            string, p, score = text[-n:], 1.0, 0.0
            for token in draft[: int(factor * n)]:
                before = count_occurrences(sequences, string)
                p *= count_occurrences(sequences, [*string, token]) / before if before else 0.0
                string, score = [*string, token], score + p * (len(string) < depth)
            scores.append(score)
    assert not draft or max(scores) == pytest.approx(expected)


def test_a_match_of_the_whole_text_is_used():
    memory = {}
    remember_outputs(
        memory, [[1, 2, 9, 9], [1, 2, 9, 9], [0, 2, 7], [3, 2, 7], [4, 2, 7], [5, 2, 7]]
    )
    assert propose([1, 2], store=memory) == [9, 9]  # by 2 alone: 7


def test_drafts_come_from_earlier_outputs_and_not_from_earlier_prompts():
    memory = {}
    method, session = Suffix(), FakeSession([1, 2, 3], [4, 5, 6], memory)
    method.start(session)
    method.propose(session, 5)
    session.finish = "eos"
    method.observe(session, NOTHING)
    assert propose([9, 4], store=memory) == [5]
    assert propose([9, 1], store=memory) == []
    assert propose([9, 4], store={}) == []
    assert propose([9, 4], store=memory, scope="prompt") == []


def test_an_active_output_is_in_the_second_tree_unless_switched_off():
    prompt, output = [1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3, 9], [1, 2, 4, 5, 1, 2, 4, 6, 1, 2]
    # After 1 2 comes 3 in half of the text's occurrences, and 4 in two thirds of the output's.
    assert propose(prompt, output)[0] == 4
    assert propose(prompt, output, active=False)[0] == 3
    assert propose(prompt, output, scope="prompt")[0] == 3
    assert propose(prompt, output, memory=0)[0] == 3  # like the authors' cache of size 0


def test_a_batch_drafts_from_active_outputs():
    for active in (True, False):
        memory, methods = {}, []
        for text in ([1, 2, 3, 4], [9, 1]):
            methods.append((Suffix(SuffixParams(active=active)), FakeSession((), text, memory)))
            methods[-1][0].start(methods[-1][1])
        assert methods[1][0].propose(methods[1][1], 5) == ([2] if active else [])


def test_a_batch_step_observes_all_outputs_before_it_drafts():
    memory = {}
    first, second = FakeSession((), [9], memory), FakeSession((), [1], memory)
    methods = [(Suffix(), first), (Suffix(), second)]
    for method, session in methods:
        method.start(session)
    for method, session in methods:
        session.text += [2] if session is second else [1]
        method.observe(session, NOTHING)
    assert methods[0][0].propose(first, 5) == [2]


def test_the_draft_length_limit_tolerates_rounding():
    text = [*range(60), *range(25)]
    assert 1.16 * 25 < 29
    assert propose(text, factor=1.16, nodes=40) == list(range(25, 54))


def test_memory_is_bounded_and_the_oldest_output_goes_first():
    memory = {}
    remember_outputs(memory, [[1, 2, 3], [4, 5, 6], [7, 8, 9]], memory=6)
    assert memory["outputs"].num_tokens == 6
    assert [propose([token], store=memory) for token in (1, 4, 7)] == [[], [5], [8]]
    remember_outputs(memory, [[1, 2, 3]], memory=0)
    assert memory["outputs"].num_tokens == 0


def test_a_tree_contains_several_continuations():
    text = [1, 2, 5, 1, 2, 6, 1, 2]
    ids, parents = propose(text, shape="tree", factor=2, nodes=4)
    assert sorted(ids[:2]) == [5, 6] and parents[:2] == (-1, -1)


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_sequences_of_a_batch_share_finished_outputs(family, open_session, plain, rule):
    sampling = Sampling(rule, 0.8 if rule == "coupled" else 0.0, seed=3)
    session = open_session(0, sampling)
    workspace, memory = session._workspace, Memory()
    requests = [
        Request(f"tiny/{i}", 0, family.prompts[i], StopRule(frozenset(), 10 + 5 * i))
        for i in (0, 1, 2)
    ]
    for _ in range(2):  # the second time all outputs were decoded before, and evicted
        batch = Batch(workspace, requests, sampling, memory=memory)
        steps = list(Suffix(SuffixParams(memory=40, depth=8)).generate_batch(batch))
        for i, each in enumerate(batch.sessions):
            assert list(each.output()) == plain(i, sampling).ids[: 10 + 5 * i]
    assert sum(len(step.outcome.path) for step in steps) > 0
    assert memory["outputs"].num_tokens <= 40
