"""Training of draft heads: attention of a step, the loss, and the stored file."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from methods._heads.layer import LayerHead
from methods._heads.module import DraftHead, HeadOutput, get_head_classes
from methods._heads.recipe import Objective, TargetStatistics
from methods.eagle.head import EagleHead
from methods.eagle3.head import Eagle3Head
from methods.mtp.head import MtpHead
from specbench_cli.engine.models.checkpoint import Weights
from specbench_cli.engine.models.head import NORMED, features
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.engine.types import Features, Tokens
from specbench_cli.training.heads import build as head_build
from specbench_cli.training.heads.build import SCHEDULES, HeadSchedule
from specbench_cli.training.heads.losses import head_loss, run_target, unroll
from specbench_cli.training.heads.mat import estimate_mat
from specbench_cli.training.packing import EncodedChat, TrainingBatch

BEGIN, VOCABULARY, LENGTH = 3, 40, 24
DRAFT_IDS = torch.tensor([0, 2, 5, 6, 7, *range(20, 40)])
KINDS = ("eagle", "eagle3", "mtp")
PREFIX = ("hydra++", "clover")
"""Heads whose layer reads only the target's rows. All their weights are drawn at random here,
because a new head passes the rows on unchanged."""


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=24,
        bos_token_id=BEGIN,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    model.eval()
    model.requires_grad_(False)
    return model


@pytest.fixture
def make(target: LlamaForCausalLM) -> Callable[[str], DraftHead]:
    def head(kind: str) -> DraftHead:
        torch.manual_seed(1)
        head_module = new_head(kind, target.config, 24, 8, DRAFT_IDS)
        for parameter in head_module.parameters() if kind in PREFIX else ():
            torch.nn.init.normal_(parameter, std=0.3)
        return head_module

    return head


def new_head(
    kind: str, target: LlamaConfig, mlp: int, n_layers: int, draft_ids: Tensor
) -> DraftHead:
    """Return a head of a kind, for a target with `n_layers` layers."""
    config = head_build.make_head_config(target, mlp)
    statistics = TargetStatistics(
        n_layers,
        target.vocab_size,
        lambda n: draft_ids if n else torch.arange(target.vocab_size),
        lambda captured_layers: torch.full((len(captured_layers) * target.hidden_size,), 4.0),
    )
    shape = head_build.get_head_shape(config)
    return get_head_classes()[kind].new(
        shape, {"rope_parameters": config.rope_parameters}, statistics
    )


def text(seed: int = 0, chats: tuple[int, ...] = (11, 13)) -> Tensor:
    """Return chats of these lengths, packed into one sequence `[1, LENGTH + 1]`."""
    ids = torch.randint(5, VOCABULARY, (1, sum(chats) + 1), generator=seeded(seed))
    first = 0
    for length in chats:
        ids[0, first] = BEGIN
        first += length
    return ids


def starts_of(ids: Tensor) -> Tensor:
    """Return the start position of each token's chat."""
    places = torch.arange(ids.shape[1])
    return torch.where(ids == BEGIN, places, 0).cummax(-1).values


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch(seed: int = 0, answers: slice = slice(14, 23)) -> TrainingBatch:
    ids = text(seed)
    weights = torch.full((1, LENGTH), 0.1)
    weights[:, answers] = 1.0
    return TrainingBatch(ids[:, :-1], ids[:, 1:], weights, starts_of(ids[:, :-1]))


def unroll_steps(
    head: DraftHead, target: LlamaForCausalLM, ids: Tensor, steps: int, slots: Tensor | None = None
) -> list[Tensor]:
    if slots is None:
        slots = torch.arange(ids.shape[1])[None]
    with torch.no_grad():
        read = run_target(target, ids, head.captured_layers, starts_of(ids))
        return [step.logits for step in unroll(head, target, ids, read, slots, steps)]


