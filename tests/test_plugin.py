"""Tests of plug-in files with invalid names, and of imports that do not end."""

import textwrap

import pytest

from specbench_cli import plugin, registry
from specbench_cli.errors import UsageError

METHOD = """
    from specbench_cli.api import Method

    class Mine(Method):
        name = {name!r}

        def propose(self, session, limit):
            return session.chain(())
"""


def write_plugin(tmp_path, text):
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


@pytest.mark.parametrize(
    "name",
    ["../../x", "a/b", "a b", "", ".hidden", "-m", "Mine", "a\nb", "x" * 65, 3, None, "caf\u00e9"],
)
def test_an_invalid_method_name_is_refused(tmp_path, name):
    with pytest.raises(UsageError, match="is not a valid method name"):
        plugin.read(write_plugin(tmp_path, METHOD.format(name=name)))


@pytest.mark.parametrize("name", ["mine", "my-method_2", "hydra++", "lab:mine.v2"])
def test_a_valid_method_name_is_accepted(tmp_path, name):
    assert list(plugin.read(write_plugin(tmp_path, METHOD.format(name=name)))) == [name]


def test_all_built_in_methods_have_valid_names():
    for name in registry.built_in_methods():
        plugin.check_name(name, "specbench")


def test_the_name_of_an_entry_point_is_checked_before_its_import(monkeypatch):
    entry = registry.MethodEntry("os:path", "", origin="theirs")
    monkeypatch.setattr(registry, "_entry_point_methods", lambda: {"../x": entry})
    with pytest.raises(UsageError, match=r"theirs: '\.\./x' is not a valid method name"):
        registry.load("../x")


@pytest.mark.parametrize(
    "endless_code",
    [
        "import time; time.sleep(60)",
        "while True: pass",
        "import threading; threading.Event().wait()",
        "while True:\n    try:\n        while True: pass\n    except TimeoutError: break\n"
        "import time; time.sleep(60)",
    ],
    ids=["sleeps", "loops", "waits", "catches"],
)
def test_an_import_that_does_not_end_is_refused(tmp_path, monkeypatch, endless_code):
    monkeypatch.setattr(plugin, "IMPORT_S", 0.1)
    with pytest.raises(
        UsageError, match=r"mine\.py:\d+: TimeoutError: its import took longer than"
    ):
        plugin.read(write_plugin(tmp_path, endless_code))
