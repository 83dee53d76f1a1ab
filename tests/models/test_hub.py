"""Downloads from a simulated hub on this machine."""

import http.server
import json
import socket
import threading

import pytest

from specbench_cli.errors import EnvironmentFault
from specbench_cli.models import hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"pickle",
    "tokenizer.json": b"{}",
    "onnx/model.safetensors": b"the same again",
}


class HubHandler(http.server.BaseHTTPRequestHandler):
    """Request handler for `snapshot_download`: the commit, the list of files, each file."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith(("/api/models/org/name/tree/", "/api/models/org/gated/tree/")):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": f"{index:040x}"}
                for index, (name, data) in enumerate(FILES.items())
            ]
            self.reply(json.dumps(entries).encode())
        elif path.startswith(("/api/models/org/name", "/api/models/org/gated")):
            self.reply(json.dumps({"id": "org/name", "sha": COMMIT, "siblings": []}).encode())
        elif path.startswith("/org/gated/resolve/"):
            self.refuse(403, "GatedRepo")
        elif path.startswith(f"/org/name/resolve/{COMMIT}/"):
            name = path.partition(f"{COMMIT}/")[2]
            self.server.requested_files.append(name)  # type: ignore[attr-defined]
            self.reply(FILES[name], etag=f'"{name}"')
        else:
            self.refuse(404, "RepoNotFound")

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def reply(self, data: bytes, etag: str = '"x"') -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", etag)
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def endpoint(tmp_path, monkeypatch):
    """Serve a hub with one model on this machine.

    The server records which files are requested.
    """
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    server.requested_files = []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
        address + "/{repo_id}/resolve/{revision}/{filename}",
    )
    yield server.requested_files
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_download_contains_only_safetensors_and_is_found_offline(endpoint, monkeypatch):
    assert hub.cached_snapshot("org/name") is None
    folder = hub.download("mine", hub.HubDownload("org/name"), None, "or not")
    assert folder.name == COMMIT
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert set(endpoint) == {"config.json", "model.safetensors", "tokenizer.json"}
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert hub.cached_snapshot("org/name") == folder


def test_model_that_the_hub_does_not_know_is_an_environment_fault(endpoint):
    with pytest.raises(EnvironmentFault, match="the hub has no such model or it is priv") as caught:
        hub.download("mine", hub.HubDownload("org/other"), None, "or not")
    assert caught.value.message.startswith("mine: org/other is not on this machine")
    assert "https://huggingface.co/org/other" in caught.value.hint


def test_a_gated_model_names_its_licence_page_and_the_login_command(endpoint):
    download = hub.HubDownload("org/gated", size="about 16.1 GB to download")
    with pytest.raises(EnvironmentFault) as caught:
        hub.download("mine", download, None, "or not")
    assert caught.value.message == (
        "mine: org/gated is not on this machine (about 16.1 GB to download), and the hub gives it"
        " only to those who have accepted its licence"
    )
    assert caught.value.hint == (
        "accept the licence at https://huggingface.co/org/gated, then: hf auth login; then the same"
        " command again; or not"
    )


def test_offline_a_gated_model_names_its_licence_and_draft(endpoint, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    download = hub.HubDownload("org/gated", "refs/pr/1", "about 16.1 GB to download", gated=True)
    draft = hub.HubDownload("org/draft", size="about 1 GB to download")
    with pytest.raises(EnvironmentFault, match="HF_HUB_OFFLINE forbids asking the hub") as caught:
        hub.download("org/gated", download, draft, "or not")
    assert caught.value.message.startswith("org/gated is not on this machine (about 16.1 GB")
    accept, fetch, also, instead = caught.value.hint.split("; ")
    assert accept.startswith("accept the licence at https://huggingface.co/org/gated")
    assert "hf download org/gated --revision refs/pr/1 --include '*.safetensors'" in fetch
    assert also.startswith("and its customary draft (about 1 GB to download): hf download org/dra")
    assert instead == "or not"


def test_interrupted_download_does_not_count_as_cached(endpoint):
    folder = hub.download("mine", hub.HubDownload("org/name"), None, "or not")
    (folder / "model.safetensors").unlink()
    assert hub.cached_snapshot("org/name") is None


def test_a_silent_hub_times_out(endpoint, monkeypatch):
    monkeypatch.setattr(hub, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        with pytest.raises(EnvironmentFault, match="timed out"):
            hub.download("mine", hub.HubDownload("org/name"), None, "or not")


@pytest.mark.parametrize("hub_id", ["org/na--me", "org/" + "x" * 100])
def test_an_invalid_hub_id_is_not_cached(hub_id):
    assert hub.cached_snapshot(hub_id) is None
