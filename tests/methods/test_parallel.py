"""PARD, DFlash and P-EAGLE: published checkpoints compared with transformers, and training."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from methods.dflash.head import DFlash, DFlashHead
from methods.eagle3.head import Eagle3Head
from methods.pard.head import Pard, PardDraft
from methods.peagle.head import MASKED, PEagle, PEagleHead
from specbench_cli.api import Features, Tokens, Weights, read_config
from specbench_cli.engine.models.head import features
from specbench_cli.errors import EnvironmentFault
from specbench_cli.training.heads.losses import TargetOutput, make_chat_mask, run_target, unroll

TEXT = torch.tensor([[5, 17, 80, 3, 3, 41, 66, 9, 12, 95, 0, 33, 5, 18]])
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
MASK = 94
SIZES = {
    "vocab_size": 96,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def spread(module):
    """A module whose numbers are drawn widely, and whose norms are not all ones."""
    drawn = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for part in module.parameters():
            like = torch.randn(part.shape, generator=drawn)
            part.copy_(like / part.shape[1] ** 0.5 if part.dim() == 2 else 1 + like / 4)
    return module.eval().requires_grad_(False)


# ---- PARD ---------------------------------------------------------------------------------------


def published(folder, kind="llama", **words):
    """A tiny checkpoint as amd/PARD-* are: transformers' own files, and two more words."""
    make, model = FAMILIES[kind]
    module = spread(model(make(**SIZES, pard_token=MASK, spd_type="pard", **words)))
    module.bfloat16().save_pretrained(folder)
    return model.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("kind", FAMILIES)
@torch.no_grad()
def test_a_published_pard_draft_predicts_at_masks_what_transformers_predicts(
    tmp_path, target, kind
):
    oracle = published(tmp_path, kind)
    assert {"model.embed_tokens.weight", "model.norm.weight"} < load_file(
        tmp_path / "model.safetensors"
    ).keys()
    draft = PardDraft.load(tmp_path, {"target": target})
    ids = torch.cat((TEXT, torch.full((1, 3), draft.mask)), 1)
    said = draft.forward(Tokens(ids), draft.new_state(32), logits_at="all").rows
    assert draft.mask == MASK
    torch.testing.assert_close(said, oracle(ids).logits[0], **CLOSE)


def broken(folder, name, change):
    """The checkpoint with a tensor changed, or without it."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensor = tensors.pop(name)
    if change is not None:
        tensors[name] = change(tensor)
    save_file(tensors, path, {"format": "pt"})


WRONG = [
    (None, "missing tensors: {name}"),
    (lambda tensor: tensor[:-1].clone(), r"{name} has shape \[\d+(, \d+)?\]; this target needs"),
    (lambda tensor: torch.full_like(tensor, torch.nan), "{name} contains .* not finite"),
]


@pytest.mark.parametrize(("change", "what"), WRONG, ids=["missing", "size", "nan"])
def test_an_incomplete_pard_draft_is_refused(tmp_path, target, change, what):
    published(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    broken(tmp_path, name, change)
    with pytest.raises(EnvironmentFault, match=what.format(name=name)):
        PardDraft.load(tmp_path, {"target": target})


@pytest.mark.parametrize("name", ["self_attn.q_proj.bias", "mlp.up_proj.weight_scale"])
def test_a_pard_draft_with_a_tensor_that_nothing_reads_is_refused(tmp_path, target, name):
    published(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {f"model.layers.0.{name}": torch.ones(1)}, path, {"format": "pt"})
    with pytest.raises(EnvironmentFault, match=f"{name}, which does not belong"):
        PardDraft.load(tmp_path, {"target": target})


def test_a_pard_draft_of_more_layers_than_its_file_holds_is_refused_at_once(tmp_path, target):
    published(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 9000}))
    with pytest.raises(EnvironmentFault, match="9000 layers cannot be"):
        PardDraft.load(tmp_path, {"target": target})


@pytest.mark.parametrize("token", [None, 96, "m"])
def test_a_draft_model_without_a_mask_token_is_no_pard_draft(tmp_path, target, token):
    published(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"pard_token": token}))
    with pytest.raises(EnvironmentFault, match=f"pard_token {token!r}"):
        PardDraft.load(tmp_path, {"target": target})


# ---- DFlash -------------------------------------------------------------------------------------


def z_lab(folder, target, **words):
    """A tiny checkpoint in exactly the names of z-lab's, in bfloat16."""
    d, narrow, wide = target.hidden_size, 24, 3
    drawn = torch.Generator().manual_seed(6)
    sizes = {"fc.weight": (d, 2 * d), "hidden_norm.weight": (d,), "norm.weight": (d,)}
    for layer in range(wide):
        parts = {
            "self_attn.q_proj": (4 * 8, d),
            "self_attn.k_proj": (2 * 8, d),
            "self_attn.v_proj": (2 * 8, d),
            "self_attn.o_proj": (d, 4 * 8),
            "self_attn.q_norm": (8,),
            "self_attn.k_norm": (8,),
            "mlp.gate_proj": (narrow, d),
            "mlp.up_proj": (narrow, d),
            "mlp.down_proj": (d, narrow),
            "input_layernorm": (d,),
            "post_attention_layernorm": (d,),
        }
        sizes |= {f"layers.{layer}.{name}.weight": size for name, size in parts.items()}
    tensors = {}
    for name, size in sizes.items():
        like = torch.randn(size, generator=drawn)
        like = like / size[1] ** 0.5 if len(size) == 2 else 1 + like / 4
        tensors[name] = like.bfloat16()
    config = {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "block_size": 5,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 0]},
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": d,
        "intermediate_size": narrow,
        "layer_types": ["full_attention"] * wide,
        "max_position_embeddings": 128,
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_hidden_layers": wide,
        "num_key_value_heads": 2,
        "num_target_layers": target.n_layers,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "vocab_size": target.vocab_size,
    }
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | words))
    return {name: tensor.float() for name, tensor in tensors.items()}


