"""The fused decoder computes what transformers computes, however the tokens are fed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specbench_cli.engine.models import forward_plan
from specbench_cli.engine.models.attention import RotaryEmbedding
from specbench_cli.engine.models.fused import FAMILIES, ROPE_TYPES, FusedDecoder
from specbench_cli.engine.models.linear import BACKEND_VARIABLE
from specbench_cli.engine.models.load import get_module, load_decoder
from specbench_cli.engine.types import Hidden, Tokens
from tests.engine.models.feeding import (
    CLOSE,
    PARENTS,
    ancestors,
    check_tree_rows,
    check_two_sequences,
    logits,
    logits_with_rejections,
    own_logits,
    relative_difference,
    some_ids,
    tree_mask,
    tree_positions,
)

Maker = Callable[..., Path]
Case = tuple[str, dict[str, Any]]
CASES: dict[str, Case] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama all heads": ("llama", {"num_key_value_heads": 4}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {}),
    "mistral all heads": ("mistral", {"num_key_value_heads": 4}),
    "mistral no window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2 some windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3 tied all heads": ("qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.fixture(autouse=True, params=["plain", "tiled"])
def _by_torch_and_by_kernels_of_our_own(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test both kernels: a rule on the processor chooses between them."""
    monkeypatch.setenv(BACKEND_VARIABLE, request.param)


def decoder_of(tiny_checkpoint: Maker, case: str, **load: Any) -> FusedDecoder:
    family, overrides = CASES[case]
    folder = tiny_checkpoint(family, **overrides)
    decoder = load_decoder(folder, name="target", **load)
    assert isinstance(decoder, FusedDecoder)
    return decoder


