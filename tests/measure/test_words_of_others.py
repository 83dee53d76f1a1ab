"""Texts of a plug-in are stored on one line and truncated."""

from __future__ import annotations

import textwrap

import pytest

from specbench_cli.errors import MAX_TEXT_LENGTH
from specbench_cli.measure.redaction import redact_setting
from specbench_cli.store.run_dir import RunDir

pytestmark = pytest.mark.usefixtures("small_pair")

LOUD = r"""
    from pydantic import Field
    from specbench_cli.api import Draft, Method, MethodFault, MethodParams

    class Unsayable(Exception):
        def __str__(self):
            raise SystemExit(7)

    FAULTS = {{
        "endless": lambda: RuntimeError("\x1b[2J\n::error::x " + "A" * 5_000_000),
        "of ours": lambda: MethodFault("M" * 5_000_000, "H" * 5_000_000),
        "named": lambda: type("N" * 5_000_000, (Exception,), {{}})("x"),
        "halved": lambda: ValueError("\ud800" * 5_000),
        "unsayable": lambda: Unsayable(),
    }}

    class Params(MethodParams):
        words: str = Field("B" * 5_000_000, description="words")

    class Loud(Method):
        '''Fails.'''
        Params = Params
        name = "{word}"

        def propose(self, session, limit):
            place = session.requests[0].prompt_id.rpartition("/")[2]
            kinds = {kinds!r}
            raise FAULTS[kinds[int(place) % len(kinds)] if place.isdigit() else kinds[0]]()

        def observe(self, session, outcome):
            pass
"""


@pytest.mark.parametrize("isolation", ["none", "process"])
@pytest.mark.parametrize(
    "kinds",
    [("endless", "of ours", "named"), ("halved", "unsayable", "halved")],
    ids=["long", "odd"],
)
def test_exceptions_of_a_plug_in_are_truncated(specbench, tmp_path, kinds, isolation):
    file = tmp_path / "loud.py"
    file.write_text(textwrap.dedent(LOUD.format(word="loud", kinds=kinds)))
    settings = {"limit": 3, "category": ["qa"], "max_new_tokens": 4, "threads": 1}
    found = specbench("loud", plugins=[str(file)], isolation=isolation, **settings)
    errors = [record.error for record in found.by_label("loud")]
    assert len(errors) == 1  # the run ends with its only method
    for words in [*errors, *found.log.notes, *found.manifest["dropped"].values()]:
        assert len(words) < 6 * MAX_TEXT_LENGTH
        assert "\n" not in words
    run = specbench.path(1)
    sizes = {file.name: file.stat().st_size for file in run.iterdir() if file.is_file()}
    assert max(sizes.values()) < 200_000, sizes
    assert [record.error for record in RunDir.open(run).records() if record.error] == errors


def test_a_long_setting_is_truncated():
    assert len(redact_setting("x" * 100_000)) < 2 * MAX_TEXT_LENGTH
    for odd in ("~nobody-of-that-name/x", "a/" + "b" * 300):
        assert redact_setting(odd) == odd
