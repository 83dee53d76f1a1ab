"""What one mutant's process does: runs chosen tests in a tree that holds the mutant."""

from __future__ import annotations

import os
import resource
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

MEMORY = 16 << 30
"""Bytes of address space: a mutant that allocates without end fails."""
WARM = """
    torch transformers transformers.models.llama.modeling_llama safetensors.torch numpy pandas
    scipy.stats pytest hypothesis hypothesis.strategies hypothesis.internal.conjecture.engine
    pydantic rich typer typer.testing jinja2 yaml psutil
""".split()
"""What is imported once, before the first fork; nothing of the project."""
ARGS = [
    *("-o", "addopts=", "--import-mode=importlib", "-x", "-q", "--no-header", "--tb=short"),
    *("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:pytest_cov"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # hypothesis is imported already
    *("-m", "not data and not gpu and not browser and not latex", "--hypothesis-seed=0"),
]


class Plugin:
    """Keeps the chosen tests alone, in their order, and tells how they go.

    A line is `> ID` as a test starts, `! ID` as it fails and `< ID` as it ends.
    """

    def __init__(self, chosen: Iterable[str], pipe: int) -> None:
        self._order = {test: at for at, test in enumerate(chosen)}
        self._pipe = pipe

    def pytest_collection_modifyitems(self, items: list) -> None:
        items[:] = [item for item in items if item.nodeid in self._order]
        items.sort(key=lambda item: self._order[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._say(">", nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._say("<", nodeid)

    def pytest_runtest_logreport(self, report: object) -> None:
        if report.failed:
            self._say("!", report.nodeid)

    def pytest_collectreport(self, report: object) -> None:
        if report.failed:
            self._say("!", f"collection of {report.nodeid}")

    def _say(self, sign: str, what: str) -> None:
        os.write(self._pipe, f"{sign} {what}\n".encode())


def main(tree: Path, stages: Sequence[Sequence[str]], pipe: int) -> None:
    """Run the stages one after another until a test fails; never returns.

    The last line written is `= CODE`, pytest's exit code.
    """
    code: int = 3
    try:
        _settle(tree)
        import pytest
        from hypothesis import Phase, settings

        # A mutant's failure need not be small, nor be remembered; a busy machine is no failure.
        settings.register_profile(
            "mutation", database=None, deadline=None, phases=[Phase.explicit, Phase.generate]
        )
        settings.load_profile("mutation")
        for chosen in stages:
            files = list(dict.fromkeys(test.split("::")[0] for test in chosen))
            where = [f"--rootdir={tree}", f"--basetemp={tree.parent / (tree.name + '.tmp')}"]
            code = int(pytest.main([*ARGS, *where, *files], plugins=[Plugin(chosen, pipe)]))
            if code:
                break
    except BaseException:  # nothing above would print it
        traceback.print_exc()
        code = 3
    finally:
        sys.stdout.flush()
        os.write(pipe, f"= {code}\n".encode())
        os._exit(0)


def _settle(tree: Path) -> None:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path[:0] = [str(tree)]
    log = os.open(tree.parent / f"{tree.name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
