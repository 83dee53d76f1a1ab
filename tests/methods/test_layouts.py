"""Checkpoints of draft heads in each published layout: the same weights give the same head."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from safetensors.torch import save_file

from methods._heads.files import read_head
from methods.eagle.head import EagleHead
from methods.eagle3.head import Eagle3Head
from methods.mtp.head import MtpHead
from specbench_cli import app
from specbench_cli.engine.models.checkpoint import Weights
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.engine.types import Features
from specbench_cli.errors import EnvironmentFault, ExitCode, UsageError
from specbench_cli.training.convert import convert

ID = torch.tensor([[5, 17, 80, 3, 41]])


@pytest.fixture(scope="module")
def made(target):
    """Return a function that creates a random head, with norms that are not all ones."""

    def make(kind):
        files = kind.module.random(target, 11).as_loaded()
        drawn = torch.Generator().manual_seed(12)
        norms = {
            name: 0.5 + torch.rand(tensor.shape, generator=drawn)
            for name, tensor in files.tensors.items()
            if tensor.dim() == 1 and tensor.is_floating_point()
        }
        return replace(files, tensors={**files.tensors, **norms})

    return {kind: make(kind) for kind in (EagleHead, Eagle3Head, MtpHead)}


def llama(files, **more):
    """config.json of a head, as transformers writes a Llama's."""
    config = asdict(files.shape) | {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "vocab_size": 96,
    }
    return config | more


def renamed(files, names):
    """The head's tensors with the beginnings of their names changed; the longest counts."""
    out = {}
    for name, tensor in files.tensors.items():
        fits = [ours for ours in names if name.startswith(ours)]
        ours = max(fits, key=len) if fits else ""
        out[names.get(ours, "") + name[len(ours) :]] = tensor
    return out


def eagle_official(files, target):
    copies = {"embed_tokens.weight": target.weights.embedding}
    return renamed(files, {"layer.": "layers.0."}) | copies, llama(files, bias=False)


def eagle_speculators(files, target):
    inner = llama(files)
    config = {
        "speculators_model_type": "eagle",
        "speculators_config": {"algorithm": "eagle", "verifier": {"name_or_path": "org/target"}},
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "transformer_layer_config": inner,
        "layernorms": False,
        "fusion_bias": False,
    }
    return renamed(files, {"layer.": "transformer.", "fc.": "fusion_fc."}), config


EAGLE3_OFFICIAL = {
    "layer.": "midlayer.",
    "enorm.": "midlayer.input_layernorm.",
    "hnorm.": "midlayer.hidden_norm.",
}


def eagle3_official(files, target):
    config = llama(files, architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=49)
    return renamed(files, EAGLE3_OFFICIAL), config


def eagle3_specforge(files, target):
    tensors, config = eagle3_official(files, target)
    tensors["embed_tokens.weight"] = target.weights.embedding
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 0, 0], "use_aux_hidden_state": True}
    return tensors, config | {"eagle_config": ids}


def eagle3_speculators(files, target):
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3"},
        "transformer_layer_config": llama(files),
        "draft_vocab_size": 49,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [2, 1, 1],
    }
    names = {"layer.": "layers.0.", "enorm.": "layers.0.input_layernorm."}
    names["hnorm."] = "layers.0.hidden_norm."
    return renamed(files, names) | {"verifier_norm.weight": torch.ones(32)}, config


def among_the_targets(tensors):
    """With tensors beside it as a target's checkpoint has them."""
    return tensors | {
        "model.embed_tokens.weight": torch.zeros(4, 4),
        "model.layers.0.mlp.experts.3.up_proj.weight": torch.zeros(4, 4),
        "lm_head.weight": torch.zeros(4, 4),
    }


def mtp_mimo(files, target):
    names = {"layer.": "", "enorm.": "token_layernorm.", "hnorm.": "hidden_layernorm."}
    names |= {"fc.": "input_proj.", "norm.": "final_layernorm."}
    tensors = renamed(files, {ours: f"model.mtp_layers.0.{own}" for ours, own in names.items()})
    embedding, hidden = files.tensors["fc.weight"].chunk(2, 1)
    tensors["model.mtp_layers.0.input_proj.weight"] = torch.cat((hidden, embedding), 1)
    config = llama(files, model_type="mimo", num_nextn_predict_layers=1, sliding_window=32768)
    return among_the_targets(tensors), config


