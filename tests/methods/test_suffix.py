"""SuffixDecoding: what it drafts against a naive reading of the paper, and what it remembers."""

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


class Seen(SimpleNamespace):
    """As much of a session as drafting sees; a prompt, and an output that is there already."""

    def __init__(self, prompt, output=(), memory=None):
        super().__init__(text=[*prompt, *output], prompt=len(prompt), finish=None)
        self.memory = {} if memory is None else memory
        self.tokens, self.output = lambda: self.text, lambda: self.text[self.prompt :]
        self.chain, self.reserve = list, lambda nodes: None
        self.tree = lambda ids, parents: (ids, parents)


def propose(prompt, output=(), *, kept=None, limit=100, **params):
    method, seen = Suffix(SuffixParams(**params)), Seen(prompt, output, kept)
    method.start(seen)
    return method.propose(seen, limit)


def serve(kept, outputs, **params):
    """Have outputs been decoded before."""
    for output in outputs:
        method, seen = Suffix(SuffixParams(**params)), Seen((), output, kept)
        method.start(seen)
        method.propose(seen, 5)
        seen.finish = "length"
        method.observe(seen, NOTHING)


def occurrences(sequences, string):
    n = len(string)
    return sum(text[at : at + n] == string for text in sequences for at in range(len(text)))


def naive_score(own, earlier, *, depth, factor, nodes, least, limit):
    """The best score, by trying every suffix with a search through all texts."""
    best = 0.0
    for sequences in ([own], earlier):
        for n in range(1, min(depth, len(own) + 1)):
            string, score, p = own[-n:], 0.0, 1.0
            most = min(int(factor * n), nodes, limit)
            known = occurrences(sequences, string) - (sequences == [own])
            while known > 0 and most and len(string) < depth:
                after = [occurrences(sequences, [*string, token]) for token in range(3)]
                p *= max(after) / occurrences(sequences, string)
                if p < least:
                    break
                score += p
                # Of equally frequent ones any may be drafted: then what follows is open.
                if after.count(max(after)) > 1:
                    return None
                string, most = [*string, after.index(max(after))], most - 1
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


def test_a_token_that_is_less_likely_than_allowed_is_not_drafted():
    text = [1, 2, 1, 3, 1, 4, 1]  # each with 1/4: the text's own end is counted
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
    own, earlier, depth, factor, limit, prompt
):
    how = {"depth": depth, "factor": factor, "nodes": 4, "least": 0.1}
    memory = {}
    serve(memory, earlier, **how)
    draft = propose(own[:prompt], own[prompt:], kept=memory, limit=limit, **how)
    earlier = [*earlier, own[prompt:]]
    due = naive_score(own, earlier, limit=limit, **how)
    if due is None:
        return
    assert bool(draft) == (due > 0)
    scores = []
    for sequences in ([own], earlier):
        for n in range(1, min(depth, len(own) + 1)):
            string, p, score = own[-n:], 1.0, 0.0
            for token in draft[: int(factor * n)]:
                before = occurrences(sequences, string)
                p *= occurrences(sequences, [*string, token]) / before if before else 0.0
                string, score = [*string, token], score + p * (len(string) < depth)
            scores.append(score)
    assert not draft or max(scores) == pytest.approx(due)


def test_a_match_of_the_whole_text_counts_which_the_authors_loop_leaves_out():
    memory = {}
    serve(memory, [[1, 2, 9, 9], [1, 2, 9, 9], [0, 2, 7], [3, 2, 7], [4, 2, 7], [5, 2, 7]])
    assert propose([1, 2], kept=memory) == [9, 9]  # by 2 alone: 7


def test_earlier_outputs_are_drafted_from_and_earlier_prompts_are_not():
    memory = {}
    method, seen = Suffix(), Seen([1, 2, 3], [4, 5, 6], memory)
    method.start(seen)
    method.propose(seen, 5)
    seen.finish = "eos"
    method.observe(seen, NOTHING)
    assert propose([9, 4], kept=memory) == [5]
    assert propose([9, 1], kept=memory) == []
    assert propose([9, 4], kept={}) == []
    assert propose([9, 4], kept=memory, scope="prompt") == []


def test_an_output_that_has_not_ended_is_in_the_second_tree_unless_switched_off():
    prompt, output = [1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3, 9], [1, 2, 4, 5, 1, 2, 4, 6, 1, 2]
    # Behind 1 2 comes 3 in half of the text's cases, and 4 in two thirds of the output's.
    assert propose(prompt, output)[0] == 4
    assert propose(prompt, output, active=False)[0] == 3
    assert propose(prompt, output, scope="prompt")[0] == 3
    assert propose(prompt, output, memory=0)[0] == 3  # as their cache of no requests


def test_a_batch_drafts_from_outputs_that_have_not_ended():
    for active in (True, False):
        memory, methods = {}, []
        for text in ([1, 2, 3, 4], [9, 1]):
            methods.append((Suffix(SuffixParams(active=active)), Seen((), text, memory)))
            methods[-1][0].start(methods[-1][1])
        assert methods[1][0].propose(methods[1][1], 5) == ([2] if active else [])


def test_one_step_of_a_batch_reads_all_outputs_before_any_proposes():
    memory = {}
    first, second = Seen((), [9], memory), Seen((), [1], memory)
    methods = [(Suffix(), first), (Suffix(), second)]
    for method, seen in methods:
        method.start(seen)
    for method, seen in methods:
        seen.text += [2] if seen is second else [1]
        method.observe(seen, NOTHING)
    assert methods[0][0].propose(first, 5) == [2]


def test_a_match_whose_limit_is_a_whole_number_but_for_rounding_drafts_all_of_it():
    text = [*range(60), *range(25)]
    assert 1.16 * 25 < 29
    assert propose(text, factor=1.16, nodes=40) == list(range(25, 54))


def test_memory_is_bounded_and_the_oldest_output_goes_first():
    memory = {}
    serve(memory, [[1, 2, 3], [4, 5, 6], [7, 8, 9]], memory=6)
    assert memory["outputs"].num_tokens == 6
    assert [propose([token], kept=memory) for token in (1, 4, 7)] == [[], [5], [8]]
    serve(memory, [[1, 2, 3]], memory=0)
    assert memory["outputs"].num_tokens == 0


def test_a_tree_holds_several_continuations():
    text = [1, 2, 5, 1, 2, 6, 1, 2]
    ids, parents = propose(text, shape="tree", factor=2, nodes=4)
    assert sorted(ids[:2]) == [5, 6] and parents[:2] == (-1, -1)


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_sequences_of_a_batch_share_what_ended_and_keep_their_own_text(
    family, open_session, plain, rule
):
    sampling = Sampling(rule, 0.8 if rule == "coupled" else 0.0, seed=3)
    session = open_session(0, sampling)
    workspace, memory = session._workspace, Memory()
    requests = [
        Request(f"tiny/{i}", 0, family.prompts[i], StopRule(frozenset(), 10 + 5 * i))
        for i in (0, 1, 2)
    ]
    for _ in range(2):  # the second time all of it was said before, and evicted meanwhile
        batch = Batch(workspace, requests, sampling, memory=memory)
        steps = list(Suffix(SuffixParams(memory=40, depth=8)).generate_batch(batch))
        for i, each in enumerate(batch.sessions):
            assert list(each.output()) == plain(i, sampling).ids[: 10 + 5 * i]
    assert sum(len(step.outcome.path) for step in steps) > 0
    assert memory["outputs"].num_tokens <= 40
