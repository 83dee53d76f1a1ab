"""`specbench doctor`: check that the default run works on this machine, and suggest fixes."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from specbench_cli import __version__, output
from specbench_cli.config.options import parsed_command
from specbench_cli.errors import ExitCode

if TYPE_CHECKING:
    from specbench_cli.config.commands import DoctorOptions
    from specbench_cli.measure.health import HealthCheck

EXAMPLES = ("specbench doctor", "specbench doctor --json")
EPILOG = "\n\n".join(("Examples:", *EXAMPLES))


@parsed_command("specbench_cli.config.commands:DoctorOptions")
def doctor(options: DoctorOptions) -> ExitCode:
    """Check the installation, devices, background load, data and models, and suggest fixes.

    Exit code: 0 if the default run works on this machine, 3 if not.
    """
    checks = _checks()
    works = not any(check.fatal for check in checks)
    if options.as_json:
        output.json_line(
            {"specbench": __version__, "works": works, "checks": [_facts(c) for c in checks]}
        )
    else:
        _show(checks, works)
    return ExitCode.OK if works else ExitCode.ENVIRONMENT


def _checks() -> list[HealthCheck]:
    from specbench_cli.measure import assets, health
    from specbench_cli.store.run_dir import RUNS

    call = assets.HubCall()  # it waits for the reply while the other checks run
    checks = [
        *health.check_software(),
        *health.check_hardware(),
        health.check_kernels(),
        health.check_compiler(),
        health.check_writable(RUNS),
        *assets.check_models(),
        health.check_noise(),
    ]
    hub = call.check()
    return [*checks, hub, *assets.check_tasks(hub.status == "ok")]


def _facts(check: HealthCheck) -> dict[str, object]:
    """Return the fields of a check. Leave out the consequences and the fix of a passed check."""
    facts = asdict(check)
    return facts | ({"prevents": None, "mend": None} if check.status == "ok" else {})


def _show(checks: list[HealthCheck], works: bool) -> None:
    """Print the checks as a table. On a terminal, print the fixes below it."""
    facts = [_facts(check) for check in checks]
    if not output.is_interactive():
        output.rows(facts, ("name", "status", "found", "prevents", "mend"))
    else:
        output.rows(facts, ("name", "status", "found"))
        width = output.console(stderr=False).width
        for check in checks:
            if check.status != "ok":
                problem, fix = f"{check.name}: affects {check.prevents}", f"fix: {check.mend}"
                lines = [*output.wrap(problem, width), *output.wrap(fix, width, "  ", "    ")]
                output.data("\n".join(["", *lines]))
        output.data("")
    if not works:
        output.note("the default run does not work: fix the problems above first")
    elif any(check.name == "quietness" and check.status != "ok" for check in checks):
        output.note(
            "the default run works, but other programs would disturb its timings now: see quietness"
        )
    else:
        output.note("the default run works: specbench run")