def mtp_speculators(files, target):
    names = {"layer.": "", "enorm.": "token_layernorm.", "hnorm.": "hidden_layernorm."}
    names |= {"fc.": "input_proj.", "norm.": "final_layernorm."}
    tensors = renamed(files, {ours: f"mtp_layers.0.{own}" for ours, own in names.items()})
    return tensors, {"speculators_model_type": "mtp", "transformer_layer_config": llama(files)}


def mtp_qwen(files, target):
    names = {"layer.": "layers.0.", "fc.": "fc.", "norm.": "norm."}
    names |= {"enorm.": "pre_fc_norm_embedding.", "hnorm.": "pre_fc_norm_hidden."}
    tensors = renamed(files, {ours: f"mtp.{own}" for ours, own in names.items()})
    tensors = {name: t - 1 if t.dim() == 1 else t for name, t in tensors.items()}
    return among_the_targets(tensors), {"text_config": llama(files, model_type="qwen3_next")}


def mtp_deepseek(files, target):
    names = {"layer.": "", "enorm.": "enorm.", "hnorm.": "hnorm.", "fc.": "eh_proj."}
    names["norm."] = "shared_head.norm."
    tensors = renamed(files, {ours: f"model.layers.46.{own}" for ours, own in names.items()})
    tensors["model.layers.46.shared_head.head.weight"] = torch.zeros(4, 4)
    tensors["model.layers.46.embed_tokens.weight"] = torch.zeros(4, 4)
    return among_the_targets(tensors), llama(files, model_type="glm4", num_hidden_layers=46)


WRITERS = {
    eagle_official: EagleHead,
    eagle_speculators: EagleHead,
    eagle3_official: Eagle3Head,
    eagle3_specforge: Eagle3Head,
    eagle3_speculators: Eagle3Head,
    mtp_mimo: MtpHead,
    mtp_speculators: MtpHead,
    mtp_qwen: MtpHead,
    mtp_deepseek: MtpHead,
}
LAYOUTS = pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.__name__)


def written(folder, tensors, config):
    folder.mkdir(exist_ok=True)
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def logits(head):
    width = sum(head.target.hidden_size for _ in head.captured_layers)
    rows = torch.randn(1, 5, width, generator=torch.Generator().manual_seed(3))
    return head.forward(Features(ID, rows), head.new_state(8), logits_at="all").logits


@LAYOUTS
def test_equal_weights_in_every_layout_make_the_same_head(tmp_path, target, made, writer):
    kind = WRITERS[writer]
    folder = written(tmp_path / "head", *writer(made[kind], target))
    loaded = kind.load(folder, {"target": target})
    plain = kind.from_files(made[kind], target)
    torch.testing.assert_close(logits(loaded), logits(plain), rtol=1e-5, atol=1e-5)
    assert (loaded.captured_layers, loaded.weight_bytes) == (
        plain.captured_layers,
        plain.weight_bytes,
    )