def rows_of(target, head, n):
    out = target.forward(
        Tokens(TEXT[:, :n]), target.new_state(32), captured_layers=head.captured_layers
    )
    return features(out, head.captured_layers, target)


@torch.no_grad()
def test_a_published_dflash_head_predicts_what_transformers_drafter_predicts(tmp_path, target):
    """In two steps, of eight tokens and of three: keys and values of the first are kept."""
    from methods.hf import dflash_module

    z_lab(tmp_path, target)
    head = DFlashHead.load(tmp_path, {"target": target})
    oracle = dflash_module(DFlash.load(tmp_path, {"target": target}))
    assert (head.block, head.mask, head.captured_layers) == (5, MASK, (0, 0))
    state, seen = head.new_state(32), 0
    for n in (8, 11):
        masks = torch.full((1, 4), MASK)
        rows, ids = rows_of(target, head, n), torch.cat((TEXT[:, seen + 1 : n + 1], masks), 1)
        said = head.forward(Features(ids, rows[None, seen:]), state, logits_at="all").rows
        due = oracle(
            noise_embeds=target.embed(torch.cat((TEXT[:, n : n + 1], masks), 1)),
            context_hidden_states=rows[None],
            position_ids=torch.arange(n + 5)[None],
        ).last_hidden_state
        torch.testing.assert_close(said, target.unembed(due[0]), **CLOSE)
        assert state.length() == n
        seen = n


@pytest.mark.parametrize(("change", "what"), WRONG, ids=["missing", "size", "nan"])
@pytest.mark.parametrize("name", ["fc.weight", "layers.2.self_attn.k_norm.weight"])
def test_an_incomplete_dflash_head_is_refused(tmp_path, target, name, change, what):
    z_lab(tmp_path, target)
    broken(tmp_path, name, change)
    with pytest.raises(EnvironmentFault, match=what.format(name=name)):
        DFlashHead.load(tmp_path, {"target": target})


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types contains 'sliding_attention'"),
        ({"dflash_config": {"target_layer_ids": [0, 0]}}, "mask_token_id is None"),
        ({"dflash_config": {"mask_token_id": 96, "target_layer_ids": [0, 0]}}, "is 96; token ids"),
        ({"dflash_config": {"mask_token_id": 0, "target_layer_ids": [0, 7]}}, r"\[0, 7\]"),
        ({"dflash_config": {"mask_token_id": 0, "target_layer_ids": [0]}}, "fc.weight has shape"),
        ({"num_hidden_layers": 2}, r"unexpected tensors: layers\.2\."),
        ({"num_hidden_layers": 2**31}, "2147483648 layers cannot be: there are 36 tensors"),
        ({"block_size": 2**62}, "it must be from 2 to 512"),
        ({"block_size": "5"}, "block_size is '5'"),
        ({"output_multiplier": 2.0}, r"output_multiplier is 2\.0"),
        ({"hidden_size": 64}, "hidden size 64; the target's is 32"),
        ({"specbench": {"target_sha256": "0" * 64}}, "another|trained for"),
    ],
)
def test_an_unsupported_dflash_head_is_refused(tmp_path, family, target, words, what):
    if "specbench" in words:
        from specbench_cli.engine.models.load import load_decoder

        family.modules["target"].save_pretrained(tmp_path / "target")
        target = load_decoder(tmp_path / "target", name="target")
    z_lab(tmp_path / "head", target, **words)
    with pytest.raises(EnvironmentFault, match=what):
        DFlashHead.load(tmp_path / "head", {"target": target})


