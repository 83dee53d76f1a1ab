"""Names, folders and the hub's cache to checkpoints; nothing here leaves this machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from specbench_cli.errors import EnvironmentFault, ExitCode, UsageError
from specbench_cli.models import describe, model_names, resolve
from specbench_cli.models.resolve import Alias, aliases

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def checkpoint(folder: Path, without: str = "") -> Path:
    """A folder that looks like a checkpoint."""
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        if name != without:
            (folder / name).write_text("{}")
    return folder


def cached(cache: Path, hub_id: str, without: str = "") -> Path:
    """Put a checkpoint where the hub's cache keeps that id."""
    repo = cache / f"models--{hub_id.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    return checkpoint(repo / "snapshots" / COMMIT, without)


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """An empty hub cache and no network, as HF_HUB_CACHE and HF_HUB_OFFLINE=1 set them."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def test_hub_id_in_the_cache_resolves_offline_in_a_fresh_process(tmp_path):
    folder = cached(tmp_path / "hub", "org/name")
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


def test_alias_of_a_hub_id_knows_its_draft_and_commit(hub_cache):
    folder = cached(hub_cache, "huggyllama/llama-7b")
    by_alias, by_id = resolve("llama-7b"), resolve("huggyllama/llama-7b")
    assert by_alias.path == by_id.path == folder
    assert by_alias.draft == by_id.draft == "llama-68m"
    assert (by_alias.label, by_id.label) == ("llama-7b", "huggyllama/llama-7b")
    assert by_alias.revision == by_id.revision == COMMIT
    assert not by_alias.embedded
    assert describe("llama-7b")["available"] == "cached"


@pytest.mark.parametrize("name", ["llama-7b", "huggyllama/llama-7b"])
def test_model_that_is_not_here_offline_says_what_to_download_and_what_to_run(hub_cache, name):
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


def test_cached_model_with_pickled_weights_only_is_refused_with_the_conversion(hub_cache):
    cached(hub_cache, "org/pickled", without="model.safetensors")
    with pytest.raises(EnvironmentFault, match=r"no \*\.safetensors") as caught:
        resolve("org/pickled")
    assert "save_pretrained('pickled-safetensors')" in caught.value.hint


def test_local_folder_is_labelled_by_its_own_name(tmp_path):
    folder = checkpoint(tmp_path / "private" / "tiny")
    found = resolve(str(folder))
    assert (found.path, found.label, found.hub_id, found.draft) == (folder, "tiny", None, None)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_local_folder_that_is_no_checkpoint_is_refused(tmp_path, missing):
    folder = checkpoint(tmp_path / "tiny", without=missing)
    with pytest.raises(UsageError, match="no .*" + missing.split(".")[0].replace("model", "safe")):
        resolve(str(folder))


@pytest.mark.parametrize("name", ["./absent", "/absent/model", "~/absent-model", "a/b/c"])
def test_folder_that_does_not_exist_is_refused(name):
    with pytest.raises(UsageError, match="no such folder"):
        resolve(name)


def test_unknown_short_name_suggests_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'embedded'") as caught:
        resolve("Embeded")
    assert "llama-7b" in caught.value.hint


def test_aliases_say_where_each_model_is():
    assert model_names()[0] == "embedded"
    for name in model_names():
        facts = describe(name)
        assert facts["name"] == name
        assert facts["licence"]
        assert facts.get("folder") or facts["download_gb"]
        assert facts.get("draft") is None or facts["draft"] in aliases()


def test_alias_with_two_places_is_refused():
    with pytest.raises(ValueError, match="exactly one"):
        Alias(hub="org/name", folder="there")


def test_embedded_is_the_pair_that_is_shipped():
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
    assert "specbench train pair" in caught.value.hint
