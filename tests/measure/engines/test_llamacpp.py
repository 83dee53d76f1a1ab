"""Tests of llama.cpp as an engine: equal ids, counters, its own vanilla, and the GGUF files."""

import gguf
import numpy as np
import pytest
import torch
import transformers

from methods.engine_llamacpp import binding as llamacpp
from specbench_cli.engine.models.load import restrict_output
from specbench_cli.errors import EnvironmentFault, ExitCode, MethodFault
from specbench_cli.store.invariants import validate
from specbench_cli.summary.summary import summarise

ROWS = ("engine:llama.cpp", "engine:llama.cpp-draft", "engine:llama.cpp-lookup")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


@pytest.mark.llamacpp
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("small_pair")
def test_llamacpp_methods_decode_vanillas_tokens_and_have_their_own_vanilla(specbench):
    outcome = specbench(*ROWS, limit=3, max_new_tokens=16)
    assert outcome.exit_code == ExitCode.OK
    for record in outcome.records:
        validate(record)
        kinds = {"reference"} if record.label == "vanilla" else {"identical", "near-tie"}
        assert record.error is None and record.verdict.kind in kinds
        assert record.ns.prefill
    for label in ROWS[1:]:
        for record in outcome.by_label(label):
            counted = record.extra
            assert 0 <= counted["accepted"] <= min(counted["drafted"], record.n_tokens)
    rows = {each.label: each for each in summarise(outcome.records, outcome.manifest).rows}
    assert {rows[label].baseline for label in ROWS} == {"engine:llama.cpp"}
    assert rows["engine:llama.cpp"].speedup == 1
    assert rows["engine:llama.cpp-draft"].mat > 1


@pytest.mark.llamacpp
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Mistral"])
def test_llamacpp_gives_the_logits_of_transformers(kind, tmp_path):
    from llama_cpp import Llama

    model = make_tiny_model(kind)
    ids = torch.arange(3, 23)[None]
    file = str(llamacpp.get_gguf_file(model))
    llama = Llama(file, n_ctx=256, logits_all=True, verbose=False, type_k=0, type_v=0)
    llama.eval(ids[0].tolist())
    with torch.no_grad():
        expected = model(ids).logits[0].numpy()
    assert np.allclose(llama.scores[: ids.shape[1]], expected, atol=1e-3)


def test_missing_llamacpp_is_an_error_with_a_hint(specbench, small_pair, monkeypatch):
    monkeypatch.setattr("methods._engines.find_spec", lambda _: None)
    with pytest.raises(
        EnvironmentFault, match="llama-cpp-python, which is not installed"
    ) as caught:
        specbench("engine:llama.cpp")
    assert caught.value.hint == "pip install 'specbench-cli[llamacpp]'"


def make_tiny_model(kind, **more):
    torch.manual_seed(len(kind))
    config = getattr(transformers, f"{kind}Config")(**SIZES | {"sliding_window": None} | more)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.3)
    return model


def test_gguf_file_has_all_weights_in_rope_order():
    model = make_tiny_model("Llama", tie_word_embeddings=False)
    reader = gguf.GGUFReader(llamacpp.get_gguf_file(model))
    stored = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    own = {name: weight.numpy() for name, weight in model.state_dict().items()}
    assert len(stored) == len(own)
    assert np.array_equal(stored["output.weight"], own["lm_head.weight"])
    for part, name, heads in (("attn_q", "q_proj", 4), ("attn_k", "k_proj", 2)):
        rows = own[f"model.layers.1.self_attn.{name}.weight"].reshape(heads, 8, 32)
        pairs = stored[f"blk.1.{part}.weight"].reshape(heads, 8, 32)
        assert np.array_equal(pairs[:, 0::2], rows[:, :4])
        assert np.array_equal(pairs[:, 1::2], rows[:, 4:])
    assert reader.fields["llama.rope.freq_base"].contents() == 10_000


def test_gguf_file_of_a_restricted_output_never_prefers_a_removed_token():
    kept_ids = torch.tensor([7, 3, 60])
    model = restrict_output(make_tiny_model("Llama"), kept_ids)
    reader = gguf.GGUFReader(llamacpp.get_gguf_file(model))
    output = next(np.array(each.data) for each in reader.tensors if each.name == "output.weight")
    assert np.array_equal(output[kept_ids], model.lm_head.weight.detach().numpy())
    hidden = torch.randn(500, 32, generator=torch.Generator().manual_seed(1))
    likeliest = torch.tensor(hidden.numpy() @ output.T).argmax(-1)
    assert set(likeliest.tolist()) == set(kept_ids.tolist())
    assert torch.equal(likeliest, model.lm_head(hidden).argmax(-1))


def test_gguf_file_is_deleted_with_its_model():
    model = make_tiny_model("Qwen2")
    path = llamacpp.get_gguf_file(model)
    assert path.is_file() and llamacpp.get_gguf_file(model) == path
    del model
    assert not path.exists()


SCALED = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("kind", "more", "kept_ids"),
    [
        ("Gemma2", {}, "model_type gemma2 cannot be written"),
        ("Llama", {"rope_parameters": SCALED}, "rope_type linear cannot"),
        ("Mistral", {"sliding_window": 8}, "sliding_window cannot"),
    ],
)
def test_unsupported_model_is_rejected(kind, more, kept_ids):
    with pytest.raises(MethodFault, match=kept_ids):
        llamacpp.get_gguf_file(make_tiny_model(kind, **more))


def test_drafter_counts_steps_and_tokens():
    drafting = llamacpp.CountingDrafter(lambda ids: ids[-3:])
    assert drafting(np.arange(5, dtype=np.intc)).tolist() == [2, 3, 4]
    drafting(np.arange(2, dtype=np.intc))
    assert (drafting.steps, drafting.drafted) == (2, 5)
