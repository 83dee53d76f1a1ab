"""llama.cpp beside our own decoding: the very ids, counters that add up, its own vanilla; and the
files that it is given, which any reader of GGUF understands."""

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
def test_llamacpps_rows_decode_vanillas_tokens_over_a_vanilla_of_their_own(specbench):
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
def test_llamacpp_says_what_transformers_says_of_each_kind_of_model(kind, tmp_path):
    from llama_cpp import Llama

    model = tiny(kind)
    ids = torch.arange(3, 23)[None]
    file = str(llamacpp.get_gguf_file(model))
    read = Llama(file, n_ctx=256, logits_all=True, verbose=False, type_k=0, type_v=0)
    read.eval(ids[0].tolist())
    with torch.no_grad():
        wanted = model(ids).logits[0].numpy()
    assert np.allclose(read.scores[: ids.shape[1]], wanted, atol=1e-3)


def test_without_llamacpp_a_row_says_what_to_install(specbench, small_pair, monkeypatch):
    monkeypatch.setattr("methods._engines.find_spec", lambda _: None)
    with pytest.raises(EnvironmentFault, match="llama-cpp-python, which is not installed") as got:
        specbench("engine:llama.cpp")
    assert got.value.hint == "pip install 'specbench-cli[llamacpp]'"


def tiny(kind, **more):
    torch.manual_seed(len(kind))
    config = getattr(transformers, f"{kind}Config")(**SIZES | {"sliding_window": None} | more)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.3)
    return model


def test_a_written_file_has_all_weights_and_rotates_neighbours():
    model = tiny("Llama", tie_word_embeddings=False)
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


def test_of_a_cut_output_no_token_that_it_leaves_out_is_ever_the_likeliest():
    says = torch.tensor([7, 3, 60])
    model = restrict_output(tiny("Llama"), says)
    reader = gguf.GGUFReader(llamacpp.get_gguf_file(model))
    output = next(np.array(each.data) for each in reader.tensors if each.name == "output.weight")
    assert np.array_equal(output[says], model.lm_head.weight.detach().numpy())
    hidden = torch.randn(500, 32, generator=torch.Generator().manual_seed(1))
    said = torch.tensor(hidden.numpy() @ output.T).argmax(-1)
    assert set(said.tolist()) == set(says.tolist())
    assert torch.equal(said, model.lm_head(hidden).argmax(-1))


def test_a_written_file_goes_with_its_module():
    model = tiny("Qwen2")
    path = llamacpp.get_gguf_file(model)
    assert path.is_file() and llamacpp.get_gguf_file(model) == path
    del model
    assert not path.exists()


SCALED = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("kind", "more", "says"),
    [
        ("Gemma2", {}, "model_type gemma2 cannot be written"),
        ("Llama", {"rope_parameters": SCALED}, "rope_type linear cannot"),
        ("Mistral", {"sliding_window": 8}, "sliding_window cannot"),
    ],
)
def test_a_model_that_is_not_written_is_named(kind, more, says):
    with pytest.raises(MethodFault, match=says):
        llamacpp.get_gguf_file(tiny(kind, **more))


def test_what_drafts_is_counted():
    drafting = llamacpp.CountingDrafter(lambda ids: ids[-3:])
    assert drafting(np.arange(5, dtype=np.intc)).tolist() == [2, 3, 4]
    drafting(np.arange(2, dtype=np.intc))
    assert (drafting.steps, drafting.drafted) == (2, 5)
