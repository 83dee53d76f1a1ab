"""What mutation testing changes, samples, runs and tells."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import coverage
import pytest

FOLDER = Path(__file__).parent


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.fixture
def mutants() -> ModuleType:
    return importlib.import_module("mutants")


@pytest.fixture
def command() -> ModuleType:
    return importlib.import_module("command")


def afters(mutants: ModuleType, source: str) -> list[str]:
    """Each mutant's change as `operator: before -> after`."""
    found = mutants.mutants_of(dedent(source), "a.py")
    return [f"{mutant.operator}: {mutant.before} -> {mutant.after}" for mutant in found]


def test_a_boundary_moves_and_a_comparison_turns_round(mutants):
    assert afters(mutants, "def f(a, b):\n    return a < b\n") == [
        "return None: return a < b -> return None",
        "compare: a < b -> a <= b",
        "compare: a < b -> a >= b",
    ]


def test_slices_lose_their_ends_and_indices_shift(mutants):
    assert afters(mutants, "def f(a, n):\n    del a[: n]\n")[1:] == [
        "slice: a[: n] -> a[:]",
        "index: a[: n] -> a[:n + 1]",
    ]


def test_what_does_not_run_is_left_alone(mutants):
    source = '''
        """Says 1."""
        from typing import TYPE_CHECKING, Literal
        if TYPE_CHECKING:
            one = 1
        Two = Literal[2]

        @cached(size=3)
        def f(a: Literal[4]) -> Literal[5]:
            """Says 6."""
            assert a, f"{7}"
            b: Literal[8]

        class A:
            def __repr__(self):
                return str(9)
    '''
    assert afters(mutants, source) == ["number: 2 -> 3", "number: 2 -> 1"]


def test_a_raised_error_goes_missing_but_says_the_same(mutants):
    assert afters(mutants, "def f():\n    raise ValueError(f'{1}', 2)\n") == [
        "drop: raise ValueError(f'{1}', 2) -> pass"
    ]


def test_a_mutant_keeps_all_other_text_and_its_lines(mutants):
    source = "def f(ä, b):  # why\n    c = ä + (\n        b\n    )\n    return c  # here\n"
    (mutant,) = (m for m in mutants.mutants_of(source, "a.py") if m.operator == "arithmetic")
    assert mutant.text == "def f(ä, b):  # why\n    c = (ä - b)\n\n\n    return c  # here\n"
    assert (mutant.line, mutant.lines) == (2, (2, 4))


def test_a_default_runs_with_its_function_and_a_constant_with_its_module(mutants):
    source = "A = 1\n\ndef f(a=2):\n    b = a\n    return b\n"
    found = {mutant.before: mutant.lines for mutant in mutants.mutants_of(source, "a.py")}
    assert (found["1"], found["2"]) == ((0, 0), (4, 5))