@LAYOUTS
def test_shards_are_read_like_one_file(tmp_path, target, made, writer):
    kind = WRITERS[writer]
    tensors, config = writer(made[kind], target)
    folder = tmp_path / "head"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    where = {}
    for part, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2]), start=1):
        shard = f"model-{part:05}-of-00002.safetensors"
        save_file({name: tensors[name].clone() for name in names}, folder / shard)
        where |= dict.fromkeys(names, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    loaded = kind.load(folder, {"target": target})
    torch.testing.assert_close(logits(loaded), logits(kind.from_files(made[kind], target)))


SERVED = pytest.mark.parametrize("writer", [eagle3_specforge, eagle3_speculators])


@SERVED
def test_heads_in_the_dtype_that_they_are_published_in_are_read(tmp_path, target, made, writer):
    tensors, config = writer(made[Eagle3Head], target)
    halves = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    loaded = Eagle3Head.load(
        written(tmp_path / "halves", halves, config | {"torch_dtype": "bfloat16"}),
        {"target": target},
    )
    wide = {name: tensor.float() if tensor.is_floating_point() else tensor
            for name, tensor in halves.items()}  # fmt: skip
    whole = Eagle3Head.load(written(tmp_path / "wide", wide, config), {"target": target})
    assert halves["d2t"].dtype == torch.int64 and halves["t2d"].dtype == torch.bool
    torch.testing.assert_close(logits(loaded), logits(whole), rtol=0, atol=0)


def test_a_bias_of_fc_is_added(tmp_path, target, made):
    files = made[EagleHead]
    bias = torch.linspace(-1, 1, 32)
    tensors, config = eagle_official(files, target)
    folder = written(tmp_path / "head", tensors | {"fc.bias": bias}, config)
    loaded = EagleHead.load(folder, {"target": target})
    tokens, rows = target.embed(ID[0]), torch.ones(5, 32)
    expected = torch.cat((tokens, rows), -1) @ files.tensors["fc.weight"].T + bias
    torch.testing.assert_close(loaded._join(tokens, rows), expected)


def test_an_embedding_of_its_own_is_kept_and_a_copy_of_the_targets_is_not(tmp_path, target, made):
    tensors, config = eagle3_specforge(made[Eagle3Head], target)
    folder = written(tmp_path / "copy", tensors, config)
    copy = Eagle3Head.load(folder, {"target": target})
    tensors["embed_tokens.weight"] = target.weights.embedding + 1
    own = Eagle3Head.load(written(tmp_path / "own", tensors, config), {"target": target})
    assert torch.equal(copy.embed(ID), target.embed(ID))
    assert torch.equal(own.embed(ID), target.embed(ID) + 1)
    assert own.weight_bytes - copy.weight_bytes == 96 * 32 * 4


# ---- what is refused ----------------------------------------------------------------------------


def refused(kind, folder, target, what):
    with pytest.raises(EnvironmentFault, match=what) as fault:
        kind.load(folder, {"target": target})
    assert fault.value.exit_code == 3 and fault.value.hint
    return fault.value


def test_an_unknown_layout_is_reported_with_the_names_found_and_those_known(tmp_path, target):
    names = [f"medusa_head.{at}.0.linear.weight" for at in range(9)]
    folder = written(tmp_path / "head", {name: torch.zeros(2, 2) for name in names}, {})
    fault = refused(EagleHead, folder, target, r"9 tensors such as medusa_head\.0\.0\.linear")
    assert "EAGLE-3 (SafeAILab, SpecForge)" in fault.message


def test_a_head_of_another_kind_is_reported_with_the_command_to_run_it(tmp_path, target, made):
    folder = written(tmp_path / "head", *eagle3_official(made[Eagle3Head], target))
    fault = refused(EagleHead, folder, target, "a head of kind eagle3")
    assert fault.hint == f"specbench run -m eagle3 --set eagle3.head={folder}"


@pytest.mark.parametrize(
    ("extra", "what"),
    [
        ("mlp.experts.0.up_proj.weight", "a mixture of experts"),
        ("mlp.gate.weight", "a mixture of experts"),
        ("self_attn.kv_a_proj_with_mqa.weight", "latent cache"),
        ("post_self_attn_layernorm.weight", "one dense Llama layer"),
    ],
)
def test_layers_other_than_llamas_are_refused(tmp_path, target, made, extra, what):
    tensors, config = mtp_deepseek(made[MtpHead], target)
    tensors[f"model.layers.46.{extra}"] = torch.zeros(4, 4)
    refused(MtpHead, written(tmp_path / "head", tensors, config), target, what)


def test_gated_attention_is_refused(tmp_path, target, made):
    tensors, config = mtp_qwen(made[MtpHead], target)
    name = "mtp.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].repeat(2, 1)
    refused(MtpHead, written(tmp_path / "head", tensors, config), target, "not a Llama layer")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"layernorms": True}, "layernorms"),
        ({"num_attention_heads": 3}, "3 attention heads"),
    ],
)
def test_unsupported_settings_are_refused(tmp_path, target, made, change, what):
    tensors, config = eagle_official(made[EagleHead], target)
    refused(EagleHead, written(tmp_path / "head", tensors, config | change), target, what)


@pytest.mark.parametrize("missing", ["fc.weight", "layers.0.mlp.up_proj.weight"])
def test_a_missing_tensor_is_named(tmp_path, target, made, missing):
    tensors, config = eagle_official(made[EagleHead], target)
    del tensors[missing]
    name = missing.replace("layers.0.", "layer.")
    refused(EagleHead, written(tmp_path / "head", tensors, config), target, name)


def test_a_missing_norm_is_named(tmp_path, target, made):
    tensors, config = eagle3_official(made[Eagle3Head], target)
    del tensors["norm.weight"]
    folder = written(tmp_path / "head", tensors, config)
    refused(Eagle3Head, folder, target, "missing tensor norm.weight")


