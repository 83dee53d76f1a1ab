"""Tests of draft heads against a direct computation over the whole text, without a cache."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from methods._heads.files import HeadShape, LoadedHead, official_layers
from methods.eagle.head import EagleHead
from methods.eagle3.head import Eagle3Head
from methods.mtp.head import MtpHead
from specbench_cli.engine.models.head import NORMED, features
from specbench_cli.engine.types import Features, Tokens
from specbench_cli.errors import EnvironmentFault

KINDS = [EagleHead, Eagle3Head, MtpHead]
HEADS = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
TEXT = torch.tensor([[5, 17, 80, 3, 3, 41, 66, 9, 12, 95, 0, 33, 5, 18]])
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def rms(x, weight):
    return weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def block(files, inputs, residual, positions):
    """Compute a causal Llama layer over a whole text [n, ...]."""
    shape, n = files.shape, len(residual)
    weight = {
        name.removeprefix("layer.").removesuffix(".weight"): tensor
        for name, tensor in files.tensors.items()
        if name.startswith("layer.")
    }
    q, k, v = (
        (inputs @ weight[f"self_attn.{part}_proj"].T).view(n, -1, shape.head_dim).transpose(0, 1)
        for part in "qkv"
    )
    config = LlamaConfig(
        hidden_size=shape.num_attention_heads * shape.head_dim,
        num_attention_heads=shape.num_attention_heads,
        head_dim=shape.head_dim,
    )
    cos, sin = LlamaRotaryEmbedding(config)(q, positions[None])
    q, k = apply_rotary_pos_emb(q[None], k[None], cos, sin)
    mixed = scaled_dot_product_attention(q, k, v[None], is_causal=True, enable_gqa=True)
    x = residual + mixed[0].transpose(0, 1).reshape(n, -1) @ weight["self_attn.o_proj"].T
    y = rms(x, weight["post_attention_layernorm"])
    gate, up = y @ weight["mlp.gate_proj"].T, y @ weight["mlp.up_proj"].T
    return x + (silu(gate) * up) @ weight["mlp.down_proj"].T


def by_definition(kind, files, target, ids, rows, *, true=True):
    """Compute a head over a whole text as its paper defines it.

    Return the logits over the target's vocabulary and the features for the next draft level.
    """
    weights, tokens = files.tensors, target.embed(ids)
    positions = torch.arange(len(ids))
    fc = weights["fc.weight"].T
    if kind is EagleHead:
        joined = torch.cat((tokens, rows), -1) @ fc
        output = block(files, joined, joined, positions)
        return target.unembed(output), output
    if kind is MtpHead:
        joined = torch.cat(
            (rms(tokens, weights["enorm.weight"]), rms(rows, weights["hnorm.weight"])), -1
        )
        joined = joined @ fc
        inputs = rms(joined, weights["layer.input_layernorm.weight"])
        output = rms(block(files, inputs, joined, positions), weights["norm.weight"])
        return target.unembed(output), output
    g = rows @ fc if true else rows
    inputs = torch.cat((rms(tokens, weights["enorm.weight"]), rms(g, weights["hnorm.weight"])), -1)
    output = block(files, inputs, g, positions)
    draft_logits = rms(output, weights["norm.weight"]) @ weights["lm_head.weight"].T
    logits = torch.full((len(ids), target.vocab_size), -torch.inf)
    for at, offset in enumerate(weights["d2t"].tolist()):
        logits[:, at + offset] = draft_logits[:, at]
    return logits, output


def with_grouped_query_attention(files, seed):
    """Return the head with three query heads that share one key-value head."""
    generator = torch.Generator().manual_seed(seed)
    shape, tensors = files.shape, dict(files.tensors)
    inputs, d = tensors["layer.self_attn.q_proj.weight"].shape[1], shape.head_dim
    for name, size in (("q_proj", (3 * d, inputs)), ("o_proj", (shape.hidden_size, 3 * d))):
        weight_values = torch.randn(size, generator=generator) / size[1] ** 0.5
        tensors[f"layer.self_attn.{name}.weight"] = weight_values
    for name in ("enorm", "hnorm", "norm", "layer.input_layernorm"):
        if f"{name}.weight" in tensors:
            noise = torch.rand(shape.hidden_size, generator=generator)
            tensors[f"{name}.weight"] = 0.5 + noise
    return replace(files, tensors=tensors, shape=replace(shape, num_attention_heads=3))


@pytest.fixture(params=KINDS, ids=lambda kind: kind.kind)
def built_head(request, target):
    """Return a head, the weights it was built from and the target's features of TEXT."""
    kind = request.param
    files = with_grouped_query_attention(kind.module.random(target, 7).as_loaded(), seed=8)
    head = kind.from_files(files, target)
    return kind, files, head, compute_features(target, head.captured_layers)


def compute_features(target, captured_layers):
    layers = tuple(at for at in captured_layers if at != NORMED)
    out = target.forward(
        Tokens(TEXT), target.new_state(32), captured_layers=layers, logits_at="all"
    )
    return features(out, captured_layers, target)


def all_slots(head, rows):
    return Features(TEXT[:, 1:], rows[None, :-1])


