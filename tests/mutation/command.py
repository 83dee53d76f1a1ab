"""Mutation testing: changes code in small ways, and sees whether a test fails.

    COVERAGE_FILE=DATA python -m pytest -n 2 --cov=specbench_cli --cov-context=test --cov-report= \\
        --junitxml=XML tests/engine ...
    python tests/mutation --coverage DATA --junit XML --log LOG.jsonl --work FOLDER FILE...

The first command measures which tests run which lines (it needs pytest-cov; with `-n 0` the tests'
names get lost). The second one takes a sample of all mutants of the files. Each mutant goes into a
copy of the tree under FOLDER and meets the tests that run its lines: those of its own test module,
then the fast ones, until one fails. LOG gets a line for each; a second call goes on where the first
one ended, and with `--again survived` runs those anew that no test failed for.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import child
from coverage_map import CoverageMap
from mutants import Mutant, all_mutants, sample, unchanged
from runner import Result, Runner, Work

ROOT = Path(__file__).parents[2]
FIRST_STAGES = (4.0, 30.0)
"""Seconds of tests, as measured, that the first stages hold; the last one holds the others."""


def main() -> None:
    """Run as the module's docstring says."""
    given = _arguments()
    os.environ["OMP_NUM_THREADS"] = "1"
    files = [file.resolve().relative_to(given.root).as_posix() for file in given.files]
    found = all_mutants(given.root, files)
    chosen = sample(found, given.sample, given.seed)
    _say(f"{len(chosen)} of {len(found)} mutants of {len(files)} files, seed {given.seed}")
    known = read_log(given.log)
    again = {None, *given.again}
    todo = [mutant for mutant in chosen if _status(known, mutant) in again]
    if todo and not given.report:
        covered = CoverageMap(given.root, given.coverage, given.junit)
        for name in child.WARM:
            importlib.import_module(name)
        runner = Runner(given.root, given.work, given.jobs, given.silence)
        with given.log.open("a", encoding="utf-8") as log:
            for result in _results(runner, todo, covered, given.budget):
                entry = known[result.mutant.key] = _entry(result)
                log.write(json.dumps(entry) + "\n")
                log.flush()
        wrong = fail_anyway(runner, unchanged(given.root, files[0]), _killers(known.values()))
        _say("".join(f"fails without a mutant too: {test}\n" for test in sorted(wrong)))
    entries = [known[mutant.key] for mutant in chosen if _status(known, mutant) is not None]
    _say(summary(entries))


def stages_of(
    tests: Sequence[str], seconds: dict[str, float], own: str, budget: float
) -> list[list[str]]:
    """Ordered tests in stages, those of one module together; as many as the budget has time for.

    Args:
        seconds: how long each test takes.
        own: the end of the path of the module whose tests are all in the first stage.
        budget: seconds of all stages together, the own tests' not counted.
    """
    stages: list[list[str]] = [[] for _ in range(len(FIRST_STAGES) + 1)]
    spent = 0.0
    for test in tests:
        if own in test:
            stages[0].append(test)
            continue
        spent += seconds.get(test, 0.0)
        if spent > budget:
            break
        stages[sum(spent > limit for limit in FIRST_STAGES)].append(test)
    return [_by_module(stage) for stage in stages if stage]


def _by_module(tests: Sequence[str]) -> list[str]:
    modules: dict[str, list[str]] = {}
    for test in tests:
        modules.setdefault(test.split("::")[0], []).append(test)
    return [test for module in modules.values() for test in module]


def fail_anyway(runner: Runner, same: Mutant, tests: Iterable[str]) -> set[str]:
    """Those of the tests that fail where nothing is changed: what they killed may be alive."""
    left, wrong = sorted(tests), set()
    while left:
        (result,) = runner.run([(same, [left])])
        if result.status == "survived":
            break
        if result.test not in left:
            raise RuntimeError(f"unchanged code could not be tested: {result}")
        wrong.add(result.test)
        left = [test for test in left if test != result.test]
    return wrong


def read_log(path: Path) -> dict[str, dict[str, object]]:
    """The last entry of each mutant."""
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    return {entry["key"]: entry for entry in map(json.loads, lines)}


def summary(entries: Sequence[dict[str, object]]) -> str:
    """Counts by status, the rate, and every mutant that no test failed for."""
    counts = Counter(entry["status"] for entry in entries)
    killed = sum(counts[status] for status in ("killed", "timeout", "crash"))
    lines = [f"{killed} of {len(entries)} killed ({killed / max(len(entries), 1):.1%}): {counts}"]
    lines += [
        f"{entry['status']}  {entry['file']}:{entry['line']}  {entry['operator']}: "
        f"{entry['before']}  ->  {entry['after']}"
        for entry in sorted(entries, key=lambda entry: (entry["file"], entry["line"]))
        if entry["status"] in ("survived", "uncovered", "error")
    ]
    return "\n".join(lines)


def _results(
    runner: Runner, todo: Sequence[Mutant], covered: CoverageMap, budget: float
) -> Iterator[Result]:
    work: list[Work] = []
    for mutant in todo:
        tests = covered.tests(mutant)
        own = f"/test_{Path(mutant.file).stem}.py"
        stages = stages_of(tests, covered.seconds, own, budget)
        if stages:
            work.append((mutant, stages))
        else:
            yield Result(mutant, "uncovered", "", 0.0)
    yield from runner.run(work)


def _entry(result: Result) -> dict[str, object]:
    mutant = result.mutant
    names = ("key", "file", "line", "operator", "before", "after")
    seconds = round(result.seconds, 1)
    told = {"status": result.status, "test": result.test, "seconds": seconds}
    return {name: getattr(mutant, name) for name in names} | told


def _killers(entries: Iterable[dict[str, object]]) -> set[str]:
    """The tests that failed, by name."""
    tests = {str(entry["test"]) for entry in entries if entry["status"] == "killed"}
    return {test for test in tests if "::" in test}


def _status(known: dict[str, dict[str, object]], mutant: Mutant) -> object:
    entry = known.get(mutant.key, {})
    same = (entry.get("before"), entry.get("after")) == (mutant.before, mutant.after)
    return entry.get("status") if same else None


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python tests/mutation", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree to take copies of")
    parser.add_argument("--coverage", type=Path, nargs="+", required=True, metavar="DATA")
    parser.add_argument("--junit", type=Path, nargs="*", default=[], metavar="XML")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--sample", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of tests for a mutant")
    parser.add_argument("--silence", type=float, default=60.0, help="seconds that are a hang")
    parser.add_argument("--again", nargs="*", default=[], metavar="STATUS", help="run these anew")
    parser.add_argument("--report", action="store_true", help="run nothing")
    given = parser.parse_args()
    given.root, given.work = given.root.resolve(), given.work.resolve()
    return given


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    main()
