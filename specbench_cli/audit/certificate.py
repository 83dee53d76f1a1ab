"""Certificates: JSON files with the results of a method's audit, its verdict and code version."""

from __future__ import annotations

import hashlib
import inspect
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, get_args

from specbench_cli import __version__, files
from specbench_cli.audit.finding import COMPARISONS, DECLARATIONS, Finding, Problem
from specbench_cli.audit.subject import AuditSubject, format_params
from specbench_cli.config import plugin_file
from specbench_cli.engine.method import Method
from specbench_cli.engine.types import Rule
from specbench_cli.former_names import CHECKS
from specbench_cli.measure import environment
from specbench_cli.store.schema import LOSSLESS

SCHEMA = 1

VERDICTS = {
    "PASSED": "all checks passed",
    "BROKEN": "its output violates its guarantee",
    "MISDECLARED": "its code contradicts the declarations of its class",
    "FAULTY": "its outputs are right, but its states, counters, timing or acceptance are wrong",
    "NOT SHOWN": "no case could test its guarantee; all other checks passed",
    "NO CLAIM": "it guarantees nothing about its output; all possible checks passed",
    "AGREES": "a method of another program; its outputs equal the target's",
    "DIFFERS": "a method of another program; its outputs differ from the target's",
}
"""Verdicts and their meanings."""

FAILED_VERDICTS = ("BROKEN", "MISDECLARED", "FAULTY", "NOT SHOWN")
"""Verdicts that give exit code 1 and mark a method as broken in reports."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """Result of the audit of a method.

    Attributes:
        method: name of the method.
        version: version of the Python package that it is from; None for a plug-in file.
        source, sha256: file of the method, as a path inside its package, and its hash.
        guarantee: guarantee of the method by decoding rule.
        variants: parameters that it was audited with.
        versions: versions of Python and the libraries.
        verdict: one of `VERDICTS`.
        findings: results of the checks.
        seconds: total time of the checks.
        date: end of the audit, in UTC.
        commit: commit of the checkout that the audit ran from, with "+changes" appended if files
            differ from it. None for an installed package.
        code_sha256: hash of all Python files of the audit, the engine and the methods.
    """

    method: str
    version: str | None
    source: str
    sha256: str
    guarantee: dict[str, str]
    variants: tuple[str, ...]
    versions: dict[str, str]
    verdict: str
    findings: tuple[Finding, ...]
    seconds: float
    date: str
    commit: str | None
    code_sha256: str

    @property
    def passed(self) -> bool:
        """True if the verdict gives exit code 0."""
        return self.verdict not in FAILED_VERDICTS

    def to_dict(self) -> dict[str, Any]:
        """Return the certificate as a JSON object, without paths of this machine."""
        facts = {"schema": SCHEMA, **asdict(self)}
        facts["checks"] = facts.pop("findings")
        for check in facts["checks"]:
            check["seconds"] = round(check["seconds"], 3)
            check["compares"], check["bound"] = COMPARISONS.get(check["check"], ("", ""))
        facts["seconds"] = round(self.seconds, 3)
        return facts

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Certificate:
        """Return the certificate of a JSON object.

        Raises:
            KeyError, TypeError: the object does not follow this schema.
        """
        rest = {name: facts[name] for name in cls.__slots__ if name != "findings"}
        known = Finding.__slots__
        findings = []
        for check in facts["checks"]:
            values = {name: value for name, value in check.items() if name in known}
            problem = values.get("problem")
            values["check"] = CHECKS.get(values["check"], values["check"])
            values["problem"] = None if problem is None else Problem(**problem)
            findings.append(Finding(**values))
        rest["variants"] = tuple(rest["variants"])
        return cls(**rest, findings=tuple(findings))


def load_reusable_certificate(file: Path, method: type[Method]) -> Certificate | None:
    """Return the certificate in a file if the method and the code are unchanged, else None."""
    try:
        certificate = Certificate.from_dict(json.loads(files.read_text(file, 16 * files.MB)))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    same = certificate.sha256 == _sha256(Path(inspect.getfile(method)))
    return certificate if same and certificate.code_sha256 == hash_audit_code() else None


def certify(subject: AuditSubject, findings: Sequence[Finding], seconds: float) -> Certificate:
    """Return a certificate with the findings of an audit."""
    method = subject.method
    file = Path(inspect.getfile(method))
    default = method(subject.variants[0])
    return Certificate(
        method=subject.name,
        version=_package_version(method),
        source=_package_path(file, method),
        sha256=_sha256(file),
        guarantee={rule: default.guarantee(rule) for rule in get_args(Rule)},
        variants=tuple(map(format_params, subject.variants)),
        versions={
            "python": platform.python_version(),
            "specbench-cli": __version__,
            "torch": metadata.version("torch"),
            "transformers": metadata.version("transformers"),
        },
        verdict=_decide_verdict(subject, findings),
        findings=tuple(findings),
        seconds=seconds,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=read_commit(),
        code_sha256=hash_audit_code(),
    )


@cache
def read_commit() -> str | None:
    """Return the commit of this checkout, with "+changes" if files differ. None: no checkout."""
    found = environment.git()
    return None if found is None else found["commit"] + "+changes" * found["dirty"]


@cache
def hash_audit_code() -> str:
    """Return the SHA-256 of all code that a certificate depends on."""
    root = Path(__file__).parents[2]
    whole = hashlib.sha256()
    for folder in ("specbench_cli/audit", "specbench_cli/engine", "methods"):
        for file in sorted((root / folder).rglob("*.py")):
            whole.update(f"{file.relative_to(root).as_posix()} {_sha256(file)}\n".encode())
    return whole.hexdigest()


def _sha256(file: Path) -> str:
    return hashlib.sha256(plugin_file.content(file)).hexdigest()


def _decide_verdict(subject: AuditSubject, findings: Sequence[Finding]) -> str:
    failed = [finding for finding in findings if not finding.passed]
    if subject.method.peer:
        return "DIFFERS" if failed else "AGREES"
    if any(finding.checks_guarantee and finding.shown for finding in failed):
        return "BROKEN"
    if any(finding.check == DECLARATIONS for finding in failed):
        return "MISDECLARED"  # other failures may follow from a wrong declaration
    if any(finding.shown for finding in failed):
        return "FAULTY"
    if failed:
        return "NOT SHOWN"
    default = subject.method(subject.variants[0])
    claims = any(default.guarantee(rule) in LOSSLESS for rule in get_args(Rule))
    return "PASSED" if claims else "NO CLAIM"


def _package_path(file: Path, method: type[Method]) -> str:
    """Return the file's path inside its top-level package, or its name if it is in none."""
    depth = method.__module__.count(".")
    module = sys.modules[method.__module__]
    return "/".join(file.parts[-1 - depth :]) if module.__spec__ and depth else file.name


def _package_version(method: type[Method]) -> str | None:
    package = method.__module__.partition(".")[0]
    if package == "methods":
        return __version__
    named = metadata.packages_distributions().get(package)
    return metadata.version(named[0]) if named else None
