"""Format names of `--to`: alternative spellings are accepted."""

import pytest

from specbench_cli.commands._formats import parse_formats
from specbench_cli.commands.compare import FILES
from specbench_cli.errors import UsageError
from specbench_cli.report.outputs import FORMATS


@pytest.mark.parametrize(
    ("to", "options", "expected"),
    [
        ("markdown, tex,md", FORMATS, ["md", "latex"]),
        ("md,junit,markdown", FILES, ["markdown", "junit"]),
        ("json", FORMATS, ["json"]),
    ],
)
def test_alternative_spellings_select_the_listed_format(to, options, expected):
    assert parse_formats(to, options, "") == expected


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("junti", "--to 'junti' is not one of markdown, junit, json; did you mean 'junit'?"),
        ("latex", "--to 'latex' is not one of markdown, junit, json"),
        (" , ", "--to names no format; choose from markdown, junit, json"),
    ],
)
def test_an_unknown_format_is_named(to, message):
    with pytest.raises(UsageError) as refused:
        parse_formats(to, FILES, "specbench compare BASE NEW --to markdown")
    assert refused.value.message == message
    assert refused.value.hint == "specbench compare BASE NEW --to markdown"
