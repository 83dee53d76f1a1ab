"""Content of a certificate, and reuse of a certificate instead of a new audit."""

import inspect
import json
from pathlib import Path

import pytest

from methods.sps import Sps, SpsParams
from specbench_cli.audit import certificate as module
from specbench_cli.audit.certificate import (
    VERDICTS,
    Certificate,
    certify,
    load_reusable_certificate,
)
from specbench_cli.audit.finding import COMPARISONS, Finding, Problem, format_distinct
from specbench_cli.audit.runner import CHECKS, run_checks
from specbench_cli.audit.subject import AuditSubject
from tests.audit.faults.planted import FAULTS
from tests.audit.faults.selftest import GIVEN_BY

DOCS = Path(__file__).parents[2] / "docs"


def written():
    subject = AuditSubject("sps", Sps, (SpsParams(length=2),))
    wrong = Finding(
        "distribution", False, {"cases": 1}, Problem("what", "where", "look"), left_out="1 case"
    )
    return certify(subject, [wrong, Finding("tokens", True, {"outputs": 2})], 1.5)


def test_a_certificate_contains_date_commit_version_and_comparisons():
    facts = json.loads(json.dumps(written().to_dict()))
    assert facts["date"].endswith("+00:00")
    assert facts["commit"] == module.read_commit()
    assert facts["versions"]["specbench-cli"]
    distribution, tokens = facts["checks"]
    assert (distribution["compares"], distribution["bound"]) == COMPARISONS["distribution"]
    assert (distribution["left_out"], tokens["left_out"]) == ("1 case", "")


def test_a_certificate_is_read_as_it_was_written(tmp_path, monkeypatch):
    file = tmp_path / "sps.json"
    file.write_text(json.dumps(written().to_dict()))
    read = load_reusable_certificate(file, Sps)
    assert json.dumps(read.to_dict()) == json.dumps(json.loads(file.read_text()))
    assert read.findings[0].problem == Problem("what", "where", "look")
    monkeypatch.setattr(module, "hash_audit_code", lambda: "other code")
    assert load_reusable_certificate(file, Sps) is None


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"checks": 1}', '{"schema": 1, "method": "sps"}']
)
def test_a_file_that_is_not_a_certificate_is_not_reused(text, tmp_path):
    file = tmp_path / "sps.json"
    file.write_text(text)
    assert load_reusable_certificate(file, Sps) is None
    assert load_reusable_certificate(tmp_path / "none.json", Sps) is None


def test_the_certificates_page_names_every_field_check_and_verdict():
    page = (DOCS / "reference/certificate.md").read_text()
    fields = {*written().to_dict(), *written().to_dict()["checks"][0]}
    assert [field for field in fields if f"`{field}`" not in page] == []
    rows = [f"| `{name}` | {what} | {bound} |" for name, (what, bound) in COMPARISONS.items()]
    rows += [f"| {name} | {what} |" for name, what in VERDICTS.items()]
    assert [row for row in rows if row not in page] == []


def test_every_finding_names_what_it_compares():
    assert COMPARISONS.keys() == {*CHECKS, *GIVEN_BY}


def test_the_audit_page_counts_the_planted_faults():
    assert (
        f"`python -m tests.audit.faults` plants {len(FAULTS)} faults"
        in (DOCS / "explanations/audit.md").read_text()
    )


def test_different_numbers_are_written_with_enough_decimals():
    assert format_distinct(0.1048, 0.0394) == ("0.1048", "0.0394")
    assert format_distinct(0.123456789, 0.123456788) == ("0.123456789", "0.123456788")
    assert format_distinct(12345.0, 12346.0) == ("12345.0000", "12346.0000")


class Unreadable(Sps):
    """Method that reports an outcome that the audit cannot read."""

    def generate(self, session):
        yield from super().generate(session)
        yield None


def test_an_error_in_the_audits_own_code_is_reported_as_one():
    subject = AuditSubject("sps", Unreadable, (SpsParams(length=2),))
    (found,) = run_checks(subject, {"order": CHECKS["order"]})
    assert found.crashed
    assert found.problem.what.startswith("the audit's own code raises AttributeError")
    assert found.problem.where.startswith("tokens.py:")
    assert "report it" in found.problem.look


class Misuses(Sps):
    """Method that passes a wrong type to torch."""

    def propose(self, session, limit):
        return session.chain([[1], [1, 2]])


def test_an_error_that_a_method_causes_names_the_methods_line():
    subject = AuditSubject("sps", Misuses, (SpsParams(length=2),))
    (found,) = run_checks(subject, {"tokens": CHECKS["tokens"]})
    line = inspect.getsourcelines(Misuses.propose)[1] + 1
    assert found.problem.where == f"test_certificate.py:{line}, while checking: tokens"


def test_certificates_have_all_fields_of_their_facts():
    assert set(Certificate.__slots__) - {"findings"} < set(written().to_dict())