def unroll_one_slot(
    head: DraftHead, target: LlamaForCausalLM, ids: Tensor, slot: int, steps: int
) -> list[Tensor]:
    """Draft from one slot with plain causal attention and dense masks, like `unroll_steps`.

    The text up to `slot` and the drafted steps are one growing sequence. Its features are the
    target's up to `slot` and the head's own after it.
    """
    with torch.no_grad():
        read = run_target(target, ids, head.captured_layers, starts_of(ids))
        features = head.project_features(read.features)[:, : slot + 1]
        rows = []
        for step in range(steps):
            n = slot + 1 + step
            tokens = target.model.embed_tokens(ids[:, 1 : n + 1])
            hidden = dense_layer(head, tokens, features)
            rows.append(hidden.normed[:, -1])
            features = torch.cat([features, hidden.hidden[:, -1:]], 1)
        weight = target.lm_head.weight
        weight = weight if head.draft_ids is None else weight[head.draft_ids]
        return [row @ weight.T for row in rows]


def dense_layer(head: DraftHead, tokens: Tensor, features: Tensor) -> HeadOutput:
    """Compute a head's layer over a whole sequence with torch attention and an explicit mask."""
    layer, n = head.layer, tokens.shape[1]
    attention = layer.self_attn
    rows, residual = head.join(tokens, features)
    places = torch.arange(n)[None]
    keys, values = attention.project_kv(rows, places)
    queries = attention._rotate(attention.q_proj(rows), places, attention.q_norm)
    mask = torch.ones(n, n, dtype=torch.bool).tril()
    attention_output = torch.nn.functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask
    )
    residual = residual + attention.o_proj(attention_output.transpose(1, 2).flatten(2))
    residual = residual + layer.mlp(layer.post_attention_layernorm(residual))
    return head.make_output(residual)