@SERVED
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda tensor: None, "mlp.down_proj"),
        (lambda tensor: tensor[:, :-1], "down_proj|mlp"),
        (lambda tensor: torch.full_like(tensor, torch.nan), "not finite"),
    ],
    ids=["missing", "size", "nan"],
)
def test_a_served_head_that_is_not_whole_is_one_clear_error(
    tmp_path, target, made, writer, change, what
):
    tensors, config = writer(made[Eagle3Head], target)
    name = next(name for name in tensors if name.endswith("mlp.down_proj.weight"))
    changed = change(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed
    refused(Eagle3Head, written(tmp_path / "head", tensors, config), target, what)


@SERVED
def test_a_served_head_whose_file_is_cut_off_is_one_clear_error(tmp_path, target, made, writer):
    folder = written(tmp_path / "head", *writer(made[Eagle3Head], target))
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(EnvironmentFault, match="is damaged: it has"):
        Eagle3Head.load(folder, {"target": target})


def test_a_second_layer_is_refused(tmp_path, target, made):
    tensors, config = eagle_official(made[EagleHead], target)
    tensors["layers.1.mlp.up_proj.weight"] = torch.zeros(4, 4)
    refused(EagleHead, written(tmp_path / "head", tensors, config), target, r"layers\.1\.mlp")


def test_a_folder_without_a_config_is_refused(tmp_path, target):
    refused(EagleHead, tmp_path, target, "contains no draft head: config.json is missing")


def test_a_head_for_another_target_is_refused(tmp_path, family, made):
    family.modules["target"].save_pretrained(tmp_path / "target")
    target = load_decoder(tmp_path / "target", name="target")
    own = Weights(tmp_path / "target").sha256()
    tensors, config = eagle_official(made[EagleHead], family.decoders["target"])
    for trained_for, fits in ((own, True), ("0" * 64, False)):
        config["specbench"] = {"target_sha256": trained_for}
        folder = written(tmp_path / "head", tensors, config)
        if fits:
            EagleHead.load(folder, {"target": target})
        else:
            refused(EagleHead, folder, target, f"0000.*this run has {own[:12]}")


# ---- pickles ------------------------------------------------------------------------------------


@pytest.fixture
def pickled(tmp_path, target, made):
    tensors, config = eagle_official(made[EagleHead], target)
    folder = tmp_path / "pickled"
    folder.mkdir()
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_pickle_is_refused_with_the_command_that_converts_it(pickled, target):
    fault = refused(EagleHead, pickled, target, "pytorch_model.bin, a pickle")
    assert fault.hint == f"specbench train convert {pickled} --out DIR --unpickle"


def test_that_command_converts_it(pickled, tmp_path, target, made):
    out = tmp_path / "converted"
    arguments = ["train", "convert", str(pickled), "--out", str(out)]
    assert app._run(arguments) == ExitCode.USAGE and not out.exists()
    assert app._run([*arguments, "--unpickle"]) == ExitCode.OK
    loaded = EagleHead.load(out, {"target": target})
    torch.testing.assert_close(
        logits(loaded), logits(EagleHead.from_files(made[EagleHead], target))
    )
    assert read_head(out, "eagle", EagleHead.module.layouts).config["bias"] is False


class Harm:
    """An object whose unpickling runs a function."""

    def __reduce__(self):
        return print, ("harm was done",)


@pytest.mark.parametrize("content", [{"fc.weight": Harm()}, [1, 2]])
def test_a_pickle_with_anything_but_tensors_is_not_read(tmp_path, capsys, content):
    torch.save(content, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EnvironmentFault, match=r"pytorch_model\.bin"):
        convert(tmp_path, tmp_path / "out")
    assert "harm" not in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_without_a_pickle_there_is_nothing_to_convert(tmp_path):
    with pytest.raises(UsageError, match=r"has no pytorch_model\*\.bin or \*_lm_head\.pt"):
        convert(tmp_path, tmp_path / "out")


@pytest.mark.parametrize("name", ["norm.weight", "fc_norm.weight"])
def test_a_tensor_that_a_kind_of_head_does_not_compute_is_refused(target, made, name):
    files = made[EagleHead]
    tensors = {**files.tensors, name: torch.ones(32)}
    with pytest.raises(EnvironmentFault, match=f"unexpected tensor {name}"):
        EagleHead.from_files(replace(files, tensors=tensors), target)
