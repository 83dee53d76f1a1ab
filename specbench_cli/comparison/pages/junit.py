"""A comparison as JUnit XML for CI services: one suite per task, one case per method."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby
from xml.etree import ElementTree as Xml

from specbench_cli import output
from specbench_cli.comparison.outcome import Comparison, ComparisonFinding, RowOutcome
from specbench_cli.comparison.pages import words

_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 does not allow, not even escaped (section 2.2, Char)."""
_NOT_COMPARED = "not compared"


def render(comparison: Comparison) -> str:
    """Return the XML document.

    A row that fails the comparison is a failure. Rows that could not be compared are skipped tests.
    Other findings are written to `system-out` of their test case.
    """
    root = Xml.Element("testsuites", name="specbench compare")
    rows = sorted(comparison.rows, key=lambda row: row.key.task)
    for task, own in groupby(rows, key=lambda row: row.key.task):
        suite = Xml.SubElement(root, "testsuite", name=_escape_illegal(task))
        for row in own:
            _add_row(suite, row, comparison)
    if comparison.not_compared:
        suite = Xml.SubElement(root, "testsuite", name=_NOT_COMPARED)
        for sentence in comparison.not_compared:
            case = _add_case(suite, _NOT_COMPARED, sentence)
            Xml.SubElement(case, "skipped", message=_escape_illegal(sentence))
    for element in (root, *root):
        _set_counts(element)
    Xml.indent(root)
    document: bytes = Xml.tostring(root, encoding="utf-8", xml_declaration=True)
    return document.decode() + "\n"


def _add_row(suite: Xml.Element, row: RowOutcome, comparison: Comparison) -> None:
    case = _add_case(suite, f"specbench.{row.key.task}", row.key.label)
    closing = words.failing_findings(row, comparison)
    if closing:
        says = "; ".join(found.message for found in closing)
        failure = Xml.SubElement(
            case, "failure", type=closing[0].outcome, message=_escape_illegal(says)
        )
        failure.text = _escape_illegal("\n".join(_finding_lines(closing)))
    elif not words.is_compared(row):
        says = "; ".join(found.message for found in row.findings)
        Xml.SubElement(case, "skipped", message=_escape_illegal(says or row.rule_reason))
    lines = [f"outcome: {words.outcome_name(row)}", f"rule: {row.rule} ({row.rule_reason})"]
    lines += [f"pairs: {row.pairs}", f"MAT: {words.format_mat(row)}", *words.format_times(row)]
    Xml.SubElement(case, "system-out").text = _escape_illegal(
        "\n".join([*lines, *_finding_lines(row.findings)])
    )


def _add_case(suite: Xml.Element, classname: str, name: str) -> Xml.Element:
    """Add a test case.

    JUnit readers require a time. It is 0, because a comparison measures none.
    """
    return Xml.SubElement(
        suite,
        "testcase",
        classname=_escape_illegal(classname),
        name=_escape_illegal(name),
        time="0",
    )


def _set_counts(element: Xml.Element) -> None:
    """Set the numbers of tests, failures and so on, which JUnit readers expect."""
    for attribute, tag in (("tests", "testcase"), ("failures", "failure"), ("skipped", "skipped")):
        element.set(attribute, str(sum(1 for _ in element.iter(tag))))
    element.set("errors", "0")
    element.set("time", "0")


def _finding_lines(findings: Iterable[ComparisonFinding]) -> list[str]:
    """Return one line per finding and one per location."""
    return [line for f in findings for line in (f"{f.outcome}: {f.message}", *f.locations)]


def _escape_illegal(text: str) -> str:
    """Return the text with characters that XML does not allow written as escapes."""
    return _FORBIDDEN.sub(lambda found: ascii(found[0])[1:-1], output.escape_hidden(text))
