"""Hydra++ and Clover: a layer over the target's features, and the drafts made from it."""

from __future__ import annotations

import json
from math import log

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import cosine_similarity, linear, silu
from transformers import LlamaConfig, LlamaModel

from methods.clover.head import CloverHead
from methods.clover.method import Clover
from methods.hydra.head import HydraHeads
from methods.hydra_plus.head import HydraPlusHead
from methods.hydra_plus.method import HydraPlus
from specbench_cli.engine.drafting.levels import Levels
from specbench_cli.engine.models.head import NORMED, features
from specbench_cli.engine.types import Features, Tokens
from specbench_cli.errors import EnvironmentFault

TEXT = torch.tensor([[5, 17, 80, 3, 3, 41, 66, 9, 12, 95, 0, 33, 5, 18]])
CLOSE = {"rtol": 1e-3, "atol": 1e-3}
LEVELS, BLOCKS = 3, 4


@pytest.fixture(scope="module")
def rows(target):
    """The target's features of TEXT."""
    out = target.forward(Tokens(TEXT), target.new_state(32), logits_at="all")
    return features(out, (NORMED,), target)


def drawn(module, seed=3):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            norm = parameter.dim() == 1
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 6 + norm)
    return module


@pytest.fixture(scope="module")
def prefix(family):
    """transformers' own model of one layer, with the sizes of the target's."""
    config = LlamaConfig(**family.modules["target"].config.to_dict() | {"num_hidden_layers": 1})
    return drawn(LlamaModel(config).eval())


def published(prefix, target):
    """Hydra++ as github.com/zankner/Hydra saves `hydra_head`: names, sizes and dtype."""
    d, v = target.hidden_size, target.vocab_size
    generator = torch.Generator().manual_seed(4)

    def made(*shape):
        return torch.randn(shape, generator=generator) / 6

    tensors = {f"prefix_embeding_layer.{k}": each for k, each in prefix.state_dict().items()}
    for head in range(LEVELS):
        for part in ("linear", "res_connection"):
            tensors[f"hydra_mlp.{head}.1.{part}.weight"] = made(d, (head + 2) * d)
            tensors[f"hydra_mlp.{head}.1.{part}.bias"] = made(d)
        shared = made(d, d), made(d)  # one block, saved as often as it is applied
        for block in range(1, BLOCKS):
            for name, each in zip(("weight", "bias"), shared, strict=True):
                tensors[f"hydra_mlp.{head}.{2 * block + 1}.linear.{name}"] = each.clone()
        tensors[f"hydra_lm_head.{head}.1.weight"] = made(v, d)
        tensors[f"hydra_lm_head.{head}.1.bias"] = made(v)
    return {name: tensor.half() for name, tensor in tensors.items()}


HYDRA_CONFIG = {
    "hydra_num_heads": LEVELS,
    "hydra_num_layers": BLOCKS,
    "hydra_head_arch": "prefix-mlp",
    "grounded_heads": True,
    "hidden_state_offset": 0,
    "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
}


def written(folder, tensors, config=HYDRA_CONFIG):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_hydra_plus_as_published_computes_its_formula(target, prefix, rows, tmp_path):
    tensors = published(prefix, target)
    head = HydraPlusHead.load(written(tmp_path / "head", tensors), {"target": target})
    state = head.new_state(32)
    given = {name: tensor.float() for name, tensor in tensors.items()}
    oracle = LlamaModel(prefix.config).eval()
    mark = "prefix_embeding_layer."
    oracle.load_state_dict({k.removeprefix(mark): t for k, t in given.items() if mark in k})
    with torch.no_grad():
        left = oracle(inputs_embeds=rows[None, :-1]).last_hidden_state[0, -1:]
    out = head.forward(Features(TEXT[:, 1:], rows[None, :-1]), state)
    read, token = left, TEXT[0, -1:]
    for level in range(LEVELS):
        if level:
            out = head.forward(Features(token[None], out.hidden[:, -1:]), state)
        read = torch.cat((read, target.embed(token)), -1)
        name = f"hydra_mlp.{level}"
        x = linear(read, *(given[f"{name}.1.res_connection.{p}"] for p in ("weight", "bias")))
        x = x + silu(linear(read, *(given[f"{name}.1.linear.{p}"] for p in ("weight", "bias"))))
        for block in range(1, BLOCKS):
            own = f"{name}.{2 * block + 1}.linear"
            x = x + silu(linear(x, given[f"{own}.weight"], given[f"{own}.bias"]))
        last = f"hydra_lm_head.{level}.1"
        due = linear(x, given[f"{last}.weight"], given[f"{last}.bias"])
        torch.testing.assert_close(out.logits[0, -1:], due, **CLOSE)
        token = torch.tensor([40 + level])