def test_a_head_computes_its_papers_definition(built_head, target):
    kind, files, head, rows = built_head
    out = head.forward(all_slots(head, rows), head.new_state(32), logits_at="all")
    logits, output = by_definition(kind, files, target, TEXT[0, 1:], rows[:-1])
    torch.testing.assert_close(out.logits[0], logits, **CLOSE)
    torch.testing.assert_close(out.hidden[0], output, **CLOSE)


def test_a_text_fed_in_pieces_gives_the_logits_of_the_whole(built_head):
    _, _, head, rows = built_head
    whole, state = head.new_state(32), head.new_state(32)
    expected = head.forward(all_slots(head, rows), whole, logits_at="all")
    pieces = []
    for start, end in ((0, 4), (4, 5), (5, 12), (12, 13)):
        x = Features(TEXT[:, start + 1 : end + 1], rows[None, start:end])
        pieces.append(head.forward(x, state, logits_at="all").logits)
    torch.testing.assert_close(torch.cat(pieces, 1), expected.logits, **CLOSE)
    assert state.length() == whole.length() == 13
    for part in ("keys", "values"):
        torch.testing.assert_close(getattr(state, part)(0), getattr(whole, part)(0), **CLOSE)


def test_slot_t_depends_on_token_t_plus_1_and_no_later_token(built_head):
    _, _, head, rows = built_head
    before = head.forward(all_slots(head, rows), head.new_state(32), logits_at="all").logits[0]
    t = 6
    for ahead in (1, 2, 3):
        ids = TEXT[:, 1:].clone()
        ids[0, t + ahead - 1] = 77  # x_{t + ahead}
        x = Features(ids, rows[None, :-1])
        after = head.forward(x, head.new_state(32), logits_at="all").logits[0]
        changed = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
        assert changed == [slot >= t + ahead - 1 for slot in range(13)]


def test_a_head_fed_its_own_features_computes_its_papers_definition(built_head, target):
    """The draft is a chain of three levels after five slots with the target's features."""
    kind, files, head, rows = built_head
    state = head.new_state(32)
    out = head.forward(Features(TEXT[:, 1:6], rows[None, :5]), state)
    ids, fed = TEXT[0, 1:6], rows[:5]
    if kind is Eagle3Head:  # fc projects the target's features only, not the head's own
        fed = fed @ files.tensors["fc.weight"].T
    for token in (44, 45, 46):
        fed = torch.cat((fed, out.hidden[0, -1:]))
        ids = torch.cat((ids, torch.tensor([token])))
        out = head.forward(Features(torch.tensor([[token]]), out.hidden[:, -1:]), state)
        logits, output = by_definition(kind, files, target, ids, fed, true=False)
        torch.testing.assert_close(out.logits[0, -1], logits[-1], **CLOSE)
        torch.testing.assert_close(out.hidden[0, -1], output[-1], **CLOSE)


def test_a_forward_does_not_modify_its_input_features(built_head):
    _, _, head, rows = built_head
    state = head.new_state(32)
    output = head.forward(all_slots(head, rows), state).hidden
    output_before, rows_before = output.clone(), rows.clone()
    head.forward(Features(torch.tensor([[3]]), output[:, -1:]), state)
    head.forward(all_slots(head, rows), head.new_state(32))
    assert torch.equal(output, output_before)
    assert torch.equal(rows, rows_before)


def test_eagles_features_unembed_to_the_targets_logits(target):
    rows = compute_features(target, EagleHead.module.captured_layers)
    expected = target.forward(Tokens(TEXT), target.new_state(32), logits_at="all").logits[0]
    assert torch.equal(target.unembed(rows), expected)


@HEADS
def test_a_random_head_depends_on_its_seed_and_its_input(target, kind):
    first, again, other = (kind.random({"target": target}, seed=s) for s in (1, 1, 2))
    rows = compute_features(target, first.captured_layers)
    logits = [
        head.forward(all_slots(head, rows), head.new_state(32), logits_at="all").logits[0]
        for head in (first, again, other)
    ]
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
    assert len(logits[0].argmax(-1).unique()) > 3
    assert (first.first, first.vocab_size, first.name) == (1, target.vocab_size, kind.kind)
    assert first.weight_bytes > 0


def test_weight_bytes_exclude_matrices_shared_with_the_target(target):
    head = EagleHead.random({"target": target})
    width = target.hidden_size
    own = 2 * width * width + 3 * 8 * width + 8 * width + 3 * 2 * width * width + width
    assert head.weight_bytes == 4 * own


def test_an_eagle3_head_without_output_matrix_uses_the_targets(target):
    files = Eagle3Head.module.random(target, 1).as_loaded()
    ids = files.tensors["t2d"].nonzero()[:, 0]
    rest = {name: tensor for name, tensor in files.tensors.items() if name != "lm_head.weight"}
    head = Eagle3Head.from_files(replace(files, tensors=rest), target)
    rows = torch.randn(3, target.hidden_size)
    logits, whole = head.unembed(rows), target.unembed(rows)
    torch.testing.assert_close(logits[:, ids], whole[:, ids], **CLOSE)
    excluded = [token for token in range(target.vocab_size) if token not in ids.tolist()]
    assert (logits[:, excluded] == -torch.inf).all()


