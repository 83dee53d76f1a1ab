"""Tests of Falcon's head in decoding and training, of its tree and of its sampling.

The head is compared with a direct implementation of the paper's definition.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from methods._heads.trees import static_tree
from methods.falcon.head import BLOCK, Falcon, FalconHead
from methods.falcon.method import KMASK2_8LAYER_TREE
from methods.falcon.method import Falcon as Method
from specbench_cli.audit.cases import Case
from specbench_cli.audit.enumeration import total_variation
from specbench_cli.audit.models.table import make_table_pair
from specbench_cli.engine.models.head import features
from specbench_cli.engine.types import Tokens
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.training.heads.losses import run_target, unroll
from tests.methods.exact import distance_from_target, target_distribution


@pytest.fixture(scope="module")
def head(target):
    return FalconHead(Falcon.random(target, seed=5), target)


def relaxed_mask(n, end):
    """Return the relaxed causal mask [n, n] of Falcon.

    A pair (token, feature) attends to all earlier pairs, to itself and to all pairs of its block.
    `end` is the last pair before drafting; the first drafted block starts right after it.
    """
    block = [(at - end - 1) // BLOCK for at in range(n)]
    return torch.tensor(
        [[key <= at or block[key] == block[at] for key in range(n)] for at in range(n)]
    )


def test_the_relaxed_mask_of_five_pairs_in_blocks_of_two():
    assert relaxed_mask(5, 2).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1],
    ]


def by_definition(head, target, text, path):
    """Return the logits [k, V] of the next block, from one pass over the text and the path.

    `path` holds the tokens of the complete blocks drafted after `text`.
    """
    module, n = head.head, len(text) - 1
    lstm = torch.nn.LSTM(2 * target.hidden_size, 64, num_layers=2, batch_first=True)
    for layer, lstm_cell in enumerate(module.lstm):
        for name, value in lstm_cell.named_parameters():
            getattr(lstm, f"{name}_l{layer}").data.copy_(value)
    with torch.no_grad():
        out = target.forward(Tokens(torch.tensor([text[:-1]])), target.new_state(n))
        known = list(features(out, (-1,), target))
        for done in range(0, len(path) + 1, BLOCK):
            ids = [*text[1:], *path[:done]]
            pairs = torch.stack(
                [
                    torch.cat((target.embed(torch.tensor(token)), f))
                    for token, f in zip(ids, known, strict=True)
                ]
            )
            windows = [
                pairs[[max(0, at - back) for back in range(BLOCK)][::-1]] for at in range(len(ids))
            ]
            rows = torch.stack(
                [module.fc(w[-1]) + module.up(lstm(w[None])[0][0, -1]) for w in windows]
            )
            attention, places = module.layer.self_attn, torch.arange(len(rows))[None]
            keys, values = attention.project_kv(rows[None], places)
            queries = attention._rotate(attention.q_proj(rows[None]), places, None)
            seen = torch.nn.functional.scaled_dot_product_attention(
                queries, keys, values, relaxed_mask(len(rows), n - 1)
            )
            o = rows + attention.o_proj(seen.transpose(1, 2).flatten(2))[0]
            o = o + module.layer.mlp(module.layer.post_attention_layernorm(o))
            predicted = o[[max(0, len(rows) - BLOCK + at) for at in range(BLOCK)]]
            known += list(predicted)
        return target.unembed(predicted)


def test_a_node_is_ranked_by_the_logits_of_its_level_in_the_block(drafting, target, head):
    for prompt in (0, 17):  # a prompt of one token, and one of many tokens
        method = Method(Method.Params(nodes=10, depth=4))
        session = drafting(method, head, prompt)
        for _ in range(2):
            draft = method.propose(session, 4)
            text, ids = list(session.tokens()), draft.tokens.tolist()
            paths, ranks = [], {}
            for node, parent in enumerate(draft.parents):
                above = paths[parent] if parent >= 0 else []
                rank = ranks[parent] = ranks.get(parent, -1) + 1
                whole = len(above) // BLOCK * BLOCK
                logits = by_definition(head, target, text, above[:whole])[len(above) - whole]
                assert ids[node] == int(logits.sort(descending=True).indices[rank])
                paths.append([*above, ids[node]])
            assert {len(path) for path in paths} == {1, 2, 3, 4}
            passes = [f.n_tokens for f in session.harness.forwards() if f.role == "draft"]
            inner = sum(len(path) == BLOCK for at, path in enumerate(paths) if at in draft.parents)
            assert passes[1:] == [BLOCK * inner]  # two passes for four levels
            method.observe(session, session.commit(session.verify(draft, session.score(draft))))
            session.harness.forwards()


def test_training_computes_the_logits_of_decoding(family, target, head):
    module, ids = family.modules["target"], list(family.prompts[17])
    with torch.no_grad():
        text = torch.tensor([ids])
        slots = torch.tensor([[0, 1, 6]])
        read = run_target(module, text, (-1,))
        for step, level in enumerate(unroll(head.head, module, text, read, slots, 2 * BLOCK)):
            whole = step // BLOCK * BLOCK
            for place, slot in enumerate(slots[0].tolist()):
                path = ids[slot + 2 : slot + 2 + whole]
                expected = by_definition(head, target, ids[: slot + 2], path)[step - whole]
                torch.testing.assert_close(level.logits[0, place], expected, rtol=1e-4, atol=1e-4)


def test_sampling_keeps_the_targets_distribution_and_the_authors_rule_does_not():
    """After a fully accepted draft, the authors' code samples without the temperature."""
    case = Case("near", make_table_pair("near"), Sampling("rejection", 0.5), budget=4, length=3)
    method = Method(Method.Params(nodes=2, depth=2, width=2))
    assert distance_from_target(method, case) < 1e-9
    target, draft = (table.double() for table in case.tables)
    before, last = case.prompt[-2:]
    authors_distribution = {}
    for first, p_first in enumerate((target[before, last] / 0.5).softmax(-1).tolist()):
        drafted = int(draft[last, first].argmax())
        for second, p_second in enumerate((target[last, first] / 0.5).softmax(-1).tolist()):
            temperature = 1.0 if second == drafted else 0.5
            for third, p in enumerate((target[first, second] / temperature).softmax(-1).tolist()):
                authors_distribution[first, second, third] = p_first * p_second * p
    assert sum(authors_distribution.values()) == pytest.approx(1)
    assert total_variation(authors_distribution, target_distribution(case)) > 0.02


def test_the_papers_tree_has_the_published_level_sizes():
    published = partial(static_tree, "kmask2_8layer_tree", choices=KMASK2_8LAYER_TREE)
    whole = published(165, 8, 20)
    assert [sum(len(node) == at for node in whole.nodes) for at in range(1, 9)] == [
        *(20, 15, 19, 23),
        *(21, 23, 21, 23),
    ]
    assert whole.nodes == KMASK2_8LAYER_TREE  # level by level, siblings by rank
    assert (0, 0, 0, 1, 2) not in whole.nodes
    assert {(0, 0, 0, 1, 1, 0), (3, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 0, 0, 7)} < {*whole.nodes}
    assert all(len(published(n, 8, n).nodes) == n for n in range(1, 166))
    assert max(len(node) for node in published(165, 4, 8).nodes) == 4
    assert Method.paper_params["nodes"] == len(whole.nodes)
