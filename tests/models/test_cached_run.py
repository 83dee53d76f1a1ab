"""`specbench run` on hub models: errors if they are missing, and runs from the hub's cache."""

import json
import shutil
from pathlib import Path

import pytest

from specbench_cli import app
from specbench_cli.models import resolve
from specbench_cli.models.aliases import aliases
from specbench_cli.store.run_dir import RunDir

COMMIT = "89abcdef0123456789abcdef0123456789abcdef"
TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
SMALL = "-m sps --limit 1 --max-new-tokens 4 --threads 1 --allow-noise --out here".split()


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """Set an empty $HF_HOME/hub and no network."""
    cache = tmp_path / "hf" / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return cache


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Return a function that runs `specbench run` in an empty folder: exit code and stderr."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("SPECBENCH_DEBUG", "")

    def call(*args):
        code = app._run(["run", *args])
        return code, capsys.readouterr().err

    return call


@pytest.fixture
def put_in_cache(hub_cache, tiny_checkpoint):
    """Return a function that puts a tiny checkpoint into the hub's cache."""

    def put(hub_id, *, seed=0, template=None):
        repo = hub_cache / f"models--{hub_id.replace('/', '--')}"
        folder = repo / "snapshots" / COMMIT
        (repo / "refs").mkdir(parents=True)
        (repo / "refs" / "main").write_text(COMMIT)
        tiny = tiny_checkpoint("llama", seed=seed, vocab_size=4096, max_position_embeddings=2048)
        shutil.copytree(tiny, folder)
        shipped = resolve("embedded-1m").path
        for file in TOKENIZER:
            shutil.copy(shipped / file, folder)
        for file in folder.glob("chat_template*"):
            file.unlink()
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config.pop("chat_template", None)
        if template is not None:
            config["chat_template"] = template
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return folder

    return put


def decode_prompt(folder, prompt):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder).decode(prompt.ids)


def test_a_missing_model_is_exit_3_with_its_size_and_download_command(run, hub_cache):
    code, err = run("-m", "sps", "--target", "llama-7b")
    assert code == 3
    assert "huggyllama/llama-7b is not on this machine (about 13.5 GB to download)" in err
    assert "hf download huggyllama/llama-7b" in err
    assert "customary draft (about 0.272 GB to download): hf download JackFram/llama-68m" in err
    assert "specbench run --target embedded" in err
    assert not list(Path().iterdir())


@pytest.mark.smoke
def test_model_in_the_hubs_cache_runs_with_its_chat_template(run, put_in_cache):
    folder = put_in_cache("huggyllama/llama-7b", template=TEMPLATE)
    put_in_cache("JackFram/llama-68m", seed=1)
    code, err = run("--target", "llama-7b", *SMALL)
    assert code == 0, err
    run_dir = RunDir.open(Path("here"))
    effective = run_dir.manifest["config"]["effective"]
    assert (effective["target"], effective["draft"]) == ("llama-7b", "llama-68m")
    prompt = next(run_dir.prompts())
    assert decode_prompt(folder, prompt) == f"[user] {prompt.text}\n[assistant] "
    assert all(record.verdict.kind in ("reference", "identical") for record in run_dir.records())


def test_raw_omits_the_chat_template(run, put_in_cache):
    folder = put_in_cache("huggyllama/llama-7b", template=TEMPLATE)
    put_in_cache("JackFram/llama-68m", seed=1)
    assert run("--target", "llama-7b", "--raw", *SMALL)[0] == 0
    prompt = next(RunDir.open(Path("here")).prompts())
    assert decode_prompt(folder, prompt) == prompt.text


def test_draft_auto_uses_the_usual_draft_model_and_chat_template(run, put_in_cache):
    folder = put_in_cache("lmsys/vicuna-7b-v1.3")
    put_in_cache("double7/vicuna-68m", seed=1)
    assert run("--target", "vicuna-7b", "--draft", "auto", *SMALL)[0] == 0
    run_dir = RunDir.open(Path("here"))
    assert run_dir.manifest["config"]["effective"]["draft"] == "vicuna-68m"
    prompt = next(run_dir.prompts())
    assert decode_prompt(folder, prompt).endswith(f"questions. USER: {prompt.text} ASSISTANT:")


def test_draft_auto_without_a_usual_draft_model_is_an_error(run, put_in_cache):
    assert aliases()["mistral-7b-instruct"].draft is None
    put_in_cache("mistralai/Mistral-7B-Instruct-v0.2")
    code, err = run("--target", "mistral-7b-instruct", "--draft", "auto", *SMALL)
    assert code == 2
    assert "sps needs a draft model, and mistral-7b-instruct has no default one" in err
    assert "--draft MODEL with the target's tokenizer: a short name" in err
    assert not list(Path().iterdir())
