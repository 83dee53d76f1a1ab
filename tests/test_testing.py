"""Tests of `specbench_cli.testing`, which authors use to test their plug-ins."""

import re
from pathlib import Path

import pytest

from methods.pld import Pld
from specbench_cli import registry
from specbench_cli.api import Draft, Session, Tokens
from specbench_cli.audit.checks import bookkeeping
from specbench_cli.audit.runner import CHECKS as AUDIT_CHECKS
from specbench_cli.errors import UsageError
from specbench_cli.testing import CHECKS, check, few_cases

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs/how-to/methods.md").read_text(encoding="utf-8")


class KeepsRejectedTokens(Pld):
    """A faulty method whose draft model keeps rejected tokens in its cache."""

    needs = frozenset({"draft"})

    def start(self, session: Session) -> None:
        super().start(session)
        self.model = session.draft()
        self.state = session.new_state(self.model)

    def propose(self, session: Session, limit: int) -> Draft:
        picks, x = [], session.pending_tokens(self.state.length())
        for ahead in range(min(2, limit)):
            picks.append(session.pick(self.model.forward(x, self.state), ahead))
            x = Tokens(picks[-1][0][None])
        return session.chain_of_picks(picks)


def test_its_checks_are_those_of_the_audit():
    assert tuple(AUDIT_CHECKS) == CHECKS


def test_a_fault_is_reported_with_what_where_and_look():
    with pytest.raises(AssertionError) as failed:
        check(KeepsRejectedTokens, "states")
    lines = str(failed.value).splitlines()
    assert lines[0] == "pld fails 'states'"
    assert [line.split()[0] for line in lines[1:4]] == ["what", "where", "look"]


def test_the_test_on_the_page_works(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_plugin_methods", {})
    monkeypatch.chdir(tmp_path)
    (plugin,) = re.findall(r"<!-- plugin -->\n```python\n(.*?)```", README, re.DOTALL)
    Path("repeat_last.py").write_text(plugin)
    (code,) = re.findall(r"<!-- tests of a plug-in -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    names = {}
    exec(code, names)  # noqa: S102
    test = names["test_repeat_last"]
    assert test.pytestmark[0].args == ("name", CHECKS)
    test("tokens")


def test_a_name_and_a_class_are_checked_as_well_as_a_file():
    assert check("pld", "recurrent") == check(Pld, "recurrent")


def test_an_unknown_check_or_method_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_plugin_methods", {})
    with pytest.raises(UsageError, match="unknown check 'distributions'"):
        check("pld", "distributions")
    with pytest.raises(UsageError, match="there is no method 'pldd'; did you mean 'pld'"):
        check("pldd", "distribution")
    text = "from specbench_cli.api import Method\n"
    for name in ("One", "Two"):
        text += f"class {name}(Method):\n    def propose(self, session, limit): ...\n"
    (tmp_path / "two.py").write_text(text)
    with pytest.raises(UsageError, match="defines several methods: one, two"):
        check(tmp_path / "two.py", "distribution")


def test_few_cases_reduces_the_cases_inside_the_context():
    before = bookkeeping.CASES
    with few_cases():
        assert before > bookkeeping.CASES
    assert before == bookkeeping.CASES
