"""Questions that the records of a run answer: its acceptance rate, and which prompts failed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from specbench_cli.errors import UsageError
from specbench_cli.store.schema import Record


def resolve_acceptance(value: str) -> str:
    """Return the acceptance rate that the value of `--acceptance` means.

    A number is returned unchanged. For the name of a run, return the rate that this run
    measured.
    """
    number = re.fullmatch(r"[-+.\d][-+.\deE]*", value)
    return value if number else f"{measure_acceptance(value):.4f}"


def measure_acceptance(name: str) -> float:
    """Return the acceptance rate in a run: accepted levels / tested levels.

    Only lossless methods that use a draft model are included.

    Args:
        name: the run's folder, or `last`.

    Raises:
        UsageError: there is no such run, or it has no such method.
    """
    from specbench_cli.store.run_dir import RunDir, find_run  # slow import, needed only here

    run = RunDir.open(find_run(name))
    drafting = {
        row["label"]
        for row in run.manifest.get("rows") or ()
        if "draft" in (row.get("uses") or ()) and not row.get("accept")
    }
    tested = accepted = 0
    for record in run.records():
        if record.label in drafting and record.steps is not None:
            tested += sum(record.steps.tested)
            accepted += sum(record.steps.accepted)
    if not tested:
        raise UsageError(
            f"--acceptance {name}: the run has no lossless method with a draft model",
            "use a number from 0 to 1, or a run of sps",
        )
    return accepted / tested


def no_output_error(path: Path) -> UsageError:
    """Return the error for a run without records. It has just begun, or its records were removed.

    Args:
        path: folder of the run.
    """
    from specbench_cli.store.manifest import RESUME_FILE

    if (path / RESUME_FILE).exists():
        hint = f"specbench run --resume {shlex.quote(str(path))}"
        return UsageError(f"{path} contains no output yet", hint)
    report = path / "report.md"
    kept = f"; its results are in {report}" if report.is_file() else ""
    return UsageError(
        f"{path} contains no output: it has no records.jsonl, or an empty one{kept}",
        "name a run with records (specbench list runs), or start a new one: specbench run",
    )


def drop_prompt_errors(records: Iterable[Record], baseline: Iterable[Record]) -> list[Record]:
    """Return the records of prompts that the model can decode.

    A prompt that the model cannot decode fails for every method. So it does not count as a failure
    of a method. Only the records of the baseline decide which prompts these are, because another
    method could fake the error.
    """
    failed = {(r.prompt_id, r.turn, r.pass_) for r in baseline if r.has_prompt_error}
    if not failed:
        return list(records)
    return [r for r in records if (r.prompt_id, r.turn, r.pass_) not in failed]
