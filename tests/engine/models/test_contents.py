"""A checkpoint is loaded with all its tensors as its config requires, or refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from specbench_cli.engine.models import load
from specbench_cli.engine.models.load import get_module, load_decoder
from specbench_cli.engine.types import Tokens
from specbench_cli.errors import EnvironmentFault, SpecbenchError

Maker = Callable[..., Path]
Change = Callable[[dict[str, Tensor]], None]
OURS = ("llama", "mistral", "qwen2", "qwen3")
OTHERS = ("gemma2", "phi3", "gpt2", "olmo2")
FIRST = {
    **dict.fromkeys((*OURS, "gemma2", "olmo2"), "model.layers.0.self_attn.o_proj.weight"),
    "phi3": "model.layers.0.self_attn.qkv_proj.weight",
    "gpt2": "transformer.h.0.attn.c_attn.weight",
}
"""Name of a matrix, by model family."""


@pytest.fixture
def changed(tiny_checkpoint: Maker, tmp_path: Path) -> Callable[..., Path]:
    """Make a copy of a tiny checkpoint with other tensors or config keys."""

    def make(family: str, change: Change = lambda _: None, /, **config: Any) -> Path:
        folder = Path(shutil.copytree(tiny_checkpoint(family), tmp_path / "copy"))
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        config_keys = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config_keys | config))
        return folder

    return make


def logits_of(folder: Path, ids: Tensor) -> Tensor:
    """Return the logits of a decoder that reads the ids in several forwards."""
    decoder = load_decoder(folder, name="target")
    state = decoder.new_state(ids.shape[1])
    parts = [decoder.forward(Tokens(part), state, logits_at="all") for part in ids.split(7, 1)]
    return torch.cat([part.logits for part in parts if part.logits is not None], 1)


def expected_of(folder: Path, ids: Tensor) -> Tensor:
    """Return the logits of transformers' own module."""
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits: Tensor = module(ids).logits
    return logits


IDS = torch.randint(0, 197, (1, 24), generator=torch.Generator().manual_seed(1))


def drop(name: str) -> Change:
    return lambda tensors: [tensors.pop(each) for each in [*tensors] if name in each][:0]


def add(name: str, *size: int) -> Change:
    return lambda tensors: tensors.update({name: torch.ones(size)})


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "lm_head.weight"),
        ("llama", "model.embed_tokens.weight"),
        ("mistral", "model.layers.1.mlp.up_proj.weight"),
        ("qwen2", "model.layers.0.self_attn.k_proj.bias"),
        ("qwen3", "model.layers.2.self_attn.q_norm.weight"),
        ("gemma2", "model.layers.1.pre_feedforward_layernorm.weight"),
        ("gpt2", "transformer.h.1.attn.c_attn.bias"),
    ],
)
def test_a_tensor_that_the_config_demands_and_no_file_holds_is_named_at_loading(
    changed: Callable[..., Path], family: str, name: str, host: bool
) -> None:
    folder = changed(family, drop(name))
    with pytest.raises(EnvironmentFault, match=f"lacks the tensor {name}.*requires"):
        load_decoder(folder, name="target", host_module=host)


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("family", [*OURS, *OTHERS])
@pytest.mark.parametrize("end", ["_scale", "_scale_inv", "_other"])
def test_a_tensor_that_the_config_does_not_provide_for_is_named(
    changed: Callable[..., Path], family: str, end: str, host: bool
) -> None:
    name = FIRST[family] + end
    folder = changed(family, add(name, 1))
    with pytest.raises(
        EnvironmentFault, match=f"tensor {name}, which does not belong to the model"
    ):
        load_decoder(folder, name="target", host_module=host)


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize(
    ("family", "name", "size"),
    [
        ("llama", "model.layers.0.self_attn.q_proj.bias", 64),
        ("llama", "model.layers.1.mlp.down_proj.bias", 64),
        ("mistral", "model.layers.0.self_attn.v_proj.bias", 32),
        ("qwen2", "model.layers.0.self_attn.o_proj.bias", 64),
        ("qwen2", "model.layers.0.self_attn.q_norm.weight", 16),
        ("llama", "model.layers.2.self_attn.k_norm.weight", 16),
        ("llama", "model.layers.3.input_layernorm.weight", 64),
        ("olmo2", "lm_head.bias", 197),
    ],
)
def test_biases_norms_and_layers_beyond_the_config_are_refused(
    changed: Callable[..., Path], family: str, name: str, size: int, host: bool
) -> None:
    with pytest.raises(EnvironmentFault, match=name):
        load_decoder(changed(family, add(name, size)), name="target", host_module=host)


