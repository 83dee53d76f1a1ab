"""Shapes: models without files, whose weights are drawn at random."""

import json

import pytest
import torch

from specbench_cli.engine.models.checkpoint import (
    RandomWeights,
    open_weights,
    read_checkpoint_facts,
)
from specbench_cli.engine.models.fused import FusedDecoder
from specbench_cli.engine.models.load import get_module, load_decoder, sha256_of
from specbench_cli.engine.models.transformers_decoder import TransformersDecoder
from specbench_cli.engine.types import Tokens
from specbench_cli.errors import EnvironmentFault, UsageError
from specbench_cli.models.resolve import resolve
from specbench_cli.models.shapes import ModelShape, create_shape_folder, get_shape, load_shapes


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", ["tiny-1m", "tiny-4m", "tiny-moe"])
def test_a_shape_has_the_computed_parameter_count(name):
    facts = read_checkpoint_facts(create_shape_folder(name))
    assert facts.parameters == get_shape(name).parameters
    assert (facts.vocab_size, facts.eos, facts.dtype) == (8192, frozenset(), "drawn")


def test_transformers_loads_the_config_of_every_shape():
    from transformers import AutoConfig

    for name in load_shapes():
        config = AutoConfig.from_pretrained(create_shape_folder(name))
        assert config.num_hidden_layers == get_shape(name).layers
        assert config.eos_token_id is None


@pytest.mark.parametrize(
    ("name", "kind"), [("tiny-1m", FusedDecoder), ("tiny-moe", TransformersDecoder)]
)
def test_random_weights_are_reproducible_and_have_the_logits_of_transformers(name, kind):
    folder = create_shape_folder(name)
    ids = torch.arange(7)[None] + 100
    decoders = [load_decoder(folder, name="target") for _ in range(2)]
    assert type(decoders[0]) is kind
    logits = [
        each.forward(Tokens(ids), each.new_state(16), logits_at="all").logits for each in decoders
    ]
    assert torch.equal(*logits)
    own = get_module(decoders[0])(ids).logits
    torch.testing.assert_close(logits[0], own, atol=1e-4, rtol=1e-3)
    assert sha256_of(decoders[0]) == read_checkpoint_facts(folder).sha256


def test_random_weights_can_have_half_precision():
    decoder = load_decoder(create_shape_folder("tiny-4m"), name="target", dtype=torch.bfloat16)
    out = decoder.forward(Tokens(torch.tensor([[1, 2, 3]])), decoder.new_state(8))
    assert out.logits.dtype == torch.bfloat16
    assert out.logits.isfinite().all()
    tiny = get_shape("tiny-4m")
    norms = (2 * tiny.layers + 1) * tiny.hidden  # a CPU computes norms in float32
    assert decoder.weight_bytes == 2 * (tiny.parameters + norms)


def test_a_checkpoint_without_weights_is_not_a_shape(tmp_path):
    folder = create_shape_folder("tiny-1m")
    assert isinstance(open_weights(folder), RandomWeights)
    config = json.loads((folder / "config.json").read_text())
    del config["specbench"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EnvironmentFault, match=r"lacks model\.safetensors"):
        open_weights(tmp_path)


def test_a_shape_is_resolved_by_its_name_and_others_are_named():
    found = resolve("shape:llama-2-7b")
    assert (found.label, found.shape, found.draft) == ("shape:llama-2-7b", True, None)
    assert (found.path / "tokenizer.json").is_file()
    assert resolve("shape:llama-2-7b").path == found.path
    with pytest.raises(UsageError) as fault:
        resolve("shape:llama-3")
    assert fault.value.message == "unknown shape 'llama-3'; did you mean 'llama-3-8b'?"
    assert "llama-3-8b" in fault.value.hint


def test_an_impossible_shape_is_refused():
    sizes = {"layers": 1, "hidden": 8, "mlp": 8, "vocab": 9, "positions": 8, "source": "made"}
    with pytest.raises(ValueError, match="heads must be a multiple"):
        ModelShape(heads=3, kv_heads=2, **sizes)
    with pytest.raises(ValueError, match="llama with 4 experts"):
        ModelShape(heads=2, kv_heads=2, experts=4, **sizes)