def test_hydra_as_published_computes_its_formula(target, prefix, rows, tmp_path):
    """The "mlp" architecture: no prefix layer, no dropout in front of blocks."""
    whole, d = published(prefix, target), target.hidden_size
    tensors = {}
    for name, tensor in whole.items():
        kind, head, *rest = name.split(".")
        if kind == "hydra_lm_head":
            tensors[f"{kind}.{head}.{rest[1]}"] = tensor
        elif kind == "hydra_mlp":
            tensors[f"{kind}.{head}.{(int(rest[0]) - 1) // 2}.{'.'.join(rest[1:])}"] = tensor
    folder = written(tmp_path / "head", tensors, HYDRA_CONFIG | {"hydra_head_arch": "mlp"})
    heads = HydraHeads.load(folder, {"target": target})
    assert heads.sizes["levels"], heads.sizes["blocks"] == (LEVELS, BLOCKS)
    given = {name: tensor.float() for name, tensor in tensors.items()}
    left, read = rows[-2:-1], rows[-2:-1]
    for level, token in enumerate((18, 40, 41)):
        said = heads(left, torch.tensor([token]), level)
        left = said.rows
        read = torch.cat((read, target.embed(torch.tensor([token]))), -1)
        assert read.shape[1] == (level + 2) * d
        name = f"hydra_mlp.{level}.0"
        x = linear(
            read, given[f"{name}.res_connection.weight"], given[f"{name}.res_connection.bias"]
        )
        x = x + silu(linear(read, given[f"{name}.linear.weight"], given[f"{name}.linear.bias"]))
        for block in range(1, BLOCKS):
            own = f"hydra_mlp.{level}.{block}.linear"
            x = x + silu(linear(x, given[f"{own}.weight"], given[f"{own}.bias"]))
        last = f"hydra_lm_head.{level}"
        due = linear(x, given[f"{last}.weight"], given[f"{last}.bias"])
        torch.testing.assert_close(said.logits, due, **CLOSE)


FAULTS = {
    "a missing norm": ("prefix_embeding_layer.norm.weight", None, r"missing tensors: norm\.weight"),
    "a missing block": (
        "hydra_mlp.1.3.linear.bias",
        None,
        r"missing tensor heads\.1\.3\.linear\.bias",
    ),
    "another width": (
        "hydra_mlp.0.1.linear.weight",
        torch.zeros(7, 14),
        r"first head has shape \[7, 14\]",
    ),
    "another vocabulary": (
        "hydra_lm_head.0.1.weight",
        torch.zeros(50, 32),
        "matrices have 50 rows",
    ),
    "NaN": ("hydra_mlp.2.1.linear.bias", torch.full((32,), torch.nan), "not finite"),
    "a tensor too many": ("medusa.weight", torch.zeros(1), "unsupported tensor medusa.weight"),
}


@pytest.mark.parametrize(("name", "tensor", "what"), FAULTS.values(), ids=FAULTS)
def test_a_hydra_plus_head_that_does_not_fit_is_refused_with_the_reason(
    target, prefix, tmp_path, name, tensor, what
):
    tensors = published(prefix, target)
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    with pytest.raises(EnvironmentFault, match=what):
        HydraPlusHead.load(written(tmp_path / "head", tensors), {"target": target})


def test_truncated_files_and_heads_of_another_kind_are_reported(target, prefix, tmp_path):
    folder = written(tmp_path / "head", published(prefix, target))
    with pytest.raises(EnvironmentFault, match=r"contains the heads of Hydra\+\+"):
        HydraHeads.load(folder, {"target": target})
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(EnvironmentFault, match=r"model\.safetensors"):
        HydraPlusHead.load(folder, {"target": target})


@pytest.fixture(scope="module")
def clover(target, prefix):
    """A head, and the tensors that it was made of."""
    module = drawn(CloverHead.module.random(target, 7), seed=8)
    given = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    return CloverHead(module, target), given, module.shape


