"""Reading of YAML: plain values, a line number per key, no duplicate keys."""

import os
import time

import pytest

from specbench_cli.config.document import read
from specbench_cli.errors import UsageError


@pytest.fixture
def document(tmp_path):
    def make(text):
        path = tmp_path / "some.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read(path)

    return make


def test_every_key_has_its_line(document):
    found = document("limit: 1\n\nset:\n  sps:\n    length: 7\n")
    assert found.values == {"limit": 1, "set": {"sps": {"length": 7}}}
    assert found.locate("limit") == "some.yaml:1"
    assert found.locate("set.sps.length") == "some.yaml:5"


def test_a_key_from_an_alias_has_the_line_of_the_alias(document):
    found = document("set: &x\n  sps: {length: 7}\nsweep: *x\n")
    assert found.locate("sweep.sps.length") == "some.yaml:3"


def test_an_empty_file_is_an_empty_document(document):
    assert document("# nothing\n").values == {}


def test_an_alias_has_the_value_of_its_anchor(document):
    assert document("a: &x {b: 1}\nc: *x\n").values == {"a": {"b": 1}, "c": {"b": 1}}


ALIAS_BOMB = "a: &l0 [x, x]\n" + "".join(
    f"l{n}: &l{n} [{', '.join(f'*l{n - 1}' for _ in range(10))}]\n" for n in range(1, 10)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("limit: 1\nseed: 2\nlimit: 3\n", "some.yaml:3: 'limit' is already on line 1"),
        ("set:\n  sps: {a: 1}\n  sps: {a: 2}\n", "some.yaml:3: 'set.sps' is already on line 2"),
        ("limit: [1\n", "some.yaml:2: "),
        ("limit: !!python/object/apply:os.system ['true']\n", "some.yaml:1: could not determine"),
        ("- a\n- b\n", "must consist of `key: value` lines, got list"),
        (b"\xff\xfe\x00", "some.yaml"),
        ("a: \x06\n", "some.yaml: unacceptable character"),
        ('a: 1\nb: "\\ud800"\n', r"some.yaml:2: half a character: '\ud800'"),
        (f"a: {'[' * 3000}{']' * 3000}", "some.yaml: it is nested too deeply"),
        ("b: 1\na: &x\n  b: *x\n", "some.yaml:2: an alias refers to the value that contains it"),
        ("a: &x [1, *x]\n", "some.yaml:1: an alias refers to the value"),
        (ALIAS_BOMB, "some.yaml:6: aliases expand to 311,111 values, at most 100,000 are"),
        ("a: 1\n---\nb: 2\n", "some.yaml:2: but found another document"),
    ],
)
def test_error_names_file_and_line(document, text, message):
    with pytest.raises(UsageError) as caught:
        document(text)
    assert message in caught.value.message


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to("/dev/null"),
    ],
    ids=["pipe", "endless device", "empty device"],
)
@pytest.mark.parametrize("written", [False, True])
def test_a_pipe_or_a_device_is_refused_at_once(tmp_path, make, written):
    make(tmp_path / "some.yaml")
    writer = os.open(tmp_path / "some.yaml", os.O_RDWR) if written else None
    began = time.monotonic()
    with pytest.raises(UsageError, match=r"some\.yaml is not a regular file"):
        read(tmp_path / "some.yaml")
    assert time.monotonic() - began < 1
    if writer is not None:
        os.close(writer)