@pytest.mark.parametrize("scale", ["weight_scale", "weight_scale_inv", "SCB"])
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.int8])
def test_eight_bits_beside_a_scale_that_nothing_reads_are_refused(
    changed: Callable[..., Path], kind: torch.dtype, scale: str
) -> None:
    def quantise(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "proj.weight" in name]:
            factor = tensors[name].abs().max() / 100
            tensors[name] = (tensors[name] / factor).to(kind)
            tensors[name.replace("weight", scale)] = factor[None]

    with pytest.raises(EnvironmentFault, match=f"tensor .*{scale} and 20 more") as fault:
        load_decoder(changed("llama", quantise), name="target")
    assert "float16 or bfloat16" in (fault.value.hint or "")


def test_a_quantisation_whose_package_is_missing_is_named(
    changed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Loader:
        def from_pretrained(self, *_: object, **__: object) -> None:
            raise ImportError("some-package is required")

    monkeypatch.setattr(load, "_auto_class", lambda _: Loader())
    folder = changed("llama", quantization_config={"quant_method": "awq"})
    with pytest.raises(EnvironmentFault, match=r"is quantised, .*: some-package is required"):
        load_decoder(folder, name="target")


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_whole_numbers_without_a_scale_are_refused(
    changed: Callable[..., Path], family: str
) -> None:
    name = FIRST[family]
    folder = changed(family, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    with pytest.raises(EnvironmentFault, match=f"{name} is stored as integers"):
        load_decoder(folder, name="target")


def test_eight_bits_without_a_scale_are_the_weights(changed: Callable[..., Path]) -> None:
    name = FIRST["llama"]
    folder = changed(
        "llama", lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)})
    )
    assert (logits_of(folder, IDS) - expected_of(folder, IDS)).abs().max() < 1e-4


@pytest.mark.parametrize("family", ["llama", "olmo2"])
def test_a_tied_flag_beside_an_output_matrix_of_its_own_is_refused(
    changed: Callable[..., Path], family: str
) -> None:
    folder = changed(family, tie_word_embeddings=True)
    with pytest.raises(EnvironmentFault, match=r"tie_word_embeddings to true, but lm_head\.weight"):
        load_decoder(folder, name="target")


