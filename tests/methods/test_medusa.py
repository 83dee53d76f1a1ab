"""Medusa's and Hydra's heads, compared with their formulas, and the checkpoints that are read."""

from __future__ import annotations

import json
import math
from hashlib import sha256
from itertools import pairwise

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import linear, silu

from methods._heads.trees import MC_SIM_7B_63, static_tree
from methods.clover.method import Clover
from methods.hydra.head import HydraHeads
from methods.hydra.method import Hydra
from methods.hydra_plus.method import HydraPlus
from methods.medusa.head import MedusaHeads
from methods.medusa.method import Medusa
from specbench_cli.audit.cases import Case
from specbench_cli.audit.enumeration import total_variation
from specbench_cli.audit.models.table import make_table_pair
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import EnvironmentFault
from tests.methods.exact import distance_from_target, target_distribution


@pytest.fixture(scope="module")
def rows(target):
    return torch.randn(3, target.hidden_size, generator=torch.Generator().manual_seed(1))


def stirred(head):
    """A head whose parameters are all drawn."""
    drawn = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=drawn) / 8)
    return head.ready()


def test_fresh_heads_say_the_targets_own_next_token(target, rows):
    decoders = {"target": target}
    due = target.unembed(rows)
    for own in (True, False):
        out = MedusaHeads(target, own_output=own).ready()(rows)
        torch.testing.assert_close(out, due.expand(4, -1, -1), rtol=1e-4, atol=1e-5)
    heads = HydraHeads.random(decoders)
    out = heads(rows, torch.tensor([5, 6, 7]), 0)
    torch.testing.assert_close(out.logits, due, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(heads(out.rows, torch.tensor([1, 2, 3]), 1).logits, out.logits)


@pytest.mark.parametrize("blocks", [1, 2])
def test_medusas_published_checkpoint_is_read_and_computes_its_formula(
    target, rows, tmp_path, blocks
):
    d, v, drawn = target.hidden_size, target.vocab_size, torch.Generator().manual_seed(3)
    tensors = {}
    for head in range(3):
        for block in range(blocks):
            name = f"{head}.{block}.linear"
            tensors[f"{name}.weight"] = torch.randn(d, d, generator=drawn)
            tensors[f"{name}.bias"] = torch.randn(d, generator=drawn)
        tensors[f"{head}.{blocks}.weight"] = torch.randn(v, d, generator=drawn)
    save_file(tensors, tmp_path / "model.safetensors")
    out = MedusaHeads.load(tmp_path, {"target": target})(rows)
    assert out.shape == (3, 3, v)
    for head in range(3):
        x = rows
        for block in range(blocks):
            name = f"{head}.{block}.linear"
            x = x + silu(linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"]))
        due = linear(x, tensors[f"{head}.{blocks}.weight"])
        torch.testing.assert_close(out[head], due, rtol=1e-4, atol=1e-3)


def changed(tensors, name, tensor):
    left = {key: each for key, each in tensors.items() if key != name}
    return left if tensor is None else left | {name: tensor}


@pytest.mark.parametrize(
    ("name", "tensor", "what"),
    [
        ("1.0.linear.bias", None, r"missing tensors: 1\.0\.linear\.bias"),
        ("1.1.weight", torch.zeros(7, 4), r"1\.1\.weight has shape \[7, 4\]; this target needs"),
        ("0.0.linear.bias", torch.tensor(torch.nan).repeat(48), "not finite"),
        ("fc.weight", torch.zeros(1), r"unexpected tensors: fc\.weight"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_with_the_reason(
    target, tmp_path, name, tensor, what
):
    d, v = target.hidden_size, target.vocab_size
    tensors = {}
    for head in range(2):
        tensors[f"{head}.0.linear.weight"] = torch.zeros(d, d)
        tensors[f"{head}.0.linear.bias"] = torch.zeros(d)
        tensors[f"{head}.1.weight"] = torch.zeros(v, d)
    if tensor is not None and name == "0.0.linear.bias":
        tensor = torch.full((d,), torch.nan)
    save_file(changed(tensors, name, tensor), tmp_path / "model.safetensors")
    with pytest.raises(EnvironmentFault, match=what):
        MedusaHeads.load(tmp_path, {"target": target})


@pytest.mark.parametrize(
    ("kind", "name", "what"),
    [
        (MedusaHeads, "99999999.0.linear.weight", "levels is 100000000; a head has 1 to 64"),
        (MedusaHeads, "0.99999999.linear.weight", "what its weights hold|allocate"),
        (
            HydraHeads,
            "hydra_mlp.0.99999999.linear.weight",
            "more than twice the parameters of its weights",
        ),
    ],
)
def test_a_tensors_name_cannot_make_a_head_larger_than_its_file(target, tmp_path, kind, name, what):
    save_file({name: torch.zeros(48, 48)}, tmp_path / "model.safetensors")
    with pytest.raises(EnvironmentFault, match=what):
        kind.load(tmp_path, {"target": target})


def test_hydra_heads_that_read_no_drafted_token_are_refused(target, tmp_path):
    published_hydra(tmp_path, target, 2)
    (tmp_path / "config.json").write_text(json.dumps({"grounded_heads": False}))
    with pytest.raises(EnvironmentFault, match="grounded_heads is false"):
        HydraHeads.load(tmp_path, {"target": target})


def test_hydra_heads_compute_their_formula_on_all_drafted_tokens(target, rows):
    heads = stirred(HydraHeads(target, levels=3, blocks=2))
    ids = torch.tensor([[5, 6, 7], [1, 2, 3], [9, 8, 4]])
    left = rows
    for level, tokens in enumerate(ids):
        out = heads(left, tokens, level)
        x = torch.cat((rows, *(target.embed(each) for each in ids[: level + 1])), -1)
        own = heads.heads[level]
        moved = own[0].res_connection(x) + silu(own[0].linear(x))
        moved = moved + silu(own[1].linear(moved))
        torch.testing.assert_close(out.logits, heads.outputs[level](moved))
        torch.testing.assert_close(out.rows, x)
        left = out.rows


def test_a_saved_head_is_the_head_that_is_read(target, rows, tmp_path):
    for kind, more in ((MedusaHeads, ()), (HydraHeads, (torch.tensor([5, 6, 7]), 0))):
        head = stirred(kind(target, levels=2, own_output=False))
        head.save(tmp_path / kind.kind)
        again = kind.load(tmp_path / kind.kind, {"target": target})
        assert again.sizes == head.sizes
        assert all(map(torch.equal, again.parameters(), head.parameters()))
        out, due = again(rows, *more), head(rows, *more)
        assert all(map(torch.equal, out, due))


def test_the_authors_tree_is_theirs_and_so_is_every_part_that_its_search_took_first():
    whole = static_tree("mc_sim_7b_63", 63, 4)
    assert whole.nodes == tuple(sorted(MC_SIM_7B_63, key=lambda node: (len(node), node)))
    levels = [sum(len(node) == depth for node in whole.nodes) for depth in range(1, 5)]
    assert levels == [10, 28, 23, 2]
    theirs = "35c38d3c9cde7957c18de9f5cca50aa9fd3b3947479a0f171412e87b7c3ad3d6"
    assert sha256(json.dumps(MC_SIM_7B_63).encode()).hexdigest() == theirs  # of medusa_choices.py
    assert [len(static_tree("mc_sim_7b_63", n, 4).nodes) for n in range(1, 64)] == [*range(1, 64)]
    assert [len(static_tree("mc_sim_7b_63", 63, n).nodes) for n in (1, 2, 3)] == [10, 38, 61]
    assert static_tree("mc_sim_7b_63", 63, 4, width=2).nodes == (
        *((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)),
        *((0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1)),
        *((0, 0, 0, 0), (0, 0, 0, 1)),
    )


@pytest.mark.parametrize(
    ("kind", "file"), [(MedusaHeads, "medusa_lm_head.pt"), (HydraHeads, "hydra_lm_head.pt")]
)
def test_pickled_heads_are_refused_with_the_command_that_converts_them(
    tmp_path, target, kind, file
):
    (tmp_path / "config.json").write_text("{}")
    torch.save({"0.0.linear.weight": torch.zeros(1)}, tmp_path / file)
    with pytest.raises(EnvironmentFault, match=f"{file}, a pickle") as fault:
        kind.load(tmp_path, {"target": target})
    assert fault.value.hint == f"specbench train convert {tmp_path} --out DIR --unpickle"


# ---- step by step: published folders, and what their authors' programs do with them -------------


def published_medusa(folder, target, n_heads):
    """A folder of FasterDecoding's release as it is, and its heads as a function [d] -> [k, V]."""
    drawn, d, v = torch.Generator().manual_seed(8), target.hidden_size, target.vocab_size
    output = target.unembed(torch.eye(d)).T.contiguous()
    tensors = {}
    for k in range(n_heads):
        tensors[f"{k}.0.linear.weight"] = torch.randn(d, d, generator=drawn) / d
        tensors[f"{k}.0.linear.bias"] = torch.randn(d, generator=drawn) / 9
        tensors[f"{k}.1.weight"] = output + torch.randn(v, d, generator=drawn) / 5
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    config = {"medusa_num_heads": n_heads, "medusa_num_layers": 1, "base_model_name_or_path": "x"}
    (folder / "config.json").write_text(json.dumps(config))

    def ranked(h, path):
        k = len(path) - 1
        moved = h + silu(linear(h, tensors[f"{k}.0.linear.weight"], tensors[f"{k}.0.linear.bias"]))
        return linear(moved, tensors[f"{k}.1.weight"]).topk(10).indices.tolist()

    return ranked


def published_hydra(folder, target, n_heads):
    """The same of zankner's, with grounded heads of one layer."""
    drawn, d, v = torch.Generator().manual_seed(9), target.hidden_size, target.vocab_size
    output = target.unembed(torch.eye(d)).T.contiguous()
    tensors = {}
    for k in range(n_heads):
        for part, scale in (("linear", 1 / d), ("res_connection", 1 / d)):
            wide = torch.randn(d, (k + 2) * d, generator=drawn) * scale
            tensors[f"hydra_mlp.{k}.0.{part}.weight"] = wide
            tensors[f"hydra_mlp.{k}.0.{part}.bias"] = torch.randn(d, generator=drawn) / 9
        tensors[f"hydra_mlp.{k}.0.res_connection.weight"].fill_diagonal_(1.0)
        tensors[f"hydra_lm_head.{k}.weight"] = output + torch.randn(v, d, generator=drawn) / 5
        tensors[f"hydra_lm_head.{k}.bias"] = torch.randn(v, generator=drawn) / 9
    save_file(tensors, folder / "hydra_lm_head.safetensors")
    config = {"hydra_num_heads": n_heads, "hydra_head_arch": "mlp", "grounded_heads": True}
    (folder / "config.json").write_text(json.dumps(config))

    def ranked(h, path):
        k, at = len(path) - 1, f"hydra_mlp.{len(path) - 1}.0"
        x = torch.cat((h, *(target.embed(torch.tensor([token]))[0] for token in path)))
        read = linear(
            x, tensors[f"{at}.res_connection.weight"], tensors[f"{at}.res_connection.bias"]
        )
        moved = read + silu(linear(x, tensors[f"{at}.linear.weight"], tensors[f"{at}.linear.bias"]))
        out = linear(
            moved, tensors[f"hydra_lm_head.{k}.weight"], tensors[f"hydra_lm_head.{k}.bias"]
        )
        return out.topk(10).indices.tolist()

    return ranked


def as_their_programs_do(module, prompt, ranked, choices, n_steps):
    """(candidates beside the root, committed behind it) a step: greedy decoding of the published
    programs, with no cache and no tree mask, each path by a forward of its own.

    Candidates in the order of `sorted(choices, key=lambda x: (len(x), x))`; of those whose every
    token is the likeliest one at the place before, the longest; then the target's next token.
    """

    def read(ids):
        hidden = module.model(torch.tensor([ids])).last_hidden_state[0, -1]
        return hidden, int(module.lm_head(hidden).argmax())

    text = [*prompt, read(prompt)[1]]
    for _ in range(n_steps):
        feature, _ = read(text[:-1])
        tokens = {(): text[-1]}
        for node in sorted(choices, key=lambda node: (len(node), node)):
            path = [tokens[node[:at]] for at in range(len(node))]
            tokens[node] = ranked(feature, path)[node[-1]]
        node, accepted = (), []
        while True:
            _, likeliest = read([*text, *accepted])
            below = [child for child in tokens if child and child[:-1] == node]
            found = next((child for child in below if tokens[child] == likeliest), None)
            if found is None:
                break
            node, accepted = found, [*accepted, likeliest]
        yield [token for at, token in tokens.items() if at], [*accepted, likeliest]
        text += [*accepted, likeliest]


@pytest.mark.parametrize(
    ("method", "made", "heads"),
    [(Medusa, published_medusa, 3), (Hydra, published_hydra, 2), (Hydra, published_hydra, 4)],
)
def test_a_published_folder_is_decoded_with_step_by_step_as_its_authors_program_does(
    family, target, tmp_path, method, made, heads
):
    ranked = made(tmp_path, target, heads)
    chosen = method(method.Params(head=str(tmp_path), tree="mc_sim_7b_63"))
    (wanted,) = chosen.artifacts()
    space = Workspace(
        {"target": target},
        160,
        load_artifact=lambda _: wanted.kind.load(tmp_path, {"target": target}),
    )
    choices = [node for node in MC_SIM_7B_63 if len(node) <= heads]
    accepted = 0
    for prompt in (family.prompts[7], family.prompts[20]):
        session = Session(space, Request("tiny", 0, prompt, StopRule(frozenset(), 60)), Sampling())
        with torch.no_grad():
            due = list(as_their_programs_do(family.modules["target"], prompt, ranked, choices, 5))
        for step, (candidates, committed) in zip(chosen.generate(session), due, strict=False):
            assert step.draft.tokens.tolist() == candidates
            assert list(step.outcome.committed) == committed
            accepted += len(committed) - 1
    assert accepted > 1


def test_typical_acceptance_is_the_published_formula():
    p = torch.randn(40, 9, generator=torch.Generator().manual_seed(3)).mul(3).softmax(-1)
    tokens = torch.arange(40) % 9
    entropy = -(p * (p + 1e-5).log()).sum(-1)  # as their programs have it
    least = torch.minimum(torch.full((40,), 0.09), 0.3 * (-entropy).exp())
    due = p[torch.arange(40), tokens] > least
    rule = Medusa.Params(accept="typical").rule
    assert rule.lets_pass(p, tokens).equal(due)
    assert 5 < int(due.sum()) < 35


def tree_of(session, drafted):
    """Token by node's rank path."""
    parents, ids = drafted.parents, drafted.tokens.tolist()
    seen: dict[int, int] = {}
    paths = []
    for parent in parents:
        rank = seen.get(parent, 0)
        seen[parent] = rank + 1
        paths.append(((*paths[parent], rank)) if parent >= 0 else (rank,))
    return dict(zip(paths, ids, strict=True))


def drafted(drafting, kind, head, **params):
    method = kind(kind.Params(**params))
    session = drafting(method, head)
    return session, tree_of(session, method.propose(session, 4))


def test_in_medusa_a_node_depends_on_its_level_and_rank(drafting, target):
    head = stirred(MedusaHeads(target))
    session, tree = drafted(drafting, Medusa, head)
    out = head(session.features())[:, 0].sort(descending=True).indices
    assert len(tree) == 63
    assert tree == {node: int(out[len(node) - 1, node[-1]]) for node in tree}


def test_in_hydra_a_node_is_ranked_by_its_own_path(drafting, target):
    head = stirred(HydraHeads(target))
    session, tree = drafted(drafting, Hydra, head, nodes=30, width=3)
    root = session.tokens()[-1]
    for node, token in tree.items():
        rows, path = session.features(), [root, *(tree[node[:at]] for at in range(1, len(node)))]
        for level, each in enumerate(path):
            out = head(rows, torch.tensor([each]), level)
            rows = out.rows
        assert token == int(out.logits[0].sort(descending=True).indices[node[-1]])
    by_level = {len(node) for node in tree}
    assert max(by_level) == 4 and all(b - a == 1 for a, b in pairwise(sorted(by_level)))


# ---- above temperature 0: compared with the authors' code
# ------------------------------------------


NEAR = Case("near", make_table_pair("near"), Sampling("rejection", 1.0), budget=4, length=3)


def typical_as_published(epsilon=0.09, delta=0.3):
    """The distribution of `medusa_generate` with sampling="typical", fast=True, and of
    `hydra_generate`, on
    the table: a step's first token is the likeliest one, a draft token (here the head's best)
    stands iff p(x) > min(epsilon, delta exp(-H)). No token is drawn."""
    target, draft = (table.double() for table in NEAR.tables)
    text = [*NEAR.prompt]
    while len(text) < len(NEAR.prompt) + NEAR.length:
        text.append(int(target[text[-2], text[-1]].argmax()))
        guess = int(draft[text[-2], text[-1]].argmax())
        p = target[text[-2], text[-1]].softmax(-1)
        entropy = float(-(p * p.log()).sum())
        if p[guess] > min(epsilon, delta * math.exp(-entropy)):
            text.append(guess)
    return {tuple(text[len(NEAR.prompt) :][: NEAR.length]): 1.0}


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        (Medusa, {"nodes": 2}),
        (Hydra, {"nodes": 2, "width": 1}),
        (Hydra, {"nodes": 3, "width": 2, "children": "drawn"}),
        (HydraPlus, {"nodes": 3, "width": 2, "children": "drawn"}),
        (Clover, {"nodes": 3, "depth": 2}),
    ],
)
def test_above_temperature_zero_ours_is_the_targets_distribution_and_the_authors_rule_is_not(
    kind, params
):
    assert distance_from_target(kind(kind.Params(**params)), NEAR) < 1e-9
    assert total_variation(typical_as_published(), target_distribution(NEAR)) > 0.4


@pytest.mark.parametrize("kind", [Medusa, Hydra, HydraPlus, Clover])
def test_typical_acceptance_accepts_more_and_is_declared_not_exact(kind):
    """With the paper's rule the distribution differs from the target's, and the method declares
    it."""
    method = kind(kind.Params(nodes=1, accept="typical"))
    assert kind(kind.Params()).guarantee("rejection") == "exact_law"
    assert method.guarantee("rejection") == method.guarantee("greedy") == "quality_only"
    assert distance_from_target(method, NEAR) > 0.02