@pytest.mark.parametrize("kind", [PardDraft, DFlashHead])
def test_a_truncated_file_is_one_clear_error(tmp_path, target, kind):
    (published if kind is PardDraft else z_lab)(tmp_path, *(() if kind is PardDraft else (target,)))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(EnvironmentFault, match="is damaged: it has"):
        kind.load(tmp_path, {"target": target})


# ---- training computes what decoding computes ---------------------------------------------------

SLOTS = torch.tensor([[2, 5, 11, 12]])


@torch.no_grad()
def test_pard_computes_the_same_in_training_and_decoding(tmp_path, target):
    published(tmp_path)
    module = Pard(read_config(tmp_path), dict(Weights(tmp_path))).eval()
    draft = PardDraft.load(tmp_path, {"target": target})
    read = TargetOutput(make_chat_mask(TEXT, None), TEXT, TEXT)
    steps = [logits for logits, _ in module.draft(None, TEXT, read, SLOTS, 4)]
    for at, slot in enumerate(SLOTS[0].tolist()):
        ids = torch.cat((TEXT[:, : slot + 2], torch.full((1, 3), MASK)), 1)
        said = draft.forward(Tokens(ids), draft.new_state(32), logits_at="all").rows[-4:]
        torch.testing.assert_close(torch.stack([step[0, at] for step in steps]), said, **CLOSE)


@torch.no_grad()
def test_pard_drops_masks_so_that_what_one_sees_is_there(tmp_path):
    """The paper's conditional drop: each step keeps slots of the step before, and says the same."""
    published(tmp_path)
    module = Pard(read_config(tmp_path), dict(Weights(tmp_path)))
    read, slots = TargetOutput(make_chat_mask(TEXT, None), TEXT, TEXT), torch.arange(12)[None]
    kept = list(module.train().draft(None, TEXT, read, slots, 6))
    whole = list(module.eval().draft(None, TEXT, read, slots, 6))
    assert [len(at[0]) for _, at in kept] == [12, 8, 5, 4, 2, 2]
    assert all(set(b[0].tolist()) <= set(a[0].tolist()) for (_, a), (_, b) in pairwise(kept))
    for (some, at), (all_, _) in zip(kept, whole, strict=True):
        torch.testing.assert_close(some[0], all_[0, at[0]], **CLOSE)


@torch.no_grad()
def test_dflash_computes_the_same_in_training_and_decoding(tmp_path, family, target):
    z_lab(tmp_path, target)
    module = DFlash.load(tmp_path, {"target": target})
    head = DFlashHead(module, target)
    oracle = family.modules["target"]
    read = run_target(oracle, TEXT, module.captured_layers)
    steps = [logits for logits, _ in module.draft(oracle, TEXT, read, SLOTS, 4)]
    for at, slot in enumerate(SLOTS[0].tolist()):
        n = slot + 1
        ids = torch.cat((TEXT[:, 1 : n + 1], torch.full((1, 4), MASK)), 1)
        x = Features(ids, rows_of(target, head, n)[None])
        said = head.forward(x, head.new_state(32), logits_at="all").rows[1:]
        torch.testing.assert_close(torch.stack([step[0, at] for step in steps]), said, **CLOSE)


# ---- P-EAGLE ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parallel_eagle(target):
    return PEagle.random(target, seed=6)