@pytest.mark.parametrize("kind", KINDS)
def test_diagonal_attention_equals_dense_attention_with_an_explicit_mask(
    kind: str, make: Callable[[str], DraftHead], target: LlamaForCausalLM
) -> None:
    head, ids = make(kind), text(chats=(LENGTH,))[:, :-1]
    steps = unroll_steps(head, target, ids, 4)
    for slot in (0, 3, 12):
        expected_steps = unroll_one_slot(head, target, ids, slot, 4)
        for step, row in zip(steps, expected_steps, strict=True):
            torch.testing.assert_close(step[:, slot], row, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_step_is_a_teacher_forced_forward(
    kind: str, make: Callable[[str], DraftHead], target: LlamaForCausalLM
) -> None:
    head, ids = make(kind), text(chats=(LENGTH,))[:, :-1]
    with torch.no_grad():
        read = run_target(target, ids, head.captured_layers, starts_of(ids))
        following = torch.cat([ids[:, 1:], ids[:, -1:]], 1)
        out = dense_layer(
            head, target.model.embed_tokens(following), head.project_features(read.features)
        )
    weight = (
        target.lm_head.weight if head.draft_ids is None else target.lm_head.weight[head.draft_ids]
    )
    torch.testing.assert_close(
        unroll_steps(head, target, ids, 1)[0], out.normed @ weight.T, atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("kind", KINDS + PREFIX)
def test_sampled_slots_draft_the_same_as_all_slots(
    kind: str, make: Callable[[str], DraftHead], target: LlamaForCausalLM
) -> None:
    head, ids, slots = make(kind), text()[:, :-1], torch.tensor([[2, 9, 15]])
    all_slots, part = unroll_steps(head, target, ids, 3), unroll_steps(head, target, ids, 3, slots)
    for a, b in zip(all_slots, part, strict=True):
        torch.testing.assert_close(a[:, slots[0]], b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS + PREFIX)
def test_a_chat_does_not_attend_to_another_chat(
    kind: str, make: Callable[[str], DraftHead], target: LlamaForCausalLM
) -> None:
    head, ids = make(kind), text()[:, :-1]
    other = ids.clone()
    other[0, 1:11] = other[0, 1:11].flip(0)
    for a, b in zip(
        unroll_steps(head, target, ids, 3), unroll_steps(head, target, other, 3), strict=True
    ):
        torch.testing.assert_close(a[:, 11:], b[:, 11:], atol=1e-5, rtol=1e-5)
    expected_steps = unroll_steps(head, target, ids[:, 11:], 1)[0]  # its positions start at 0
    torch.testing.assert_close(
        expected_steps, unroll_steps(head, target, ids, 1)[0][:, 11:], atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("kind", KINDS + PREFIX)
def test_a_slot_reads_the_token_after_its_features_and_no_later_token(
    kind: str, make: Callable[[str], DraftHead], target: LlamaForCausalLM
) -> None:
    head, ids = make(kind), text(chats=(LENGTH,))[:, :-1]
    logits = unroll_steps(head, target, ids, 1)[0]
    for token, is_changed in ((7, True), (8, False)):
        other = ids.clone()
        other[0, token] = 5 + (other[0, token] - 4) % 30
        difference = (unroll_steps(head, target, other, 1)[0] - logits)[0, 6].abs().max()
        assert (difference > 1e-4) == is_changed


@pytest.mark.parametrize("name", ["paper", "ttt"])
@pytest.mark.parametrize("kind", KINDS + PREFIX)
def test_labels_of_weight_0_do_not_change_the_loss(
    name: str, kind: str, make: Callable[[str], DraftHead], target: LlamaForCausalLM
) -> None:
    head, aim = make(kind), replace(get_head_classes()[kind].recipe.losses[name], noise=0.0)
    loss, full_batch = head_loss(head, target, aim, fast=False), batch()
    weights = full_batch.weights.clone()
    weights[:, 20:] = 0.0
    one = full_batch._replace(weights=weights)
    other = batch()
    changed = TrainingBatch(other.inputs.clone(), other.targets.clone(), weights, other.starts)
    changed.inputs[:, 22:], changed.targets[:, 21:] = 9, 9
    assert loss(one).item() == pytest.approx(loss(changed).item(), abs=1e-6)
    assert loss(one).item() != pytest.approx(loss(full_batch).item(), abs=1e-6)


def test_a_slot_is_masked_if_its_label_is_outside_the_draft_vocabulary(
    make: Callable[[str], DraftHead], target: LlamaForCausalLM
) -> None:
    head, full_batch = make("eagle3"), batch()
    with torch.no_grad():
        likeliest = target(full_batch.inputs[:, 11:]).logits.argmax(-1)[0]
    unknown = [11 + i for i, token in enumerate(likeliest.tolist()) if token not in DRAFT_IDS]
    weights = torch.zeros(1, LENGTH)
    weights[:, [at for at in unknown if at > 12]] = 1.0
    loss = head_loss(head, target, Objective(steps=1), fast=False)
    assert weights.any()
    assert loss(full_batch._replace(weights=weights)).item() == 0.0


def test_feature_noise_is_seeded_by_the_batch_and_changes_the_loss(
    make: Callable[[str], DraftHead], target: LlamaForCausalLM
) -> None:
    head, aim = make("eagle"), get_head_classes()["eagle"].recipe.losses["paper"]
    noisy, plain = (head_loss(head, target, a, False) for a in (aim, replace(aim, noise=0.0)))
    assert noisy(batch()).item() == noisy(batch()).item() != plain(batch()).item()


@pytest.mark.parametrize("kind", KINDS + PREFIX)
def test_only_the_head_gets_gradients(
    kind: str, make: Callable[[str], DraftHead], target: LlamaForCausalLM
) -> None:
    head = make(kind)
    torch.autograd.backward(
        head_loss(head, target, get_head_classes()[kind].recipe.losses["ttt"], fast=False)(batch())
    )
    assert all(p.grad is not None for p in head.parameters())
    assert all(p.grad is None for p in target.parameters())


def test_a_mat_estimate_counts_drafts_before_the_first_wrong_one(
    make: Callable[[str], DraftHead],
    target: LlamaForCausalLM,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accepted_counts = torch.tensor([[9, 9, 2, 0, 0, 1, 9, 9, 9, 9]])
    monkeypatch.setattr(
        "specbench_cli.training.heads.mat._count_correct_drafts", lambda *_: accepted_counts
    )
    chat = EncodedChat([BEGIN, 9, 9, *range(10, 17)], [0.1] * 3 + [1.0] * 7)
    # From position 3, two of five drafts are right, plus the bonus token. From 6, one of three,
    # plus the bonus. From 8, the last token.
    found = estimate_mat(make("eagle"), target, [chat], step=7, chain=5)
    assert (found.step, found.mat) == (7, 2.0)
    assert found.accepted == [pytest.approx(1.0), pytest.approx(0.5), 0.0, 0.0, 0.0]


def test_the_vocabulary_map_is_increasing_and_invertible(
    make: Callable[[str], DraftHead],
) -> None:
    named = head_build.to_stored_tensors(make("eagle3"))
    d2t, t2d = named["d2t"], named["t2d"]
    ids = torch.arange(len(d2t)) + d2t
    assert d2t.dtype == torch.int64
    assert t2d.dtype == torch.bool
    assert t2d.shape == (VOCABULARY,)
    assert bool((ids.diff() > 0).all())
    assert torch.equal(t2d.nonzero()[:, 0], ids)
    assert torch.equal(ids, DRAFT_IDS)


def test_the_most_frequent_tokens_are_kept_in_the_order_of_their_ids() -> None:
    found = head_build.find_most_frequent([4, 4, 4, 1, 1, 3, 3, 2], 3, vocabulary=6)
    assert found.tolist() == [1, 3, 4]
    assert head_build.find_most_frequent([], 2, vocabulary=6).tolist() == [0, 1]


@pytest.mark.parametrize("n_layers", [1, 2, 3, 5, 8, 15])
def test_small_targets_capture_their_last_layer(n_layers: int, target: LlamaForCausalLM) -> None:
    found = new_head("eagle3", target.config, 24, n_layers, DRAFT_IDS).captured_layers
    assert found[-1] == n_layers - 1
    assert all(0 <= layer < n_layers for layer in found)


def test_large_targets_capture_the_layers_of_the_official_code(
    target: LlamaForCausalLM,
) -> None:
    assert new_head("eagle3", target.config, 24, 32, DRAFT_IDS).captured_layers == (1, 15, 28)
    assert new_head("eagle3", target.config, 24, 16, DRAFT_IDS).captured_layers == (1, 7, 12)


LAYER = {
    **{f"self_attn.{part}_proj": (16, 16) for part in "qkvo"},
    "mlp.gate_proj": (24, 16),
    "mlp.up_proj": (24, 16),
    "mlp.down_proj": (16, 24),
    "post_attention_layernorm": (16,),
}


def add_prefix(prefix: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}


NAMES: dict[str, dict[str, tuple[int, ...]]] = {
    "eagle": {"fc.weight": (16, 32), "fc.bias": (16,), **add_prefix("layers.0.", LAYER)},
    "eagle3": {
        "fc.weight": (16, 48),
        "norm.weight": (16,),
        "d2t": (len(DRAFT_IDS),),
        "t2d": (VOCABULARY,),
        **add_prefix(
            "midlayer.",
            {
                **LAYER,
                **{f"self_attn.{part}_proj": (16, 32) for part in "qkv"},
                "hidden_norm": (16,),
                "input_layernorm": (16,),
            },
        ),
    },
    "mtp": add_prefix(
        "model.mtp_layers.0.",
        {
            **LAYER,
            "input_proj": (16, 32),
            "token_layernorm": (16,),
            "hidden_layernorm": (16,),
            "final_layernorm": (16,),
            "input_layernorm": (16,),
        },
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_has_the_published_names_and_shapes_in_fp16(
    kind: str, make: Callable[[str], DraftHead], target: LlamaForCausalLM, tmp_path: Path
) -> None:
    head, config = make(kind), head_build.make_head_config(target.config, 24)
    head_build.export(head, config, tmp_path, {"kind": kind, "target_sha256": "ab"})
    stored = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    assert {name: tuple(value.shape) for name, value in stored.items()} == NAMES[kind]
    assert all(v.dtype == torch.float16 for n, v in stored.items() if n not in ("d2t", "t2d"))
    assert config["specbench"] == {
        "kind": kind,
        "target_sha256": "ab",
        "taps": list(head.captured_layers),
    }
    assert config["num_hidden_layers"] == 1
    assert config.get("draft_vocab_size") == (len(DRAFT_IDS) if kind == "eagle3" else None)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_shipped_head_stays_below_two_megabytes(schedule: HeadSchedule) -> None:
    wide = LlamaConfig(vocab_size=4096, hidden_size=256, num_attention_heads=4)
    draft_ids = torch.arange(get_head_classes()[schedule.kind].recipe.draft_vocab_size or 0)
    head = new_head(schedule.kind, wide, schedule.mlp, 8, draft_ids)
    size = sum(t.numel() * t.element_size() for t in head_build.to_stored_tensors(head).values())
    assert size < 1_990_000


DRAFTS = {"eagle": EagleHead, "eagle3": Eagle3Head, "mtp": MtpHead}


@pytest.mark.parametrize("kind", KINDS)
def test_a_decoded_chain_equals_the_training_unroll(
    kind: str, make: Callable[[str], DraftHead], target: LlamaForCausalLM, tmp_path: Path
) -> None:
    """Each level that a method drafts with the file equals an unrolled step of training."""
    head, ids, slot = make(kind), text(chats=(LENGTH,))[:, :-1], 9
    head_build.round_to_fp16(head)
    target.save_pretrained(tmp_path / "target")
    sha = Weights(tmp_path / "target").sha256()
    config = head_build.make_head_config(target.config, 24)
    head_build.export(head, config, tmp_path / "head", {"kind": kind, "target_sha256": sha})
    decoder = load_decoder(tmp_path / "target", name="target")
    check_decoding(
        head, target, DRAFTS[kind].load(tmp_path / "head", {"target": decoder}), ids, slot
    )


@pytest.mark.parametrize("kind", KINDS)
def test_biases_head_norms_and_shared_keys_are_the_same_in_training_and_decoding(
    kind: str, make: Callable[[str], DraftHead], target: LlamaForCausalLM, tmp_path: Path
) -> None:
    plain, seed = make(kind), torch.Generator().manual_seed(5)
    shape = replace(plain.shape, num_attention_heads=4, head_dim=6)
    stored_tensors = {
        name: tensor for name, tensor in plain.tensors().items() if "self_attn" not in name
    }
    reads = plain.layer.self_attn.q_proj.in_features
    sizes = {
        "q_proj": (24, reads),
        "k_proj": (12, reads),
        "v_proj": (12, reads),
        "o_proj": (16, 24),
    }
    for name, size in sizes.items():
        stored_tensors[f"layer.self_attn.{name}.weight"] = torch.randn(size, generator=seed) / 4
        stored_tensors[f"layer.self_attn.{name}.bias"] = torch.randn(size[0], generator=seed)
    for name in ("q_norm", "k_norm"):
        stored_tensors[f"layer.self_attn.{name}.weight"] = 0.5 + torch.rand(6, generator=seed)
    config = {"specbench": {"taps": list(plain.captured_layers)}}
    files = replace(plain.as_loaded(), tensors=stored_tensors, shape=shape, config=config)
    target.save_pretrained(tmp_path / "target")
    decoder = load_decoder(tmp_path / "target", name="target")
    head = get_head_classes()[kind].from_files(files, decoder)
    check_decoding(head, target, DRAFTS[kind](head, decoder), text(chats=(LENGTH,))[:, :-1], 9)


def check_decoding(
    head: DraftHead, target: LlamaForCausalLM, drafts: LayerHead, ids: Tensor, slot: int
) -> None:
    """Check that the fused head drafts, from a slot on, the same logits as the training unroll."""
    decoder = drafts.target
    layers = tuple(at for at in drafts.captured_layers if at != NORMED)
    read = decoder.forward(Tokens(ids), decoder.new_state(LENGTH), captured_layers=layers)
    rows, state = (
        features(read, drafts.captured_layers, decoder)[None, : slot + 1],
        drafts.new_state(LENGTH),
    )
    tokens = ids[:, 1 : slot + 2]
    draft_ids = torch.arange(VOCABULARY) if head.draft_ids is None else head.draft_ids
    for expected in unroll_steps(head, target, ids, 4, torch.tensor([[slot]])):
        out = drafts.forward(Features(tokens, rows), state)
        assert out.logits is not None
        torch.testing.assert_close(
            out.logits[0, -1, draft_ids], expected[0, 0], atol=1e-4, rtol=1e-4
        )
        slot += 1
        tokens, rows = ids[:, slot + 1 : slot + 2], out.hidden[:, -1:]
