"""Which tests run which lines, and how long they take: from coverage.py's data and JUnit files."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from coverage import CoverageData
from mutants import Mutant


class CoverageMap:
    """What a measured run of the tests said.

    Args:
        root: the tree that was measured.
        data: files of coverage.py, written with `--cov-context=test`.
        junit: JUnit files of the same runs.

    Raises:
        ValueError: a file of coverage.py does not say which test ran what.
    """

    def __init__(self, root: Path, data: Iterable[Path], junit: Iterable[Path]) -> None:
        self._root = root
        self._data = [CoverageData(str(path)) for path in data]
        self._lines: dict[str, dict[int, set[str]]] = {}
        self.seconds: dict[str, float] = {}
        for read in self._data:
            read.read()
            if not read.measured_contexts() - {""}:
                raise ValueError(
                    f"{read.data_filename()} names no tests: measure with --cov-context=test, "
                    "and with -n 1 or more (or --dist no)"
                )
        for path in junit:
            self.seconds |= durations(path)

    def tests(self, mutant: Mutant) -> list[str]:
        """Ids of the tests that run a mutant's lines: those of its own test module first, then
        the fast ones."""
        lines = self._of(mutant.file)
        first, last = mutant.lines
        found = {
            test
            for line, tests in lines.items()
            if not first or first <= line <= last
            for test in tests
        }
        own = f"/test_{Path(mutant.file).stem}.py"
        return sorted(found, key=lambda test: (own not in test, self.seconds.get(test, 0.0), test))

    def _of(self, file: str) -> dict[int, set[str]]:
        if file not in self._lines:
            lines: defaultdict[int, set[str]] = defaultdict(set)
            for data in self._data:
                for line, contexts in data.contexts_by_lineno(str(self._root / file)).items():
                    lines[line] |= {context.rpartition("|")[0] for context in contexts} - {""}
            self._lines[file] = dict(lines)
        return self._lines[file]


def durations(junit: Path) -> dict[str, float]:
    """Seconds by test id, of tests at the top level of their modules."""
    return {
        f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}": float(
            case.get("time", 0)
        )
        for case in ET.parse(junit).iter("testcase")
    }