def vllm(folder, module, changed=(), **words):
    """A folder of the head as vLLM reads one: EAGLE-3's names and `mask_hidden`."""
    own = {"layer.": "midlayer.", "enorm.": "midlayer.input_layernorm.", MASKED: MASKED}
    own |= {"hnorm.": "midlayer.hidden_norm."}
    tensors = {}
    for name, tensor in module.tensors().items():
        theirs = next(
            (own[start] + name[len(start) :] for start in own if name.startswith(start)), name
        )
        tensors[theirs] = tensor.contiguous()
    for name in changed:
        del tensors[name]
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": module.shape.hidden_size,
        "intermediate_size": module.shape.intermediate_size,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": module.shape.head_dim,
        "rms_norm_eps": module.shape.rms_norm_eps,
        "max_position_embeddings": module.shape.max_position_embeddings,
        "rope_theta": 10000.0,
        "ptd_token_id": module.mask,
    }
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, **words}))
    return folder


@torch.no_grad()
def test_p_eagles_one_forward_is_eagle3s_head_fed_masks_one_by_one(target, parallel_eagle):
    head, plain = PEagleHead(parallel_eagle, target), Eagle3Head(parallel_eagle, target)
    assert head.mask == target.vocab_size - 1
    ours, theirs = head.new_state(32), plain.new_state(32)
    done = 0
    for n in (6, 9):  # a prompt, and a step: no row of a mask is kept
        true = rows_of(target, head, n)[None, done:]
        ids = TEXT[:, done + 1 : n + 1]
        masks = torch.full((1, 3), head.mask)
        said = head.forward(Features(torch.cat((ids, masks), 1), true), ours, logits_at="all").rows
        assert ours.length() == n
        due = [plain.forward(Features(ids, true), theirs).rows[-1]]
        for _ in range(3):
            row = Features(masks[:, :1], parallel_eagle.mask_hidden[None])
            due.append(plain.forward(row, theirs).rows[-1])
        theirs.rollback(0, n)
        torch.testing.assert_close(said, torch.stack(due), **CLOSE)
        done = n
    assert not torch.isclose(said[1], said[2]).all()


@torch.no_grad()
def test_p_eagle_computes_the_same_in_training_and_decoding(family, target, parallel_eagle):
    head, oracle = PEagleHead(parallel_eagle, target), family.modules["target"]
    read = run_target(oracle, TEXT, head.captured_layers)
    steps = [step.logits for step in unroll(parallel_eagle, oracle, TEXT, read, SLOTS, 4)]
    for at, slot in enumerate(SLOTS[0].tolist()):
        n = slot + 1
        ids = torch.cat((TEXT[:, 1 : n + 1], torch.full((1, 3), head.mask)), 1)
        x = Features(ids, rows_of(target, head, n)[None])
        said = head.forward(x, head.new_state(32), logits_at="all").rows
        said = said if parallel_eagle.draft_ids is None else said[:, parallel_eagle.draft_ids]
        torch.testing.assert_close(torch.stack([step[0, at] for step in steps]), said, **CLOSE)


@torch.no_grad()
def test_a_p_eagle_folder_is_read_and_no_eagle3_head(tmp_path, target, parallel_eagle):
    vllm(tmp_path, parallel_eagle)
    head = PEagleHead.load(tmp_path, {"target": target})
    plain = PEagleHead(parallel_eagle, target)
    x = Features(TEXT[:, 1:7], rows_of(target, head, 4)[None])
    said, due = (
        each.forward(x, each.new_state(32), logits_at="all").rows for each in (head, plain)
    )
    torch.testing.assert_close(said, due, **CLOSE)
    with pytest.raises(EnvironmentFault, match=r"kind p-eagle .* needs a head of kind eagle3"):
        Eagle3Head.load(tmp_path, {"target": target})
    for words, what in (
        ({"ptd_token_id": 96}, "ptd_token_id is 96"),
        ({"ptd_token_id": None}, "None"),
    ):
        with pytest.raises(EnvironmentFault, match=what):
            PEagleHead.load(vllm(tmp_path, parallel_eagle, **words), {"target": target})
    with pytest.raises(EnvironmentFault, match="missing tensors: mask_hidden"):
        PEagleHead.load(vllm(tmp_path, parallel_eagle, (MASKED,)), {"target": target})
