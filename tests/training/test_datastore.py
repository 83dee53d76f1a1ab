"""Datastores of REST: their content, resumption and errors."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from methods.rest.datastore import Datastore
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.errors import EnvironmentFault, UsageError
from specbench_cli.models import resolve
from specbench_cli.training.datastore import DatastoreMaker

TEXTS = ("The train leaves at nine.", "The train leaves at ten.", "Nine is a number.")


@pytest.fixture(scope="module")
def target() -> Path:
    return resolve("embedded-1m").path


@pytest.fixture(scope="module")
def loaded(target: Path):
    return load_decoder(target, name="target", device=torch.device("cpu"), dtype=torch.float32)


def _files(folder: Path) -> list[Path]:
    lines, plain = folder / "some.jsonl", folder / "more.txt"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:2]) + "\n")
    plain.write_text(TEXTS[2], encoding="utf-8")
    return [lines, plain]


def test_a_datastore_has_target_tokens_and_is_built_once(
    tmp_path: Path, target: Path, loaded
) -> None:
    files, progress = _files(tmp_path), list[int]()
    maker = DatastoreMaker(tmp_path / "out", target, progress.append)
    (tmp_path / "out").mkdir()
    folder = maker.make_from_texts(files, fresh=False)
    store = Datastore.load(folder, {"target": loaded})
    encode = AutoTokenizer.from_pretrained(target)
    ids = [encode(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    assert store.tokens.tolist() == [token for text in ids for token in (*text, store.end)]
    n_shared = next(n for n in range(9) if ids[0][n] != ids[1][n])
    found = store.find(ids[0][:n_shared])
    ways = store.continuations(found, n_shared, 1, most=9)[:, 0].tolist()
    assert sorted(ways) == sorted([ids[0][n_shared], ids[1][n_shared]])
    config = json.loads((folder / "config.json").read_text())
    assert [source["file"] for source in config["specbench"]["from"]] == ["some.jsonl", "more.txt"]
    assert str(tmp_path) not in json.dumps(config)
    assert progress == [3]
    maker.make_from_texts(files, fresh=False)
    assert progress == [3], "made once"
    maker.make_from_texts(files, fresh=True)
    files[1].write_text("Another text.", encoding="utf-8")
    maker.make_from_texts(files, fresh=False)
    assert progress == [3, 3, 3], "made anew"


def test_a_store_of_another_tokenizer_is_refused(tmp_path: Path, target: Path, loaded) -> None:
    (tmp_path / "out").mkdir()
    folder = DatastoreMaker(tmp_path / "out", target).make_from_texts(_files(tmp_path), fresh=False)
    config = json.loads((folder / "config.json").read_text())
    config["specbench"]["tokenizer_sha256"] = "0" * 64
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(EnvironmentFault, match="built with another tokenizer"):
        Datastore.load(folder, {"target": loaded})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, "no such file"),
        ("bad.txt", b"\xff\xfe\x00", "is not UTF-8"),
        ("bad.jsonl", b'{"text": "fine"}\n{"words": "lost"}\n', "bad.jsonl:2 is not JSON like"),
        ("bad.jsonl", b"\xff\n", "bad.jsonl:1 is not JSON like"),
        ("empty.txt", b"", "contain no text"),
    ],
)
def test_files_that_cannot_be_read_are_named(
    tmp_path: Path, target: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        DatastoreMaker(tmp_path / "out", target).make_from_texts([tmp_path / name], fresh=False)
    assert not (tmp_path / "out").exists()


def test_replies_need_a_target_of_the_embedded_family(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specbench_cli.training.datastore.SPECIAL_TOKENS", ("<|nobody|>",))
    with pytest.raises(UsageError, match="not of the embedded family"):
        DatastoreMaker(tmp_path, target).make_from_replies(
            [], 2, 0, torch.device("cpu"), fresh=False
        )


def test_replies_begin_with_the_assistant_token_and_are_resumed(
    tmp_path: Path, target: Path, loaded
) -> None:
    device, progress = torch.device("cpu"), list[int]()
    maker = DatastoreMaker(tmp_path, target, progress.append)
    folder = maker.make_from_replies([], 3, 0, device, fresh=False)
    store = Datastore.load(folder, {"target": loaded})
    assistant_id = AutoTokenizer.from_pretrained(target).get_vocab()["<|assistant|>"]
    text = store.tokens.tolist()
    starts = [0, *(at + 1 for at, token in enumerate(text[:-1]) if token == store.end)]
    assert len(starts) == 3 and all(text[at] == assistant_id for at in starts)
    before = (folder / "model.safetensors").read_bytes()
    (folder / "config.json").unlink()
    maker.make_from_replies([], 3, 0, device, fresh=False)
    assert progress == [1, 2, 3], "the replies were kept"
    assert (folder / "model.safetensors").read_bytes() == before