def test_a_seed_gives_the_same_sample_again(mutants):
    found = mutants.mutants_of("def f(a):\n    return a[1] + a[2] * 3 - 4\n", "a.py")
    first = mutants.sample(found, 4, 0)
    assert len(set(first)) == 4 and mutants.sample(found, 4, 0) == first
    assert mutants.sample(found, 4, 1) != first
    assert len(mutants.sample(found, 10_000, 0)) == len(found)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A module, tests of it, and a configuration."""
    root = tmp_path / "tree"
    (root / "tests").mkdir(parents=True)
    (root / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\naddopts = "-n 3"\nfilterwarnings = ["error"]\n'
    )
    (root / "counted.py").write_text(
        "def up(n, top):\n    i = 0\n    while i < n:\n        i += 1\n    return i if i else top\n"
    )
    (root / "tests" / "test_counted.py").write_text(
        "from counted import up\n\ndef test_up():\n    assert up(2, 9) == 2\n"
    )
    return root


@pytest.fixture
def _no_import() -> Iterator[None]:
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name == "counted":
            del sys.modules[name]


@pytest.mark.usefixtures("_no_import")
def test_mutants_are_killed_time_out_or_survive(mutants, tree, tmp_path):
    runner = importlib.import_module("runner").Runner(tree, tmp_path / "work", 2, 10.0)
    found = mutants.mutants_of((tree / "counted.py").read_text(), "counted.py")
    wanted = {"i += 1 -> pass", "i < n -> i <= n", "i if i else top -> i if not i else top"}
    chosen = [m for m in found if f"{m.before} -> {m.after}" in wanted or m.after == "-1"]
    results = runner.run((m, [["tests/test_counted.py::test_up"]]) for m in chosen)
    assert {(r.mutant.before, r.mutant.after, r.status) for r in results} == {
        ("i += 1", "pass", "timeout"),
        ("i < n", "i <= n", "killed"),
        ("i if i else top", "i if not i else top", "killed"),
        ("0", "-1", "survived"),
    }
    for copied in (tmp_path / "work").glob("*/counted.py"):
        assert copied.read_bytes() == (tree / "counted.py").read_bytes()


@pytest.mark.usefixtures("_no_import")
def test_tests_that_fail_without_a_mutant_are_found(mutants, command, tree, tmp_path):
    file = tree / "tests" / "test_counted.py"
    file.write_text(file.read_text() + "\ndef test_never():\n    assert up(0, 9) == 0\n")
    runner = importlib.import_module("runner").Runner(tree, tmp_path / "work", 1, 60.0)
    tests = [f"tests/test_counted.py::test_{name}" for name in ("up", "never")]
    same = mutants.unchanged(tree, "counted.py")
    assert command.fail_anyway(runner, same, tests) == {tests[1]}


@pytest.fixture
def measured(tmp_path: Path):
    """A map of a module whose line 1 two tests run, its own one slowly, and line 2 a third."""
    tests = {1: ["t/test_b.py::x|run", "t/test_a.py::y|run", ""], 2: ["t/test_b.py::z[1]|setup"]}

    def make(contexts=True):
        data = coverage.CoverageData(str(tmp_path / f"data {contexts}"))
        for line, ids in tests.items():
            for test in ids if contexts else [""]:
                data.set_context(test)
                data.add_lines({str(tmp_path / "a.py"): [line]})
        data.write()
        junit = tmp_path / "tests.xml"
        junit.write_text(
            '<testsuite><testcase classname="t.test_b" name="x" time="0.5"/>'
            '<testcase classname="t.test_a" name="y" time="7"/></testsuite>'
        )
        made = importlib.import_module("coverage_map").CoverageMap
        return made(tmp_path, [Path(data.data_filename())], [junit])

    return make


def test_a_mutant_meets_the_tests_that_run_its_lines_its_own_first(measured, mutants):
    covered = measured()
    one, two, whole = (
        mutants.Mutant("a.py#0", "a.py", 1, "", "", "", lines, "")
        for lines in ((1, 1), (2, 4), (0, 0))
    )
    assert covered.tests(one) == ["t/test_a.py::y", "t/test_b.py::x"]
    assert covered.tests(two) == ["t/test_b.py::z[1]"]
    assert covered.tests(whole)[0] == "t/test_a.py::y" and len(covered.tests(whole)) == 3
    assert covered.seconds == {"t/test_b.py::x": 0.5, "t/test_a.py::y": 7.0}


def test_coverage_that_names_no_tests_is_refused(measured):
    with pytest.raises(ValueError, match="names no tests: measure with --cov-context=test"):
        measured(contexts=False)


def test_own_tests_come_first_and_the_budget_holds_the_others(command):
    seconds = {"a.py::x": 1.0, "a.py::y": 2.0, "b.py::z": 5.0, "t/test_own.py::s": 90.0}
    tests = ["t/test_own.py::s", "a.py::x", "a.py::y", "b.py::z"]
    assert command.stages_of(tests, seconds, "/test_own.py", 7.0) == [
        ["t/test_own.py::s", "a.py::x", "a.py::y"]
    ]
    assert command.stages_of(tests, seconds, "/test_own.py", 8.0)[1] == ["b.py::z"]


def test_the_last_word_on_a_mutant_counts(command, tmp_path):
    mutant = {"key": "a.py#0", "file": "a.py", "line": 3, "operator": "drop"}
    mutant |= {"before": "f()", "after": "pass", "test": "", "seconds": 1.0}
    log = tmp_path / "log.jsonl"
    entries = [mutant | {"status": status} for status in ("survived", "killed")]
    log.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert command.read_log(log)["a.py#0"]["status"] == "killed"
    text = command.summary([*entries, mutant | {"status": "timeout"}])
    assert text.startswith("2 of 3 killed (66.7%)") and "a.py:3  drop: f()  ->  pass" in text