def test_an_eagle3_head_may_have_the_whole_vocabulary(target):
    files = Eagle3Head.module.random(target, 1).as_loaded()
    tensors = {k: v for k, v in files.tensors.items() if k not in ("d2t", "t2d", "lm_head.weight")}
    rows = torch.randn(3, target.hidden_size)
    head = Eagle3Head.from_files(replace(files, tensors=tensors), target)
    assert torch.equal(head.unembed(rows), target.unembed(rows))
    matrix = torch.randn(target.vocab_size, target.hidden_size)
    head = Eagle3Head.from_files(
        replace(files, tensors=tensors | {"lm_head.weight": matrix}), target
    )
    torch.testing.assert_close(head.unembed(rows), rows @ matrix.T, **CLOSE)


def test_norm_before_residual_puts_the_normed_features_on_the_residual_stream(target):
    files = with_grouped_query_attention(Eagle3Head.module.random(target, 1).as_loaded(), seed=2)
    weights = files.tensors
    head = Eagle3Head.from_files(replace(files, config={"norm_before_residual": True}), target)
    rows = compute_features(target, head.captured_layers)
    out = head.forward(all_slots(head, rows), head.new_state(32), logits_at="all")
    g = rms(rows[:-1] @ weights["fc.weight"].T, weights["hnorm.weight"])
    inputs = torch.cat((rms(target.embed(TEXT[0, 1:]), weights["enorm.weight"]), g), -1)
    output = block(files, inputs, g, torch.arange(13))
    torch.testing.assert_close(out.hidden[0], output, **CLOSE)


def test_d2t_is_an_offset_and_t2d_its_mask(target):
    files = Eagle3Head.module.random(target, 1).as_loaded()
    offsets, mask = files.tensors["d2t"], files.tensors["t2d"]
    ids = [at + offset for at, offset in enumerate(offsets.tolist())]
    assert ids == sorted(set(ids))
    assert mask.nonzero()[:, 0].tolist() == ids
    only_mask = {name: tensor for name, tensor in files.tensors.items() if name != "d2t"}
    rows = torch.randn(3, target.hidden_size)
    both = Eagle3Head.from_files(files, target).unembed(rows)
    assert torch.equal(
        both, Eagle3Head.from_files(replace(files, tensors=only_mask), target).unembed(rows)
    )


def test_official_captured_layers_are_early_middle_and_late():
    assert official_layers(32) == (1, 15, 28)
    assert official_layers(8) == (1, 3, 4)
    assert official_layers(1) == (0, 0, 0)


@pytest.mark.parametrize(
    ("config", "captured_layers"),
    [
        ({}, (1, 3, 4)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 7]}}, (0, 2, 7)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 4, 6]}, (0, 3, 5)),
        ({"specbench": {"taps": [2, 3, 6]}}, (2, 3, 6)),
    ],
)
def test_the_config_may_name_the_captured_layers(config, captured_layers):
    files = LoadedHead("a head", {}, HeadShape(4, 4, 1, 1, 4), config=config)
    assert files.find_captured_layers(8) == captured_layers


def test_layers_that_the_target_lacks_are_refused():
    config = {"eagle_aux_hidden_state_layer_ids": [0, 4, 6]}
    files = LoadedHead("a head", {}, HeadShape(4, 4, 1, 1, 4), config=config)
    message = r"a head reads .* \[-1, 3, 5\], .* target has 8 layers"
    with pytest.raises(EnvironmentFault, match=message):
        files.find_captured_layers(8)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_a_head_of_another_width_is_refused(target, family, kind):
    with pytest.raises(EnvironmentFault, match="head: fc has shape"):
        kind.from_files(kind.module.random(family.decoders["far"], 1).as_loaded(), target)


def test_another_vocabulary_is_refused(target):
    files = Eagle3Head.module.random(target, 1).as_loaded()
    for change in (
        {"d2t": files.tensors["d2t"] + target.vocab_size},
        {"d2t": files.tensors["d2t"][:-1]},
        {"t2d": ~files.tensors["t2d"]},
    ):
        with pytest.raises(EnvironmentFault, match="head: d2t"):
            Eagle3Head.from_files(replace(files, tensors={**files.tensors, **change}), target)
    tensors = {k: v for k, v in files.tensors.items() if k not in ("d2t", "t2d")}
    with pytest.raises(EnvironmentFault, match=r"tensors d2t and t2d.* are missing"):
        Eagle3Head.from_files(replace(files, tensors=tensors), target)


def test_features_of_a_wrong_width_are_refused(target):
    head = Eagle3Head.random({"target": target})
    x = Features(TEXT[:, :2], torch.zeros(1, 2, 7))
    with pytest.raises(ValueError, match="features have width 7"):
        head.forward(x, head.new_state(8))


@HEADS
def test_a_head_accepts_only_features_as_input(target, kind):
    head = kind.random({"target": target})
    with pytest.raises(ValueError, match="needs Features as input, not Tokens"):
        head.forward(Tokens(TEXT), head.new_state(32))
