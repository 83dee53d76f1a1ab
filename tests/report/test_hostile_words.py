"""Words of a plug-in or a task file do nothing in the files of a report."""

from __future__ import annotations

import csv
import io

import pytest

from specbench_cli import output
from specbench_cli.report.export import harmless
from specbench_cli.report.html.page import embedded
from specbench_cli.report.markdown_table import table


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("<b>x", "&lt;b>x"),
        ("[x](http://y)", "[x]\\(http://y)"),
        ("*x* **y**", "\\*x\\* \\*\\*y\\*\\*"),
        ("a|b", "a\\|b"),
        ("__x__ but multi_turn", "\\_\\_x\\_\\_ but multi_turn"),
        ("&lt;", "&amp;lt;"),
        ("\u202eevil", "\\u202eevil"),
        ("[1.01, 1.46] at p < 1e-5", "[1.01, 1.46] at p < 1e-5"),
    ],
)
def test_a_markdown_cell_is_shown_as_it_is(word, shown):
    assert table(["a"], [[word]]).splitlines()[-1] == f"| {shown} |"


@pytest.mark.parametrize("word", ["=1+1", "+1", "-x", "@SUM(A1)", "\t=1", "\r=1"])
def test_no_csv_cell_is_a_formula_and_numbers_stay_numbers(word):
    assert harmless(word) == f"'{word}"
    assert harmless(-1.5) == -1.5
    written = io.StringIO()
    csv.writer(written).writerow([harmless(-1.5), harmless("sps")])
    assert written.getvalue().strip() == "-1.5,sps"


def test_overrides_of_the_direction_are_spelled_out_on_a_terminal_and_in_the_page():
    assert output.plain("a\u202eb\u2066c\ud800") == "a\\u202eb\\u2066c\\ud800"
    assert embedded({"a": "x\u202ey"}) == '{"a":"x\\\\u202ey"}'
