"""`specbench audit`: check the guarantees of methods on small models."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from specbench_cli import files, output, registry
from specbench_cli.config import plugin_file
from specbench_cli.config.options import parsed_command
from specbench_cli.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from specbench_cli.audit.certificate import Certificate
    from specbench_cli.config.commands import AuditOptions

EXAMPLES = (
    "specbench audit sps",
    "specbench audit --all",
    "specbench audit --all --resume",
    "specbench audit --plugin my_method.py",
    "specbench audit sps pld --json --out certificates",
)
EPILOG = "\n\n".join(
    (
        "Examples:",
        *EXAMPLES,
        "Verdicts with exit code 0: PASSED; NO CLAIM: a lossy method, all possible checks passed;"
        " AGREES or DIFFERS: a method of another program, whose outputs equal the target's or not.",
        "Verdicts with exit code 1: BROKEN: the output violates the method's guarantee;"
        " MISDECLARED: the class declares what the code does not do; FAULTY: outputs are right, but"
        " states, counters, timing or acceptance are wrong; NOT SHOWN: no case could test the"
        " guarantee.",
    )
)


@parsed_command("specbench_cli.config.commands:AuditOptions")
def audit(options: AuditOptions) -> ExitCode:
    """Check on small models that methods keep their promises, such as lossless output.

    Most checks use toy models, whose next-token probabilities are a small table. All random
    outcomes of a method can then be enumerated, which gives the exact distribution of its output.
    Greedy and coupled outputs (see --verify of `specbench run`), caches, counters and acceptance
    are checked with these models and with a tiny Llama.
    """
    names = _select_methods(options.methods, options.every, options.plugins)
    from specbench_cli.judge.broken import CERTIFICATES

    folder = options.out or CERTIFICATES
    done = _load_unchanged(names, folder) if options.resume else []
    unchanged = {certificate.method for certificate in done}
    due = [name for name in names if name not in unchanged]
    for name in due:
        files.check_listed(_certificate_path(folder, name), overwrite=options.overwrite)
    if done:
        output.note(
            f"{len(done)} of {len(names)} certificates in {folder} are up to date: audit skipped"
        )
    for certificate in done if options.as_json else ():
        output.json_line(certificate.to_dict())
    done += _run_audits(due, folder, options, total=len(names))
    if not options.as_json:
        from specbench_cli.report.terminal.certificates import print_certificates

        print_certificates(sorted(done, key=lambda certificate: names.index(certificate.method)))
    return ExitCode.OK if all(c.passed for c in done) else ExitCode.BAD_ANSWER


def _run_audits(
    due: list[str], folder: Path, options: AuditOptions, total: int
) -> list[Certificate]:
    """Audit methods. As soon as a method's certificate is ready, store it and print it.

    Args:
        due: names of the methods to audit.
        folder: output folder of the certificates.
        total: number of selected methods, including those with an unchanged certificate, which are
            not audited again.
    """
    from specbench_cli.audit.runner import audit_all

    start, made = time.monotonic(), []
    for n, certificate in enumerate(audit_all(due, options.plugins), start=1):
        made.append(certificate)
        _write(certificate, folder, options.overwrite)
        left = (time.monotonic() - start) / n * (len(due) - n)
        finished = total - len(due) + n
        progress = (
            f" ({finished} of {total}, about {_format_duration(left)} left)" if n < len(due) else ""
        )
        if options.as_json:
            output.json_line(certificate.to_dict())
        else:
            output.note(
                f"{certificate.method}: {certificate.verdict} in {certificate.seconds:.1f} s"
                f"{progress}"
            )
    return made


def _select_methods(methods: list[str], every: bool, plugins: list[str]) -> list[str]:
    """Return the canonical names of the methods to audit, without duplicates."""
    for file in plugins:
        if Path(file).is_file():
            plugin_file.pin(file)  # child processes then run the same content
    plugin_methods = [name for file in plugins for name in registry.load_plugin(file)]
    known = registry.entries()
    own = [name for name, entry in known.items() if entry.baseline == "vanilla"]
    if every:
        if methods:
            raise UsageError("--all audits every method: omit the names", "specbench audit --all")
        return own
    words = [word for given in methods for word in given.split(",") if word.strip()]
    names = [registry.resolve(word) for word in words] or plugin_methods
    if not names:
        raise UsageError("no method to audit", "specbench audit METHOD, --all or --plugin FILE")
    if elsewhere := [name for name in names if name not in own]:
        raise UsageError(
            f"{', '.join(elsewhere)} uses another engine, which has none of the audit's models",
            "specbench run compares each of its outputs with vanilla's",
        )
    return list(dict.fromkeys(names))


def _load_unchanged(names: list[str], folder: Path) -> list[Certificate]:
    """Return the stored certificates of those methods whose code has not changed since."""
    from specbench_cli.audit.certificate import load_reusable_certificate

    found = (
        load_reusable_certificate(_certificate_path(folder, name), registry.load(name))
        for name in names
    )
    return [certificate for certificate in found if certificate is not None]


def _format_duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def _certificate_path(folder: Path, method: str) -> Path:
    """Return the path of a method's certificate."""
    return folder / f"{method.replace(':', '-')}.json"


def _write(certificate: Certificate, folder: Path, overwrite: bool) -> None:
    import json

    try:
        text = json.dumps(certificate.to_dict(), indent=2) + "\n"
        files.write_listed(_certificate_path(folder, certificate.method), text, overwrite=overwrite)
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}") from error
