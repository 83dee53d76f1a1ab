"""Loading of checkpoints as decoders, and of decoders as transformers' modules."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from specbench_cli.engine.models.chain_decoders import RecurrentDecoder, Seq2SeqDecoder
from specbench_cli.engine.models.checkpoint import (
    _POSITIVE_INTS,
    PLAIN_TOKENIZERS,
    CompleteConfig,
    read_checkpoint_facts,
    read_config,
    read_decoder_config,
    read_tokenizer,
)
from specbench_cli.engine.models.fused import FusedDecoder, fits
from specbench_cli.engine.models.layers import tensor_shapes
from specbench_cli.engine.models.linear import BACKEND_VARIABLE
from specbench_cli.engine.models.load import (
    FusedCopy,
    get_module,
    load_decoder,
    load_module,
    module_bytes,
    restrict_output,
)
from specbench_cli.engine.models.transformers_decoder import TransformersDecoder
from specbench_cli.engine.types import Tokens
from specbench_cli.errors import EnvironmentFault, UsageError
from specbench_cli.models import resolve
from tests.engine.models.feeding import some_ids

Maker = Callable[..., Path]
LEFT_OUT = object()


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path], Path]:
    """Function that copies a checkpoint, so that a test may change it."""
    return lambda folder: Path(shutil.copytree(folder, tmp_path / "copy"))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_supported_families_run_fused(tiny_checkpoint: Maker, family: str) -> None:
    folder = tiny_checkpoint(family)
    assert isinstance(load_decoder(folder, name="target"), FusedDecoder)
    hosted = load_decoder(folder, name="target", host_module=True)
    assert isinstance(hosted, TransformersDecoder)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_familys_shapes_are_those_of_the_transformers_module(
    tiny_checkpoint: Maker, family: str
) -> None:
    config = read_config(tiny_checkpoint(family))
    config.attention_bias = config.mlp_bias = True  # if the family has them
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    meant = {name: tuple(part.shape) for name, part in module.state_dict().items()}
    assert meant.items() <= tensor_shapes(config).items()


def test_shapes_with_a_reduced_output_are_those_of_the_reduced_module(
    tiny_checkpoint: Maker,
) -> None:
    config = read_config(tiny_checkpoint("llama"))
    module = restrict_output(AutoModelForCausalLM.from_config(config), torch.tensor([3, 7, 5]))
    assert tensor_shapes(config, 3)["lm_head.weight"] == tuple(module.lm_head.weight.shape)


def test_a_complete_config_is_read_as_transformers_reads_it(tiny_checkpoint: Maker) -> None:
    folder = tiny_checkpoint("llama")
    ours, theirs = read_decoder_config(folder), read_config(folder)
    assert isinstance(ours, CompleteConfig)
    assert vars(ours).keys() > {*_POSITIVE_INTS, "rope_parameters", "eos_token_id"}
    no_part = {"architectures", "dtype", "transformers_version"}  # settings of generation
    values = {name: value for name, value in vars(ours).items() if name not in no_part}
    assert {name: getattr(theirs, name) for name in values} == values
    assert tensor_shapes(ours) == tensor_shapes(theirs)
    assert fits(ours)
    assert fits(theirs)


@pytest.mark.parametrize(
    "change",
    [
        *(
            {name: LEFT_OUT}
            for name in (*_POSITIVE_INTS, "eos_token_id", "rms_norm_eps", "hidden_act")
        ),
        *({name: LEFT_OUT} for name in ("rope_parameters", "tie_word_embeddings")),
        {"rope_theta": 5e5},
        {"rope_scaling": None},
        {"partial_rotary_factor": 0.5},
        {"layer_types": ["full_attention"] * 2},
        {"num_attention_heads": True},
        {"hidden_size": 64.0},
        {"head_dim": 0},
        {"head_dim": None},
        {"model_type": "mistral"},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default"}},
    ],
)
def test_an_incomplete_config_is_left_to_transformers(
    tiny_checkpoint: Maker, copy_of: Callable[[Path], Path], change: dict[str, object]
) -> None:
    folder = copy_of(tiny_checkpoint("llama"))
    config_keys = json.loads((folder / "config.json").read_text()) | change
    config_keys = {name: value for name, value in config_keys.items() if value is not LEFT_OUT}
    assert CompleteConfig.from_values(config_keys) is None
    (folder / "config.json").write_text(json.dumps(config_keys))
    with suppress(EnvironmentFault):  # transformers may refuse some of these
        assert isinstance(read_decoder_config(folder), PreTrainedConfig)


@pytest.mark.parametrize("kind", [*PLAIN_TOKENIZERS, "LlamaTokenizerFast", None])
def test_the_tokenizer_is_the_one_that_transformers_chooses(
    copy_of: Callable[[Path], Path], kind: str | None
) -> None:
    folder = copy_of(resolve("embedded-1m").path)
    file = folder / "tokenizer_config.json"
    config_keys = json.loads(file.read_text(encoding="utf-8")) | {"tokenizer_class": kind}
    file.write_text(
        json.dumps(
            {name: config_keys[name] for name in config_keys if config_keys[name] is not None}
        )
    )
    ours, theirs = read_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert type(ours) is type(theirs)
    text = "Add 17 and 25.<|user|>  def f(x):\n\treturn x<|end|>"
    assert ours(text).input_ids == theirs(text).input_ids
    assert ours.chat_template == theirs.chat_template
    assert ours.special_tokens_map == theirs.special_tokens_map


DTYPES = {
    **dict.fromkeys(("gemma2", "gemma3", "phi3", "olmo2", "gpt2", "mixtral"), TransformersDecoder),
    "llava": TransformersDecoder,
    "mamba2": RecurrentDecoder,
    "t5": Seq2SeqDecoder,
}


@pytest.mark.parametrize("family", DTYPES)
def test_other_families_run_hosted(tiny_checkpoint: Maker, family: str) -> None:
    decoder = load_decoder(tiny_checkpoint(family), name="target")
    assert type(decoder) is DTYPES[family]
    assert get_module(decoder) is decoder.module
    assert module_bytes(decoder) == 0


def test_growing_rope_runs_hosted(tiny_checkpoint: Maker) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    decoder = load_decoder(tiny_checkpoint("llama", rope_parameters=rope), name="target")
    assert isinstance(decoder, TransformersDecoder)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_half_precision_weights_widened_to_float32_are_the_model(
    tiny_checkpoint: Maker, family: str
) -> None:
    folder, ids = tiny_checkpoint(family, dtype=torch.float16), some_ids(20)
    from transformers import AutoModelForCausalLM

    upcast = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    decoder = load_decoder(folder, name="target")
    with torch.no_grad():
        expected = upcast(input_ids=ids).logits
        assert torch.equal(get_module(decoder)(input_ids=ids).logits, expected)
    out = decoder.forward(Tokens(ids), decoder.new_state(20), logits_at="all")
    assert out.logits is not None
    assert (out.logits - expected).abs().max() <= 1e-5


def test_shards_are_read_like_one_file(tiny_checkpoint: Maker) -> None:
    whole, sharded = tiny_checkpoint("llama"), tiny_checkpoint("llama", shard="100KB")
    assert (sharded / "model.safetensors.index.json").is_file()
    found = []
    for folder in (whole, sharded):
        decoder = load_decoder(folder, name="target")
        found.append(decoder.forward(Tokens(some_ids(9)), decoder.new_state(9)).logits)
    assert torch.equal(*found)
    assert read_checkpoint_facts(whole).parameters == read_checkpoint_facts(sharded).parameters


@pytest.mark.parametrize("backend", ["plain", "tiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_a_module_shares_its_weights_in_the_checkpoints_order(
    tiny_checkpoint: Maker,
    dtype: torch.dtype,
    tied: bool,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, backend)
    folder = tiny_checkpoint("llama", tie_word_embeddings=tied)
    decoder = load_decoder(folder, name="target", dtype=dtype)
    assert isinstance(decoder, FusedDecoder)
    module = get_module(decoder)
    assert module is get_module(decoder)
    assert not module.training

    def place(tensor: Tensor) -> int:
        return tensor.untyped_storage().data_ptr()

    layer, ours = module.model.layers[0], decoder.weights.layers[0]
    assert place(module.model.embed_tokens.weight) == place(decoder.weights.embedding)
    assert place(layer.mlp.up_proj.weight) == place(ours.gate_up.weight)
    assert place(layer.self_attn.v_proj.weight) == place(ours.qkv.weight)
    # float32 queries and keys are stored in an order of their own, because torch rotates adjacent
    # pairs there
    shared = place(layer.self_attn.q_proj.weight) == place(ours.qkv.weight)
    assert shared == (dtype == torch.bfloat16 or backend == "tiled")
    storages = {place(w): w.untyped_storage().nbytes() for w in module.parameters()}
    own = {place(w): w for w in decoder.weights.shared_tensors().values()}
    extra = sum(size for at, size in storages.items() if at not in own)
    assert module_bytes(decoder) == extra


def test_a_packed_decoder_reports_that_its_module_holds_all_weights_twice(
    tiny_checkpoint: Maker,
) -> None:
    folder = tiny_checkpoint("llama")
    packed = load_decoder(folder, name="target", backend="packed")
    plain = load_decoder(folder, name="target", backend="plain")
    assert packed.weight_bytes == plain.weight_bytes
    assert module_bytes(packed) > 2 * module_bytes(plain)
    with torch.no_grad():
        ids = some_ids(9)
        assert torch.equal(get_module(packed)(ids).logits, get_module(plain)(ids).logits)


def test_weight_bytes_counts_the_stored_weights(tiny_checkpoint: Maker) -> None:
    folder = tiny_checkpoint("llama")
    facts = read_checkpoint_facts(folder)
    assert load_decoder(folder, name="t").weight_bytes == 4 * facts.parameters
    half = load_decoder(folder, name="t", dtype=torch.bfloat16)
    norms = (2 * facts.n_layers + 1) * facts.hidden_size  # which a CPU multiplies in float32
    assert half.weight_bytes == 2 * (facts.parameters + norms)


def test_generation_config_is_the_one_on_disk(
    tiny_checkpoint: Maker, copy_of: Callable[[Path], Path]
) -> None:
    folder = copy_of(tiny_checkpoint("llama"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5]}))
    assert get_module(load_decoder(folder, name="t")).generation_config.eos_token_id == [1, 5]
    assert read_checkpoint_facts(folder).eos == {1, 5}


def test_eos_falls_back_to_the_config(
    tiny_checkpoint: Maker, copy_of: Callable[[Path], Path]
) -> None:
    folder = copy_of(tiny_checkpoint("llama"))
    (folder / "generation_config.json").unlink()
    assert read_checkpoint_facts(folder).eos == {1}


def test_facts_describe_the_files(tiny_checkpoint: Maker) -> None:
    folder = tiny_checkpoint("gpt2", dtype=torch.float16)
    facts = read_checkpoint_facts(folder)
    weights = load_file(folder / "model.safetensors")
    assert (facts.family, facts.vocab_size, facts.n_layers) == ("gpt2", 197, 3)
    assert (facts.hidden_size, facts.max_positions, facts.dtype) == (64, 256, "F16")
    assert facts.parameters == sum(tensor.numel() for tensor in weights.values())
    content = (folder / "model.safetensors").read_bytes()
    assert facts.sha256 == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("family", ["t5", "bart", "llava", "mamba2", "jamba"])
def test_facts_describe_the_text_model(tiny_checkpoint: Maker, family: str) -> None:
    folder = tiny_checkpoint(family)
    facts, decoder = read_checkpoint_facts(folder), load_decoder(folder, name="target")
    assert (facts.family, facts.vocab_size, facts.eos) == (family, 197, {1})
    assert facts.n_layers == decoder.n_layers
    assert facts.hidden_size == decoder.hidden_size


def test_a_family_without_text_output_is_refused(tmp_path: Path) -> None:
    from transformers import CLIPConfig

    CLIPConfig().save_pretrained(tmp_path)
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(
        UsageError, match="clip checkpoints cannot be decoded here: transformers has"
    ):
        load_decoder(tmp_path, name="target")


def test_pickled_weights_are_refused(
    tiny_checkpoint: Maker, copy_of: Callable[[Path], Path]
) -> None:
    folder = copy_of(tiny_checkpoint("llama"))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(EnvironmentFault, match="only safetensors are read"):
        load_decoder(folder, name="target")


def test_missing_shard_is_named(tiny_checkpoint: Maker, copy_of: Callable[[Path], Path]) -> None:
    folder = copy_of(tiny_checkpoint("llama", shard="100KB"))
    victim = sorted(folder.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(EnvironmentFault, match=victim.name):
        load_decoder(folder, name="target")


def test_missing_tensor_is_named(tiny_checkpoint: Maker, copy_of: Callable[[Path], Path]) -> None:
    folder = copy_of(tiny_checkpoint("llama"))
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(EnvironmentFault, match=r"model\.norm\.weight"):
        load_decoder(folder, name="target")


def test_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"no config\.json"):
        load_decoder(tmp_path, name="target")


def test_unknown_family_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nothing-like-it"}')
    with pytest.raises(EnvironmentFault, match="transformers cannot read"):
        load_decoder(tmp_path, name="target")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model.safetensors.index.json", {"weight_map": {"a": "../other.safetensors"}}, "no file"),
        ("model.safetensors.index.json", {"weight_map": {"a": "/etc/passwd"}}, "no file of this"),
        ("model.safetensors.index.json", {}, "no weight_map"),
        ("model.safetensors.index.json", [], "no weight_map"),
        ("model.safetensors", b"\0\0\0\0\0\0\0\x40{}", "no header of safetensors"),
        ("model.safetensors", b"\x02\0\0\0\0\0\0\0[]", "no header of safetensors"),
        ("model.safetensors", b"", "no header of safetensors"),
        (  # UTF-16, of which json would read half a character
            "model.safetensors",
            b"\x0e\0\0\0\0\0\0\0" + '{"\ud800":0}'.encode("utf-16-be", "surrogatepass"),
            "no header of safetensors",
        ),
        (
            "model.safetensors",
            b'\x38\0\0\0\0\0\0\0{"a":{"dtype":"F32","shape":[9,9],"data_offsets":[0,4]}}1234',
            "no header of safetensors",
        ),
        ("generation_config.json", {"eos_token_id": "x"}, "eos_token_id 'x' is no token of 197"),
        ("generation_config.json", {"eos_token_id": [1, 197]}, "eos_token_id 197 is no token"),
        ("generation_config.json", [], "it is no JSON object"),
        ("config.json", {}, "cannot read"),
        ("config.json", [], "cannot read"),
    ],
)
def test_a_damaged_checkpoint_is_one_clear_error(
    tiny_checkpoint: Maker,
    copy_of: Callable[[Path], Path],
    file: str,
    content: object,
    message: str,
) -> None:
    folder = copy_of(tiny_checkpoint("llama"))
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / file).write_bytes(data)
    with pytest.raises(EnvironmentFault, match=message):
        read_checkpoint_facts(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"vocab_size": 198},
            r"embed_tokens.weight has the shape \[197, 64\], but config.json requires",
        ),
        ({"num_attention_heads": 8, "head_dim": 8, "num_key_value_heads": 3}, "has the shape"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps -1.0 are no model"),
        ({"num_hidden_layers": 9999}, "9999 layers cannot be"),
        ({"num_hidden_layers": 10**400}, "num_hidden_layers is above 10000"),
        ({"vision_config": {"n_layer": 2**31}}, "n_layer is above 10000"),
        ({"num_hidden_layers": 0}, "0 layers cannot be"),
    ],
)
def test_config_that_describes_other_weights_is_refused(
    tiny_checkpoint: Maker,
    copy_of: Callable[[Path], Path],
    changes: dict[str, object],
    message: str,
) -> None:
    folder = copy_of(tiny_checkpoint("llama"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(EnvironmentFault, match=message):
        assert read_checkpoint_facts(folder) and load_decoder(folder, name="target")


@pytest.mark.parametrize("model_type", ["llama", "theirs"])
def test_code_in_a_checkpoint_folder_never_runs(
    tiny_checkpoint: Maker,
    copy_of: Callable[[Path], Path],
    monkeypatch: pytest.MonkeyPatch,
    model_type: str,
) -> None:
    """It does not run even if standard input would confirm it."""
    folder = copy_of(tiny_checkpoint("llama"))
    ran = folder / "ran"
    (folder / "theirs.py").write_text(f"open({str(ran)!r}, 'w').close()\nConfig = Model = object\n")
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = model_type
    config["auto_map"] = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    if model_type == "theirs":
        with pytest.raises(EnvironmentFault, match="cannot read"):
            read_checkpoint_facts(folder)
    else:
        assert load_decoder(folder, name="target")
    assert not ran.exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"attn_implementation": "some/kernel"},
        {"_attn_implementation": "paged|some/kernel@main"},
        {"attn_implementation": {"": "some/kernel"}},
        {"experts_implementation": "some/kernel"},
        {"text_config": {"attn_implementation": "some/kernel"}},
    ],
)
def test_a_repository_of_kernels_that_a_config_names_is_refused(
    tiny_checkpoint: Maker, copy_of: Callable[[Path], Path], changes: dict[str, object]
) -> None:
    folder = copy_of(tiny_checkpoint("llama"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UsageError, match=r"some/kernel.*, a repository whose code"):
        load_decoder(folder, name="target")


def test_missing_weights_of_a_hosted_model_are_not_filled_at_random(
    tiny_checkpoint: Maker, copy_of: Callable[[Path], Path]
) -> None:
    folder = copy_of(tiny_checkpoint("gemma2"))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(EnvironmentFault, match=r"lacks the tensor model\.norm\.weight"):
        load_decoder(folder, name="target")


# ---- reduced outputs -----------------------------------------------------------------------------

SAYS = torch.tensor([5, 3, 196, *range(40, 90)])
CPU = torch.device("cpu")


@pytest.fixture
def cut_copy(tmp_path: Path) -> Callable[[Path], Path]:
    """Function that copies a checkpoint with an output reduced to the ids `SAYS`."""

    def make(folder: Path) -> Path:
        restrict_output(load_module(folder, CPU, torch.float32), SAYS).save_pretrained(
            tmp_path / "cut"
        )
        return tmp_path / "cut"

    return make


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_reduced_output_has_the_whole_outputs_logits(
    tiny_checkpoint: Maker, cut_copy: Callable[[Path], Path], family: str, tied: bool
) -> None:
    whole, ids = tiny_checkpoint(family, tie_word_embeddings=tied), some_ids(9)
    folder = cut_copy(whole)
    with torch.no_grad():
        expected = load_module(whole, CPU, torch.float32)(ids).logits
    fused, hosted = (load_decoder(folder, name="d", host_module=host) for host in (False, True))
    assert isinstance(fused, FusedDecoder)
    published = FusedCopy(fused)
    published.publish()
    for decoder in (fused, hosted, published):
        out = decoder.forward(Tokens(ids), decoder.new_state(9), logits_at="all")
        assert out.logits is not None and out.logits.shape == expected.shape
        assert (out.logits - expected)[..., SAYS].abs().max() <= 1e-5
        assert (out.logits.isfinite().sum(-1) == len(SAYS)).all()
        again = decoder.unembed(decoder.norm(out.hidden))
        assert torch.equal(again.isfinite(), out.logits.isfinite())
    with torch.no_grad():
        assert torch.equal(get_module(fused)(ids).logits, get_module(hosted)(ids).logits)


def test_a_reduced_output_costs_only_its_rows(
    tiny_checkpoint: Maker, cut_copy: Callable[[Path], Path]
) -> None:
    folder = tiny_checkpoint("llama", tie_word_embeddings=False)
    whole, part = load_decoder(folder, name="d"), load_decoder(cut_copy(folder), name="d")
    assert isinstance(part, FusedDecoder)
    rows = part.weights.head.columns(0, len(SAYS))
    assert rows is not None and rows.shape == (len(SAYS), part.hidden_size)
    assert whole.weight_bytes - part.weight_bytes == 4 * part.hidden_size * (197 - len(SAYS))
    assert part.share(logits=False) > whole.share(logits=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d2t": torch.arange(1, 54)}, "d2t and t2d name different ids"),
        ({"d2t": torch.arange(54)}, "d2t names 54 ids up to 106, the output matrix has 53 rows"),
        ({"d2t": torch.full((53,), 190)}, "d2t names 53 ids up to 242"),
        ({"d2t": -torch.arange(53)}, "d2t names 53 ids up to 0"),
        ({"d2t": torch.tensor([]), "t2d": torch.zeros(197).bool()}, "d2t names 0 ids"),
        ({"lm_head.weight": None}, "lacks the tensor lm_head.weight"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_an_invalid_reduction_is_one_clear_error(
    tiny_checkpoint: Maker,
    cut_copy: Callable[[Path], Path],
    changes: dict[str, Tensor | None],
    message: str,
) -> None:
    file = cut_copy(tiny_checkpoint("llama")) / "model.safetensors"
    tensors = {name: part for name, part in (load_file(file) | changes).items() if part is not None}
    save_file(tensors, file)
    with pytest.raises(EnvironmentFault, match=message):
        load_decoder(file.parent, name="d")


def test_a_reduced_output_of_a_hosted_family_is_refused(
    tiny_checkpoint: Maker, copy_of: Callable[[Path], Path]
) -> None:
    file = copy_of(tiny_checkpoint("gpt2")) / "model.safetensors"
    mask = torch.zeros(197, dtype=torch.bool)
    mask[SAYS] = True
    save_file(load_file(file) | {"t2d": mask}, file, {"format": "pt"})
    with pytest.raises(UsageError, match="llama, mistral, qwen2, qwen3; this is a gpt2"):
        load_decoder(file.parent, name="d")