@pytest.mark.parametrize("family", ["llama", "olmo2"])
def test_a_tied_matrix_may_be_stored_twice(changed: Callable[..., Path], family: str) -> None:
    def copy(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    folder = changed(family, copy, tie_word_embeddings=True)
    assert (logits_of(folder, IDS) - expected_of(folder, IDS)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("family", "name", "size"),
    [
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq", (8,)),
        ("qwen2", "model.mtp_layers.0.input_proj.weight", (64, 128)),
        ("qwen3", "mtp.fc.weight", (64, 128)),
        ("gpt2", "transformer.h.0.attn.bias", (1, 1, 256, 256)),
        ("gpt2", "transformer.h.0.attn.masked_bias", ()),
    ],
)
def test_tensors_that_change_nothing_do_not_matter(
    changed: Callable[..., Path],
    tiny_checkpoint: Maker,
    family: str,
    name: str,
    size: tuple[int, ...],
) -> None:
    folder = changed(family, add(name, *size))
    assert torch.equal(logits_of(folder, IDS), logits_of(tiny_checkpoint(family), IDS))


def test_a_layer_for_multi_token_prediction_does_not_matter(
    changed: Callable[..., Path], tiny_checkpoint: Maker
) -> None:
    def layer(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.3.eh_proj.weight"] = torch.ones(64, 128)
        tensors["model.layers.3.self_attn.q_proj.weight"] = torch.ones(64, 64)

    folder = changed("llama", layer)
    assert torch.equal(logits_of(folder, IDS), logits_of(tiny_checkpoint("llama"), IDS))


def test_two_sets_of_weights_in_one_folder_are_refused(
    changed: Callable[..., Path], tiny_checkpoint: Maker
) -> None:
    folder = changed("llama")
    for file in tiny_checkpoint("llama", shard="100KB", seed=1).glob("model*"):
        shutil.copy(file, folder)
    with pytest.raises(EnvironmentFault, match=r"two sets of weights: model\.safetensors, and"):
        load_decoder(folder, name="target")


def test_an_index_of_the_only_file_is_no_second_set(
    changed: Callable[..., Path], tiny_checkpoint: Maker
) -> None:
    folder = changed("llama")
    names = load_file(folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(logits_of(folder, IDS), logits_of(tiny_checkpoint("llama"), IDS))


def test_a_tensor_in_two_shards_is_refused(tiny_checkpoint: Maker, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint("llama", shard="100KB"), tmp_path / "copy"))
    first, last = sorted(folder.glob("*.safetensors"))[:2]
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(last) | {name: tensor}, last)
    with pytest.raises(EnvironmentFault, match=f"{name} twice: in {first.name} and in {last.name}"):
        load_decoder(folder, name="target")


SETTINGS: tuple[dict[str, Any], ...] = (
    {"sliding_window": 5},
    {"sliding_window": 20},
    {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    {"is_causal": False},
    {"attention_bias": True},
    {"mlp_bias": True},
    {"head_dim": 8},
    {"partial_rotary_factor": 0.5},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0, "partial_rotary_factor": 0.5}},
    {"logits_scaling": 3.0},
    {"logit_scale": 3.0},
    {"final_logit_softcapping": 1.0},
    {"attn_logit_softcapping": 1.0},
    {"embedding_multiplier": 2.0},
    {"residual_multiplier": 0.5},
    {"attention_multiplier": 0.1},
    {"query_pre_attn_scalar": 2},
    {"hidden_act": "gelu"},
    {"rms_norm_eps": 0.1},
    {"pretraining_tp": 2},
    {"tie_word_embeddings": True},
    {"num_experts": 2},
    {"use_qk_norm": True},
    {"alibi": True},
)
"""Config keys that affect the output of some model family."""


@pytest.mark.full
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: next(iter(setting)))
@pytest.mark.parametrize("family", [*OURS, "gemma2", "phi3", "gpt2", "olmo2"])
def test_every_config_key_is_computed_as_transformers_does_or_refused(
    changed: Callable[..., Path], family: str, setting: dict[str, Any]
) -> None:
    folder = changed(family, **setting)
    try:
        found = logits_of(folder, IDS)
    except SpecbenchError:
        return
    except (RuntimeError, ValueError, TypeError, KeyError):  # what transformers itself refuses
        with pytest.raises((RuntimeError, ValueError, TypeError, KeyError)):
            expected_of(folder, IDS)
        return
    assert (found - expected_of(folder, IDS)).abs().max() < 1e-3


def test_settings_of_other_families_are_not_refused(changed: Callable[..., Path]) -> None:
    folder = changed("llama", logits_scaling=3.0, sliding_window=None, embedding_multiplier=2.0)
    decoder = load_decoder(folder, name="target")
    assert get_module(decoder).config.logits_scaling == 3.0


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Granite", {"logits_scaling": 3.0, "embedding_multiplier": 2.0}),
        ("Cohere", {"logit_scale": 0.5}),
        ("Gemma2", {"final_logit_softcapping": 2.0, "head_dim": 16}),
    ],
)
def test_the_output_matrix_that_heads_speak_through_scales_as_the_model_does(
    tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    config = getattr(transformers, f"{kind}Config")(**sizes, **heads, **settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    decoder = load_decoder(tmp_path, name="target")
    state, ids = decoder.new_state(9), IDS[:, :9] % 97
    out = decoder.forward(Tokens(ids), state, logits_at="all")
    said = decoder.unembed(decoder.norm(out.hidden))
    torch.testing.assert_close(said, out.logits, rtol=0, atol=1e-5)
