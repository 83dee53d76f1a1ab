"""Search of a dataset's file, and the copies that are accepted."""

import gzip
import hashlib
import json
import threading
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from specbench_cli.errors import EnvironmentFault, ExitCode
from specbench_cli.files import cache_folder
from specbench_cli.tasks import source
from specbench_cli.tasks.dataset_config import DatasetSource, HubSource

ROWS = b'{"question": "q", "answer": "a"}\n'
SUM = hashlib.sha256(ROWS).hexdigest()
OTHER = hashlib.sha256(b"other").hexdigest()


@pytest.fixture(autouse=True)
def isolate_sources(monkeypatch, tmp_path):
    """Set no data folder, an empty cache and a permitted network.

    All addresses are on this machine.
    """
    monkeypatch.delenv("SPECBENCH_DATA", raising=False)
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")


@contextmanager
def serve_folder(folder: Path):
    """Serve the files of a folder on this machine.

    Yields the address and the list of requested paths.
    """
    requests: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            requests.append(self.path)

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def read(tmp_path: Path, **where: object) -> bytes:
    return source.read_source(
        "t", DatasetSource(file="rows.jsonl", **where), tmp_path / "next_to_yaml"
    )


def test_the_data_folder_is_read_first(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_bytes(ROWS)
    monkeypatch.setenv("SPECBENCH_DATA", str(tmp_path))
    assert read(tmp_path, sha256=SUM, url="http://127.0.0.1:1/never") == ROWS
    assert not (tmp_path / "cache").exists()


def test_a_changed_copy_in_the_data_folder_is_refused_with_both_sums(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_bytes(ROWS)
    monkeypatch.setenv("SPECBENCH_DATA", str(tmp_path))
    with pytest.raises(EnvironmentFault) as caught:
        read(tmp_path, sha256=OTHER)
    assert SUM in caught.value.message
    assert OTHER in caught.value.message
    assert caught.value.exit_code == ExitCode.ENVIRONMENT


def test_a_download_is_checked_cached_and_not_repeated(tmp_path):
    (tmp_path / "remote").mkdir()
    (tmp_path / "remote" / "rows.jsonl").write_bytes(ROWS)
    with serve_folder(tmp_path / "remote") as (address, requests):
        url = f"{address}/rows.jsonl"
        assert read(tmp_path, sha256=SUM, url=url) == ROWS
        assert read(tmp_path, sha256=SUM, url=url) == ROWS
        assert requests == ["/rows.jsonl"]
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert [path.name for path in files] == ["rows.jsonl"]


def test_a_damaged_cache_is_downloaded_again(tmp_path):
    (tmp_path / "remote").mkdir()
    (tmp_path / "remote" / "rows.jsonl").write_bytes(ROWS)
    with serve_folder(tmp_path / "remote") as (address, requests):
        url = f"{address}/rows.jsonl"
        read(tmp_path, sha256=SUM, url=url)
        cached = next((tmp_path / "cache").rglob("rows.jsonl"))
        cached.write_bytes(ROWS[:5])
        assert read(tmp_path, sha256=SUM, url=url) == ROWS
        assert cached.read_bytes() == ROWS
        assert len(requests) == 2


def test_a_download_with_another_checksum_is_refused_and_not_cached(tmp_path):
    (tmp_path / "remote").mkdir()
    (tmp_path / "remote" / "rows.jsonl").write_bytes(ROWS)
    with (
        serve_folder(tmp_path / "remote") as (address, _),
        pytest.raises(EnvironmentFault, match=f"{SUM}, expected {OTHER}"),
    ):
        read(tmp_path, sha256=OTHER, url=f"{address}/rows.jsonl")
    assert not (tmp_path / "cache").exists()


def test_a_failed_download_is_reported_with_a_hint(tmp_path):
    (tmp_path / "remote").mkdir()
    with (
        serve_folder(tmp_path / "remote") as (address, _),
        pytest.raises(EnvironmentFault) as caught,
    ):
        read(tmp_path, sha256=SUM, url=f"{address}/rows.jsonl")
    assert "404" in caught.value.message
    assert "SPECBENCH_DATA" in caught.value.hint
    assert "curl -L -o rows.jsonl" in caught.value.hint
    assert "specbench run --task mini" in caught.value.hint


def test_offline_nothing_is_downloaded(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "remote").mkdir()
    (tmp_path / "remote" / "rows.jsonl").write_bytes(ROWS)
    with (
        serve_folder(tmp_path / "remote") as (address, requests),
        pytest.raises(EnvironmentFault, match="HF_HUB_OFFLINE is set"),
    ):
        read(tmp_path, sha256=SUM, url=f"{address}/rows.jsonl")
    assert requests == []


def test_a_source_without_an_address_is_an_error(tmp_path):
    with pytest.raises(EnvironmentFault, match="names no url or hub"):
        read(tmp_path)


def test_the_hub_is_used_if_the_url_fails(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # `datasets` reads the local folder given as id
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "test.jsonl").write_bytes(ROWS)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    hub = HubSource(id=str(tmp_path / "hub"), split="test", revision="0" * 40)
    assert read(tmp_path, sha256=SUM, url="http://127.0.0.1:1/rows.jsonl", hub=hub) == ROWS
    assert json.loads(next((tmp_path / "cache").rglob("rows.jsonl")).read_text())["answer"] == "a"


def in_hub_cache(tmp_path, monkeypatch, hub: HubSource, content: bytes) -> None:
    """Put a file where the hub's cache stores it."""
    cache = tmp_path / "hub-cache"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    repository = cache / f"datasets--{hub.id.replace('/', '--')}"
    path = repository / "snapshots" / hub.revision / hub.path
    path.parent.mkdir(parents=True)
    path.write_bytes(content)


@pytest.mark.parametrize("content", [ROWS, gzip.compress(ROWS)], ids=["plain", "gzipped"])
def test_a_hub_file_is_read_unchanged_from_the_hub_cache(tmp_path, monkeypatch, content):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub = HubSource(id="some/data", path="data/rows.jsonl", revision="0" * 40)
    in_hub_cache(tmp_path, monkeypatch, hub, content)
    assert read(tmp_path, sha256=SUM, hub=hub) == ROWS


def test_a_missing_hub_file_is_named_with_its_address(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    hub = HubSource(id="some/data", path="data/rows.jsonl", revision="0" * 40)
    with pytest.raises(
        EnvironmentFault, match="hub's some/data failed: HF_HUB_OFFLINE is set"
    ) as e:
        read(tmp_path, sha256=SUM, hub=hub)
    assert f"huggingface.co/datasets/some/data/resolve/{'0' * 40}/data/rows.jsonl" in e.value.hint


@pytest.mark.parametrize("other", [{"id": "b/data"}, {"path": "data/test.jsonl"}])
def test_files_of_different_datasets_do_not_share_a_cache_file(tmp_path, monkeypatch, other):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    first = {"id": "a/data", "path": "rows.jsonl", "revision": "0" * 40}
    for content, address in ((b"first", first), (b"second", first | other)):
        hub = HubSource(**address)
        in_hub_cache(tmp_path, monkeypatch, hub, content)
        assert read(tmp_path, hub=hub) == content


def test_a_revision_cannot_name_a_folder_outside_the_cache(tmp_path, monkeypatch):
    data = b"mine"
    hub = HubSource(id="a/data", path="rows.jsonl", revision="../../out")
    monkeypatch.setattr(source, "_download", lambda *_: data)
    assert read(tmp_path, hub=hub) == data
    assert not (tmp_path / "out").exists()
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all(path.is_relative_to(tmp_path / "cache/tasks") for path in found)


def test_a_gzipped_download_is_checked_and_kept_uncompressed(tmp_path):
    (tmp_path / "remote").mkdir()
    (tmp_path / "remote" / "rows.jsonl.gz").write_bytes(gzip.compress(ROWS))
    with serve_folder(tmp_path / "remote") as (address, _):
        assert read(tmp_path, sha256=SUM, url=f"{address}/rows.jsonl.gz") == ROWS
    assert next((tmp_path / "cache").rglob("rows.jsonl")).read_bytes() == ROWS


def test_a_download_that_was_cut_short_is_refused(tmp_path):
    (tmp_path / "remote").mkdir()
    (tmp_path / "remote" / "rows.jsonl.gz").write_bytes(gzip.compress(ROWS)[:-9])
    with (
        serve_folder(tmp_path / "remote") as (address, _),
        pytest.raises(EnvironmentFault) as caught,
    ):
        read(tmp_path, sha256=SUM, url=f"{address}/rows.jsonl.gz")
    assert "Compressed file ended" in caught.value.message
    assert "curl -L -o rows.jsonl.gz" in caught.value.hint
    assert not (tmp_path / "cache").exists()


def test_manual_steps_come_first_if_nothing_can_be_downloaded(tmp_path):
    with pytest.raises(EnvironmentFault) as caught:
        source.read_source("t", DatasetSource(file="rows.jsonl"), tmp_path, "ask its authors")
    assert caught.value.hint.startswith("ask its authors; then set SPECBENCH_DATA")


def test_a_cache_that_cannot_be_written_is_reported(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "file"))
    (tmp_path / "remote").mkdir()
    (tmp_path / "remote" / "rows.jsonl").write_bytes(ROWS)
    with (
        serve_folder(tmp_path / "remote") as (address, _),
        pytest.raises(EnvironmentFault, match="cannot write the cache") as caught,
    ):
        read(tmp_path, sha256=SUM, url=f"{address}/rows.jsonl")
    assert "SPECBENCH_CACHE" in caught.value.hint


def test_the_cache_folder_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.delenv("SPECBENCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "specbench"