def test_clover_computes_its_formula(clover, target, rows):
    head, given, shape = clover
    config = LlamaConfig(
        hidden_size=target.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        vocab_size=8,
    )
    oracle = LlamaModel(config).eval()
    layer = {f"layers.0.{k.removeprefix('layer.')}": t for k, t in given.items() if "layer." in k}
    layer |= {"norm.weight": given["norm.weight"], "embed_tokens.weight": torch.zeros(8, 32)}
    oracle.load_state_dict(layer)
    with torch.no_grad():
        h = oracle(inputs_embeds=rows[None, :-1]).last_hidden_state[0, -1]
    state = head.new_state(32)
    out = head.forward(Features(TEXT[:, 1:], rows[None, :-1]), state)
    for level, token in enumerate((18, 40, 41, 42)):
        if level:
            out = head.forward(Features(torch.tensor([[token]]), out.hidden[:, -1:]), state)
        e = target.embed(torch.tensor([token]))[0]
        normed = given["before.weight"] * h * (h.square().mean() + 1e-6).rsqrt()
        q, k, v = (
            linear(x, given[f"{part}.weight"], given[f"{part}.bias"]).view(4, 8)
            for part, x in (("q", normed), ("k", e), ("v", e))
        )
        gates = [float(cosine_similarity(q[a], k[a], 0)) for a in range(4)]
        assert all(-1 <= gate <= 1 for gate in gates)
        h = h + torch.cat([gate * v[a] for a, gate in enumerate(gates)])
        both = torch.cat((h, e))
        x = h + linear(both, given["o.weight"], given["o.bias"])
        x = given["after.weight"] * x * (x.square().mean() + 1e-6).rsqrt()
        torch.testing.assert_close(out.logits[0, -1], target.unembed(x), **CLOSE)
        torch.testing.assert_close(out.hidden[0, -1], both, **CLOSE)


@pytest.mark.parametrize("kind", [HydraPlusHead, CloverHead], ids=lambda kind: kind.kind)
def test_features_fed_in_pieces_with_drafts_between_give_the_result_of_the_whole(
    kind, target, rows
):
    """Drafted tokens use the state temporarily, and leave nothing in it."""
    head = kind(drawn(kind.module.random(target, 7), seed=9), target)
    due = head.forward(Features(TEXT[:, 1:], rows[None, :-1]), head.new_state(32))
    state = head.new_state(32)
    for start, end in ((0, 4), (4, 5), (5, 12), (12, 13)):
        out = head.forward(Features(TEXT[:, start + 1 : end + 1], rows[None, start:end]), state)
        state.commit(0, range(end - start))
        for _ in range(2):
            drafted = head.forward(Features(torch.tensor([[7]]), out.hidden[:, -1:]), state)
        assert drafted.logits.shape == (1, 1, target.vocab_size)
        state.rollback(0, end)
    assert state.length() == 13
    torch.testing.assert_close(out.logits, due.logits, **CLOSE)


@pytest.mark.parametrize("nodes", [6, 16])
def test_clovers_tree_is_pruned_by_token_path_and_budget(drafting, clover, target, nodes):
    """Compare with the three rules, level by level, from the head's own distributions."""
    head, *_ = clover
    params = Clover.Params(nodes=nodes, depth=3, width=5, nucleus=0.9, share=0.05)
    method = Clover(params)
    session = drafting(method, head)
    draft = method.propose(session, 8)
    other = drafting(method, head)
    levels = Levels(other, other.artifact(*method.artifacts()), method.levels.state)
    out = levels.begin(other.pending_features(0))
    level, due, left = [(0.0, ())], [], nodes
    for ahead in range(3):
        found = []
        for at, (worth, path) in enumerate(level):
            p = out.logits[0, at].softmax(-1)
            before = 0.0
            for token in p.argsort(descending=True)[:5].tolist():
                if before >= 0.9 or p[token] < 0.05 * p.max():
                    break
                before += float(p[token])
                found.append((worth + log(float(p[token])), (*path, token), at))
        best = sorted(found, reverse=True)[:left]
        best.sort(key=lambda each: each[2])
        level, left = [each[:2] for each in best], left - len(best)
        due += [path for _, path in level]
        if not left or ahead == 2:
            break
        out = levels.feed([path[-1] for _, path in level], [at for *_, at in best])
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens.tolist(), draft.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert sorted(paths) == sorted(due)
    assert len(paths) <= nodes


def test_hydra_plus_ranks_a_node_by_its_own_path(drafting, target):
    head = HydraPlusHead(drawn(HydraPlusHead.module.random(target, 7), seed=9), target)
    method = HydraPlus(HydraPlus.Params(nodes=20, width=3))
    session = drafting(method, head)
    draft = method.propose(session, 8)
    assert method.levels.state.length() == len(session.tokens()) - 1
    tokens, parents = draft.tokens.tolist(), draft.parents
    x = drafting(method, head).pending_features(0)
    for node, token in enumerate(tokens):
        path, at = [], parents[node]
        while at >= 0:
            path.insert(0, tokens[at])
            at = parents[at]
        state = head.new_state(96)
        out = head.forward(x, state)
        for each in path:
            out = head.forward(Features(torch.tensor([[each]]), out.hidden[:, -1:]), state)
        rank = sum(parents[other] == parents[node] for other in range(node))
        assert token == int(out.logits[0, -1].argsort(descending=True)[rank])
