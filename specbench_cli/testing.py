"""Support for tests of plug-ins with pytest: run each check of `specbench audit` as a test.

    import pytest
    from specbench_cli.testing import CHECKS, check

    @pytest.mark.parametrize("name", CHECKS)
    def test_it_is_exact(name):
        check("my_method.py", name)

docs/how-to/methods.md explains what each check proves.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from specbench_cli import registry
from specbench_cli.config import plugin_file
from specbench_cli.errors import UsageError

if TYPE_CHECKING:
    from specbench_cli.audit.finding import Finding
    from specbench_cli.engine.method import Method

CHECKS = (
    "declarations",
    "distribution",
    "tokens",
    "grammar",
    "order",
    "batch",
    "states",
    "recurrent",
    "twin draft",
    "generator",
    "model",
    "embedded",
)
"""Names of checks for `check`. The table in docs/how-to/methods.md explains each of them."""


def check(
    method: str | os.PathLike[str] | type[Method], name: str, *, whole: bool = False
) -> list[Finding]:
    """Run one check of the audit on a method. Raise AssertionError if the method fails it.

    Args:
        method: A plug-in file that defines one method, the name of a registered method, or a class.
        name: One of `CHECKS`.
        whole: True checks as many cases as `specbench audit`, where all checks take a minute. False
            checks fewer cases and takes seconds.

    Returns:
        The findings, with their figures.

    Raises:
        AssertionError: the method fails. The message says what is wrong, for which case, and where
            in the code to look.
        UsageError: the check, file or method is unknown, or the file defines several methods.
    """
    from specbench_cli.audit.runner import CHECKS as KNOWN
    from specbench_cli.audit.runner import run_checks
    from specbench_cli.audit.subject import AuditSubject

    if name not in KNOWN:
        raise UsageError(f"unknown check {name!r}", f"one of {', '.join(CHECKS)}")
    kind = registry.load(_load_method(method)) if not isinstance(method, type) else method
    with nullcontext() if whole else few_cases():
        found = run_checks(AuditSubject.from_method(kind.name, kind), {name: KNOWN[name]})
    wrong = [each for each in found if not each.passed]
    if wrong:
        raise AssertionError(
            "\n".join(f"{kind.name} fails {each.check!r}\n{each.problem}" for each in wrong)
        )
    return found


def _load_method(method: str | os.PathLike[str]) -> str:
    """Return the name of a method: a registered one, or the one that a plug-in file defines."""
    path = Path(method)
    if path.suffix != ".py":
        return registry.resolve(os.fspath(method))
    plugin_file.unpin_all()
    names = registry.load_plugin(str(path))
    if len(names) != 1:
        raise UsageError(
            f"{path} defines several methods: {', '.join(names)}", "check each by its name"
        )
    return names[0]


@contextmanager
def few_cases() -> Iterator[None]:
    """Reduce the number of cases of the audit's checks within the `with` block."""
    from specbench_cli.audit.cases import wide_case

    checks: dict[str, dict[str, Any]] = {
        "distribution": {
            "OUTCOME_BUDGET": {"rejection": 150, "block": 40},
            "DEEP_BUDGET": {"rejection": 50, "block": 50},
            "LATE_BUDGET": {"rejection": 150},
            "MAX_OUTCOMES": 128,  # enough for drafts of two tokens on disjoint tables
            "wide_case": partial(wide_case, vocab=64),
        },
        "sampled": {"TOKENS": 200, "REDRAWN_TOKENS": 40},
        "tokens": {
            "CASES": 24,
            "MIN_CASES": 4,
            "CASES_PER_CHANGE": 1,
            "LONG_VARIANTS": 1,
            "MIN_PROMPTS": 5,
            "FULL_VARIANTS": 1,
            "FEW_PROMPTS": 2,
        },
        "grammar": {"CASES": 3, "VARIANTS": 2},
        "bookkeeping": {
            "CASES": 2,
            "CASES_PER_CHANGE": 1,
            "MAX_LEVELS": 12,
            "DRAFTS_PER_OUTPUT": 2,
            "RULES": ("coupled", "rejection"),
        },
        "bounds": {"TABLES_PER_RULE": 1, "PEAKED_TABLES": 1},
        "embedded": {"TOKENS": 80},
    }
    with ExitStack() as stack:
        for name, settings in checks.items():
            module = importlib.import_module(f"specbench_cli.audit.checks.{name}")
            stack.enter_context(patch.multiple(module, **settings))
        yield
