"""Tests of Token Recycling: the matrix of the target's best next tokens, and the tree from it."""

import pytest
import torch

from methods.token_recycling import TokenRecycling, TokenRecyclingParams
from specbench_cli.engine.learning import Memory
from specbench_cli.engine.verify.sampling import Sampling

SMALL = TokenRecyclingParams(width=4, nodes=12, depth=4)
COUPLED = Sampling("coupled", 0.8, seed=3)


def decode_steps(session, params=SMALL):
    """Yield the method, the matrix and the last token before each step, and the step."""
    method = TokenRecycling(params)
    before = None
    for step in method.generate(session):
        root = session.tokens()[-1 - len(step.outcome.committed)]
        yield method, before, root, step
        before = method.next.clone()


def test_the_paper_s_tree_has_80_nodes_on_6_levels_of_at_most_8_children(open_session):
    method = TokenRecycling()
    method.start(open_session(0))
    nodes = set(method.shape.nodes)
    assert len(nodes) == 80 and method.shape.depth == 6
    assert max(map(max, nodes)) == 7
    assert all(node[:-1] in nodes or len(node) == 1 for node in nodes)


@pytest.mark.smoke
@pytest.mark.parametrize("sampling", [Sampling(), COUPLED], ids=lambda s: s.rule)
def test_a_node_is_the_matrix_entry_of_its_parent(open_session, sampling):
    for number, (method, before, root, step) in enumerate(decode_steps(open_session(3, sampling))):
        if not number:
            continue  # the matrix was empty then
        ids, parents = step.draft.tokens.tolist(), step.draft.parents
        shape = method.shape.truncate(step.draft.levels, method.width)
        for at, parent in enumerate(parents):
            above = root if parent < 0 else ids[parent]
            assert ids[at] == before[above, shape.nodes[at][-1]]


def test_the_matrix_has_the_targets_best_tokens_of_all_nodes(open_session):
    session = open_session(3)
    seen = 0
    for _, _, root, step in decode_steps(session):
        rows = session.verified_logits()
        known = [root, *step.draft.tokens.tolist()]
        table = session.memory["next"]
        for at, token in enumerate(known):
            if token in known[at + 1 :]:
                continue  # the last occurrence of a token counts
            assert table[token].tolist() == rows[at].topk(4).indices.tolist()
            seen += 1
    assert seen > 100


def test_the_last_row_of_a_token_is_kept(open_session):
    session = open_session(0)
    method = TokenRecycling(SMALL)
    method.start(session)
    vocab = session.target.vocab_size
    method.known = [torch.tensor([5]), torch.tensor([7, 5, 5])]
    rows = torch.zeros(4, vocab)
    for at, best in enumerate((10, 20, 30, 40)):
        rows[at, best : best + 4] = torch.tensor([4.0, 3, 2, 1])
    session.verified_logits = lambda: rows
    method.observe(session, None)
    assert method.next[5].tolist() == [40, 41, 42, 43]
    assert method.next[7].tolist() == [20, 21, 22, 23]
    assert method.next.count_nonzero() == 8


@pytest.mark.parametrize("sampling", [Sampling(), COUPLED], ids=lambda s: s.rule)
def test_memory_of_other_prompts_saves_steps_and_keeps_the_output(open_session, plain, sampling):
    memory, counts = Memory(), {"cold": 0, "hot": 0}
    for prompt in (4, 9, 4):
        cold, hot = open_session(prompt, sampling), open_session(prompt, sampling, memory=memory)
        counts["cold"] += len(list(TokenRecycling(SMALL).generate(cold)))
        counts["hot"] += len(list(TokenRecycling(SMALL).generate(hot)))
        assert cold.output() == hot.output() == plain(prompt, sampling).ids
    assert counts["hot"] < counts["cold"]


def test_with_scope_prompt_the_memory_stays_empty(open_session):
    session = open_session(4)
    list(TokenRecycling(SMALL.model_copy(update={"scope": "prompt"})).generate(session))
    assert not session.memory
