"""Chimera's draft model, compared with its definition, in decoding, in training and from a file."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import silu

from methods.chimera.head import LEVELS, Chimera, ChimeraHead
from methods.chimera.method import Chimera as Method
from specbench_cli.engine.models.head import features
from specbench_cli.engine.types import Tokens
from specbench_cli.errors import EnvironmentFault
from specbench_cli.training.heads import build as head_build
from specbench_cli.training.heads.losses import run_target, unroll


@pytest.fixture(scope="module")
def head(target):
    return ChimeraHead(Chimera.random(target, seed=5), target)


def by_definition(head, target, text, path):
    """Return the logits after a path drafted after a text: the layer over [H ; z], without a
    cache."""
    module, n = head.head, len(text) - 1
    with torch.no_grad():
        out = target.forward(
            Tokens(torch.tensor([text[:-1]])), target.new_state(n), captured_layers=()
        )
        h = features(out, (-1,), target)
        ids = [*text, *path]
        zs = []
        for end in range(n, len(ids)):  # the last committed token, and those of the path
            known = ids[1 : end + 1]  # the tokens of the rows: the text's first token has no row
            last = [known[0]] * 3 + known if len(known) < 3 else known
            gram = torch.cat([target.embed(torch.tensor(token)) for token in last[-3:]])
            zs.append(module.last(silu(module.fc(gram))))
        rows = torch.cat((h, torch.stack(zs)))
        layer, attention = module.layer, module.layer.self_attn
        places = torch.arange(len(rows))[None]
        normed = layer.input_layernorm(rows)[None]
        keys, values = attention.project_kv(normed, places)
        queries = attention._rotate(attention.q_proj(normed), places, None)
        causal = torch.ones(len(rows), len(rows), dtype=torch.bool).tril()
        seen = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, causal)
        o = rows + attention.o_proj(seen.transpose(1, 2).flatten(2))[0]
        o = o + layer.mlp(layer.post_attention_layernorm(o))
        mixed = module.mixed[len(path)](torch.cat((h[-1], o[-1])))
        return target.unembed(mixed)


def test_nodes_are_ranked_by_the_layer_over_context_and_trigrams(drafting, target, head):
    for prompt in (0, 17):  # of one token, and of many
        method = Method(Method.Params(nodes=8))
        session = drafting(method, head, prompt)
        for _ in range(3):
            draft = method.propose(session, 3)
            text, ids = list(session.tokens()), draft.tokens.tolist()
            paths = []
            ranks: dict[int, int] = {}
            for node, parent in enumerate(draft.parents):
                above = paths[parent] if parent >= 0 else []
                rank = ranks[parent] = ranks.get(parent, -1) + 1
                ranked = by_definition(head, target, text, above).sort(descending=True).indices
                assert ids[node] == int(ranked[rank])
                paths.append([*above, ids[node]])
            assert max(map(len, paths)) == LEVELS
            method.observe(session, session.commit(session.verify(draft, session.score(draft))))


def test_training_drafts_what_decoding_does(family, target, head):
    module, ids = family.modules["target"], list(family.prompts[17])
    with torch.no_grad():
        text = torch.tensor([ids])
        slots = torch.tensor([[0, 1, 6]])
        read = run_target(module, text, (-1,))
        for level, step in enumerate(unroll(head.head, module, text, read, slots, LEVELS)):
            for place, slot in enumerate(slots[0].tolist()):
                path = ids[slot + 2 : slot + 2 + level]
                due = by_definition(head, target, ids[: slot + 2], path)
                torch.testing.assert_close(step.logits[0, place], due, rtol=1e-4, atol=1e-4)


def test_a_packed_chat_reads_nothing_of_the_previous_one(family, head):
    module = family.modules["target"]
    first, second = family.prompts[17][:9], family.prompts[13][:8]
    slots = torch.tensor([[0, 1, 2, 4]])
    with torch.no_grad():
        alone = torch.tensor([second])
        packed, starts = torch.tensor([[*first, *second]]), torch.tensor([[0] * 9 + [9] * 8])
        found = [
            list(unroll(head.head, module, ids, run_target(module, ids, (-1,), begin), at, LEVELS))
            for ids, begin, at in ((alone, None, slots), (packed, starts, slots + 9))
        ]
    for here, there in zip(*found, strict=True):
        torch.testing.assert_close(here.logits, there.logits, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def new(family):
    """Return a draft model as training starts with it."""
    schedule, config = head_build.SCHEDULES["chimera"], family.modules["target"].config
    return head_build.build_head(
        schedule, config, 0, [], lambda captured_layers: torch.ones(len(captured_layers) * 32)
    )


def test_a_new_draft_model_predicts_the_targets_own_next_token_for_any_path(new):
    h, o = torch.randn(2, 32)
    for mixed in new.mixed:
        assert mixed(torch.cat((h, o))).equal(h)


def test_a_file_has_the_whole_head_and_an_incomplete_one_is_refused(family, target, new, tmp_path):
    config = head_build.make_head_config(family.modules["target"].config, new.recipe.mlp)
    head_build.export(new, config, tmp_path, {"kind": "chimera"})
    again = ChimeraHead.load(tmp_path, {"target": target}).head
    for name, tensor in new.state_dict().items():
        assert again.state_dict()[name].equal(tensor.half().float())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["trigram.1.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(EnvironmentFault, match=r"missing tensor last\.weight"):
        ChimeraHead.load(tmp_path, {"target": target})