@pytest.mark.parametrize("kind", ROPE_TYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_rotary_positions_equal_transformers(
    tiny_checkpoint: Maker, family: str, kind: str
) -> None:
    module = get_module(load_decoder(tiny_checkpoint(family), name="target"))
    config = copy.deepcopy(module.config)
    config.rope_parameters = {"rope_type": kind, "rope_theta": 500.0, **ROPES.get(kind, {})}
    theirs = type(module.base_model.rotary_emb)(config)
    for dtype in (torch.float32, torch.bfloat16):
        arguments = torch.empty(0, dtype=dtype), torch.arange(200)[None]
        for ours, other in zip(
            RotaryEmbedding(config)(*arguments), theirs(*arguments), strict=True
        ):
            assert torch.equal(ours, other)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(tiny_checkpoint: Maker, case: str) -> None:
    decoder, ids = decoder_of(tiny_checkpoint, case), some_ids(60)
    found = logits_with_rejections(decoder, ids, (37, 40, 48))
    assert relative_difference(found, own_logits(decoder, ids)) <= CLOSE


@pytest.mark.parametrize("case", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_drafted_row_is_bit_identical_to_the_row_alone(
    tiny_checkpoint: Maker, case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With specbench's kernels, chain verification computes exactly what plain decoding
    computes."""
    monkeypatch.setenv(BACKEND_VARIABLE, "tiled")
    decoder, ids = decoder_of(tiny_checkpoint, case, dtype=dtype), some_ids(70)
    state = decoder.new_state(80)

    def rows(span: Tensor) -> Tensor:  # an odd vocabulary size goes to torch
        return decoder.forward(Tokens(span), state).hidden

    rows(ids[:, :50])
    alone = torch.cat([rows(ids[:, at : at + 1]) for at in range(50, 70)], 1)
    for height in (2, 5, 7, 20):
        state.rollback(0, 50)
        blocks = [rows(part) for part in ids[:, 50:].split(height, 1)]
        assert torch.equal(torch.cat(blocks, 1), alone), height


def test_silu_of_any_size_equals_torchs_and_keeps_nan() -> None:
    from specbench_cli.engine.models import kernels

    gates = torch.cat((torch.linspace(-120, 120, 2001), torch.tensor([torch.inf, torch.nan])))
    both = torch.cat((gates, torch.ones_like(gates)))[None].expand(3, -1)
    torch.testing.assert_close(
        kernels.silu_mul(both.contiguous())[1], torch.nn.functional.silu(gates), equal_nan=True
    )


@pytest.mark.parametrize("rope", ROPES)
def test_rope_variants_are_those_of_transformers(tiny_checkpoint: Maker, rope: str) -> None:
    parameters = {"rope_type": rope, "rope_theta": 10_000.0, **ROPES[rope]}
    decoder = load_decoder(tiny_checkpoint("llama", rope_parameters=parameters), name="target")
    assert isinstance(decoder, FusedDecoder)
    ids = some_ids(100)
    assert (
        relative_difference(logits(decoder, ids, decoder.new_state(100)), own_logits(decoder, ids))
        <= CLOSE
    )


def test_packed_linears_give_the_same_logits(tiny_checkpoint: Maker) -> None:
    decoder, ids = decoder_of(tiny_checkpoint, "llama biases", backend="packed"), some_ids(20)
    state = decoder.new_state(20)
    found = [logits(decoder, ids[:, :14], state), logits(decoder, ids[:, 14:], state)]
    assert relative_difference(torch.cat(found, 1), own_logits(decoder, ids)) <= CLOSE


@pytest.mark.parametrize("case", ["llama", "mistral all heads", "qwen3"])
def test_half_precision_stays_close(tiny_checkpoint: Maker, case: str) -> None:
    decoder, ids = decoder_of(tiny_checkpoint, case, dtype=torch.bfloat16), some_ids(40)
    state = decoder.new_state(40)
    found = [logits(decoder, ids[:, :33], state), logits(decoder, ids[:, 33:34], state)]
    found.append(logits(decoder, ids[:, 34:], state))
    assert found[0].dtype == torch.bfloat16
    assert relative_difference(torch.cat(found, 1), own_logits(decoder, ids)) <= 0.15


@pytest.mark.parametrize("case", ["llama", "llama all heads", "mistral", "qwen2 some windows"])
@pytest.mark.parametrize("n", [1, 5])
def test_two_sequences_in_one_forward_equal_two_forwards(
    tiny_checkpoint: Maker, case: str, n: int
) -> None:
    check_two_sequences(decoder_of(tiny_checkpoint, case), n)


# A tree of six nodes under the last committed token, which is row 0.


@pytest.mark.parametrize("case", ["llama", "llama all heads", "mistral", "qwen2 some windows"])
def test_tree_row_equals_the_plain_sequence_from_the_root(
    tiny_checkpoint: Maker, case: str
) -> None:
    check_tree_rows(decoder_of(tiny_checkpoint, case))


@pytest.mark.parametrize("case", ["llama", "llama all heads"])
def test_tree_fed_in_parts_gives_the_rows_of_one_forward(tiny_checkpoint: Maker, case: str) -> None:
    decoder, prompt, nodes = decoder_of(tiny_checkpoint, case), some_ids(17), some_ids(7)
    whole, parts = decoder.new_state(40), decoder.new_state(40)
    for state in (whole, parts):
        logits(decoder, prompt, state)
    mask, positions = tree_mask(), tree_positions(17)
    expected = logits(decoder, nodes, whole, mask=mask, positions=positions)
    for rows in (slice(0, 2), slice(2, 5), slice(5, 7)):  # earlier rows are visible by ancestry
        found = logits(
            decoder,
            nodes[:, rows],
            parts,
            mask=mask[rows, : rows.stop],
            positions=positions[:, rows],
        )
        assert relative_difference(found, expected[:, rows]) <= CLOSE


@pytest.mark.parametrize("case", ["llama", "llama all heads"])
def test_committed_tree_path_equals_a_forward_of_its_tokens(
    tiny_checkpoint: Maker, case: str
) -> None:
    decoder, prompt, nodes = decoder_of(tiny_checkpoint, case), some_ids(17), some_ids(7)
    path = ancestors(6)
    state, again = decoder.new_state(40), decoder.new_state(40)
    for each in (state, again):
        logits(decoder, prompt, each)
        each.commit(0, range(17))
    logits(decoder, nodes, state, mask=tree_mask(), positions=tree_positions(17))
    state.commit(0, path)
    logits(decoder, nodes[:, path], again)
    n = 17 + len(path)
    assert state.length() == again.length() == n
    for layer in range(decoder.n_layers):
        assert (
            relative_difference(state.keys(layer)[:, :, :n], again.keys(layer)[:, :, :n]) <= CLOSE
        )
        assert (
            relative_difference(state.values(layer)[:, :, :n], again.values(layer)[:, :, :n])
            <= CLOSE
        )
    after = some_ids(3)
    assert (
        relative_difference(logits(decoder, after, state), logits(decoder, after, again)) <= CLOSE
    )


@pytest.mark.parametrize("case", ["llama", "llama all heads"])
def test_nan_in_a_sibling_does_not_leak(tiny_checkpoint: Maker, case: str) -> None:
    decoder, prompt, nodes = decoder_of(tiny_checkpoint, case), some_ids(17), some_ids(7)
    nodes[0, 3] = next(token for token in range(197) if token not in (*prompt[0], *nodes[0]))
    found = []
    for _ in range(2):
        state = decoder.new_state(40)
        logits(decoder, prompt, state)
        out = decoder.forward(
            Tokens(nodes), state, mask=tree_mask(), positions=tree_positions(17), logits_at="all"
        )
        decoder.weights.embedding[nodes[0, 3]] = torch.nan
        assert out.logits is not None
        found.append(out.logits[0])
    clean, poisoned_logits = found
    touched = [node for node in range(len(PARENTS)) if 3 in ancestors(node)]
    spared = [node for node in range(len(PARENTS)) if 3 not in ancestors(node)]
    assert poisoned_logits[touched].isnan().all()
    assert torch.equal(poisoned_logits[spared], clean[spared])


def test_a_forward_can_continue_from_hidden_states(tiny_checkpoint: Maker) -> None:
    decoder, ids = decoder_of(tiny_checkpoint, "llama"), some_ids(12)
    state = decoder.new_state(20)
    early = decoder.forward(Tokens(ids), state, layers=(0, 2))
    assert early.logits is None
    assert [state.length(0, layer) for layer in range(3)] == [12, 12, 0]
    late = decoder.forward(Hidden(early.hidden), state, layers=(2, 3), logits_at="all")
    assert late.logits is not None
    assert relative_difference(late.logits, own_logits(decoder, ids)) <= CLOSE


def test_a_skipped_layer_has_no_effect(tiny_checkpoint: Maker) -> None:
    decoder, ids = decoder_of(tiny_checkpoint, "llama"), some_ids(12)
    state = decoder.new_state(20)
    found = [logits(decoder, ids[:, :8], state, skip=frozenset({1}))]
    found.append(logits(decoder, ids[:, 8:], state, skip=frozenset({1})))
    module = get_module(decoder)
    layers = [module.model.layers[0], module.model.layers[2]]
    h = module.model.embed_tokens(ids)
    turns = module.model.rotary_emb(h, torch.arange(12)[None])
    for layer in layers:
        h = layer(h, position_embeddings=turns)
    expected = module.lm_head(module.model.norm(h))
    assert relative_difference(torch.cat(found, 1), expected) <= CLOSE
    assert [state.length(0, layer) for layer in range(3)] == [12, 0, 12]


SKIPS: tuple[tuple[Any, ...], ...] = (
    ((1, "attention"),),
    ((0, "mlp"), (2, "mlp")),
    ((0, "attention"), (1, "mlp")),
    (1, (2, "attention")),
    ((1, "attention"), (1, "mlp")),
    ((0, "attention"), (1, "attention"), (2, "attention")),
)


@pytest.mark.parametrize("skip", SKIPS, ids=str)
@pytest.mark.parametrize("case", ["llama biases", "mistral", "qwen3"])
def test_skipped_sublayers_have_no_effect(
    tiny_checkpoint: Maker, case: str, skip: tuple[Any, ...]
) -> None:
    decoder, ids = decoder_of(tiny_checkpoint, case), some_ids(24)
    module = copy.deepcopy(get_module(decoder))
    over = {(at, kind) for at in range(3) for kind in ("attention", "mlp") if at in skip}
    over |= {each for each in skip if isinstance(each, tuple)}
    left = {}
    for at, layer in enumerate(module.model.layers):  # a removed sublayer adds nothing
        if (at, "attention") in over:
            layer.self_attn.forward = lambda hidden_states, **_: (hidden_states * 0, None)
        if (at, "mlp") in over:
            layer.mlp.forward = lambda hidden_states: hidden_states * 0
        layer.register_forward_hook(lambda *given, at=at: left.__setitem__(at, given[-1]))
    with torch.no_grad():
        expected = module(input_ids=ids, use_cache=False).logits
    state, how = decoder.new_state(30), {"skip": frozenset(skip)}
    found = [logits(decoder, ids[:, :15], state, **how)]
    found += [logits(decoder, ids[:, at : at + 1], state, **how) for at in (15, 16)]
    state.commit(0, range(max(state.length(0, at) for at in range(3))))
    logits(decoder, 196 - ids[:, 17:20], state, **how)  # rejected
    state.rollback(0, 17)
    out = decoder.forward(
        Tokens(ids[:, 17:]), state, logits_at="all", captured_layers=(0, 1, 2), **how
    )
    assert relative_difference(torch.cat([*found, out.logits], 1), expected) <= CLOSE
    for at in range(3):
        assert relative_difference(out.aux_hidden_states[at], left[at][:, 17:]) <= CLOSE
        assert state.length(0, at) == (0 if (at, "attention") in over else 24)


def test_a_tree_with_skipped_sublayers_equals_its_paths(tiny_checkpoint: Maker) -> None:
    decoder, ids = decoder_of(tiny_checkpoint, "llama"), some_ids(12)
    skip, state = frozenset({(1, "attention"), (2, "mlp")}), decoder.new_state(20)
    logits(decoder, ids[:, :9], state, skip=skip)
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    found = logits(
        decoder, ids[:, 9:], state, skip=skip, mask=mask, positions=torch.tensor([[9, 10, 10]])
    )
    for path in ((9, 10), (9, 11)):
        alone = decoder.new_state(20)
        logits(decoder, ids[:, :9], alone, skip=skip)
        due = logits(decoder, ids[:, path], alone, skip=skip)[:, -1]
        assert relative_difference(found[:, path[1] - 9], due) <= CLOSE


def test_a_share_counts_the_bytes_that_are_read(tiny_checkpoint: Maker) -> None:
    decoder = decoder_of(tiny_checkpoint, "qwen2")
    module = get_module(decoder)

    def size(part: Any) -> int:
        return sum(weight.numel() for weight in part.parameters())

    layers = [
        (
            size(layer.self_attn) + size(layer.input_layernorm),
            size(layer.mlp) + size(layer.post_attention_layernorm),
        )
        for layer in module.model.layers
    ]
    end = size(module.lm_head) + size(module.model.norm)
    whole = sum(map(sum, layers)) + end
    assert decoder.share() == decoder.share((0, 3)) == 1
    assert decoder.share(logits=False) == pytest.approx(1 - end / whole)
    assert decoder.share((0, 2)) == pytest.approx((sum(map(sum, layers[:2])) + end) / whole)
    rest = decoder.share((2, 3))
    assert decoder.share((0, 2), logits=False) + rest == pytest.approx(1)
    skip = frozenset({0, (1, "attention"), (2, "mlp")})
    read = layers[1][1] + layers[2][0] + end
    assert decoder.share(skip=skip) == pytest.approx(read / whole)


def test_captured_and_final_hidden_states_are_those_of_transformers(tiny_checkpoint: Maker) -> None:
    decoder, ids = decoder_of(tiny_checkpoint, "qwen3"), some_ids(12)
    out = decoder.forward(Tokens(ids), decoder.new_state(20), captured_layers=(0, 1, 2))
    with torch.no_grad():
        expected = get_module(decoder)(input_ids=ids, output_hidden_states=True).hidden_states
    assert relative_difference(out.aux_hidden_states[0], expected[1]) <= CLOSE
    assert relative_difference(out.aux_hidden_states[1], expected[2]) <= CLOSE
    assert torch.equal(out.aux_hidden_states[2], out.hidden)
    assert relative_difference(get_module(decoder).model.norm(out.hidden), expected[3]) <= CLOSE


def test_logits_are_returned_for_the_requested_rows(tiny_checkpoint: Maker) -> None:
    decoder, ids = decoder_of(tiny_checkpoint, "llama"), some_ids(12, 2)
    rows = {}
    for at in ("all", "last", torch.tensor([3, 7, 7]), None):
        state = decoder.new_state(20, n_seqs=2)
        rows[str(at)] = decoder.forward(Tokens(ids), state, logits_at=at).logits
    every, last, some, none = rows.values()
    assert none is None
    assert relative_difference(last, every[:, -1:]) <= CLOSE
    assert relative_difference(some, every[:, [3, 7, 7]]) <= CLOSE


def test_results_of_a_forward_are_not_overwritten_by_the_next(tiny_checkpoint: Maker) -> None:
    decoder, ids = decoder_of(tiny_checkpoint, "llama"), some_ids(12)
    state = decoder.new_state(20)
    out = decoder.forward(Tokens(ids[:, :4]), state, logits_at="all", captured_layers=(0,))
    results = [out.logits, out.hidden, out.aux_hidden_states[0]]
    copies = [tensor.clone() for tensor in results]
    logits(decoder, ids[:, 4:8], state)
    assert all(torch.equal(a, b) for a, b in zip(results, copies, strict=True))


def test_the_same_text_gives_the_same_bits(tiny_checkpoint: Maker) -> None:
    decoder, ids = decoder_of(tiny_checkpoint, "llama all heads"), some_ids(30)
    state = decoder.new_state(40)
    runs = []
    for _ in range(2):
        state.clear()
        blocks = ids.split((20, 1, 1, 6, 2), 1)
        runs.append(torch.cat([logits(decoder, block, state) for block in blocks], 1))
    assert torch.equal(*runs)


def test_cached_plans_are_bounded(tiny_checkpoint: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_plan, "MAX_PLANS", 4)
    decoder, ids = decoder_of(tiny_checkpoint, "llama"), some_ids(12)
    state = decoder.new_state(20)
    found = [logits(decoder, ids[:, at : at + 1], state) for at in range(12)]
    assert len(state.plans) <= 4
    assert relative_difference(torch.cat(found, 1), own_logits(decoder, ids)) <= CLOSE


def test_more_rows_than_the_state_holds_are_refused(tiny_checkpoint: Maker) -> None:
    decoder = decoder_of(tiny_checkpoint, "llama")
    state = decoder.new_state(10)
    logits(decoder, some_ids(8), state)
    with pytest.raises(ValueError, match="do not fit into a state of 10 rows"):
        logits(decoder, some_ids(3), state)
    assert state.length() == 8


def test_a_layer_range_inside_the_model_needs_hidden_states(tiny_checkpoint: Maker) -> None:
    decoder = decoder_of(tiny_checkpoint, "llama")
    with pytest.raises(ValueError, match="hidden rows"):
        decoder.forward(Tokens(some_ids(2)), decoder.new_state(4), layers=(1, 3))
