"""Files of a recommendation: the journal, with which it can be resumed, and the result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specbench_cli import files, output
from specbench_cli.config import permission
from specbench_cli.config.problems import format_first_problem
from specbench_cli.config.run import MethodChoice, RunConfig
from specbench_cli.errors import FULL, UsageError
from specbench_cli.measure.redaction import redact_paths
from specbench_cli.store.run_dir import MOST_BYTES

FILE = ".recommendation.resume.json"
"""File with the journal (request and progress). Each round is a run in a subfolder.

The journal may contain paths of this machine, so it is removed once the result is written.
"""

RESULT = "recommendation.json"
"""File with the recommendation, in the format of `--json`."""

_ANEW = "start again: specbench recommend"


class SearchRound(BaseModel):
    """A round of the search that was started.

    rows: labels of the candidates.
    prompts: ids of the prompts.
    limit_s: time limit of the round in seconds.
    seconds: duration of the round in seconds; None until the round is finished.
    """

    model_config = ConfigDict(extra="forbid")

    rows: list[str]
    prompts: list[str]
    limit_s: float
    seconds: Annotated[float, Field(ge=0)] | None = None


class Journal(BaseModel):
    """Request and progress of a recommendation.

    minutes: time budget in minutes.
    config: configuration of all rounds. Its methods are the candidates.
    sources: source of each value of the configuration.
    waves: labels of the candidates in the order of trial.
    left_out: methods that cannot run on this machine, with the reason.
    search, held_out: ids of the prompts for the search and for the confirmation, in the order of
        use.
    rounds: folder name -> round.
    """

    model_config = ConfigDict(extra="forbid")

    schema_: Literal[1] = Field(1, alias="schema")
    version: str
    created_utc: str
    minutes: float
    config: RunConfig
    sources: dict[str, str]
    waves: list[list[str]]
    left_out: dict[str, str]
    search: list[str]
    held_out: list[str]
    rounds: dict[str, SearchRound] = {}

    def choice(self, label: str) -> MethodChoice:
        """Return the configuration of a candidate."""
        return next(each for each in self.config.methods if each.label == label)

    def write(self, folder: Path) -> None:
        """Replace the journal in a folder atomically. Raise OSError if it cannot be written."""
        document = self.model_dump_json(indent=2, by_alias=True)
        files.replace(folder / FILE, output.escape_json(document) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Journal:
        """Read the journal in a folder. Raise UsageError if it is missing or damaged."""
        file = folder / FILE
        try:
            return cls.model_validate_json(files.read_text(file, MOST_BYTES))
        except FileNotFoundError as error:
            raise UsageError(
                f"{folder} contains no recommendation: it has no {FILE}", "specbench recommend"
            ) from error
        except ValidationError as error:
            raise UsageError(f"{file} is damaged: {format_first_problem(error)}", _ANEW) from error
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{file} cannot be read: {error}", _ANEW) from error


def create(folder: Path, journal: Journal) -> None:
    """Create the folder of a recommendation.

    Raises:
        UsageError: the folder is not empty, or cannot be written.
        OSError: the disk is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            held = any((folder / name).is_file() for name in (FILE, RESULT))
            raise UsageError(
                f"{folder} {'already contains a recommendation' if held else 'is not empty'}",
                f"specbench recommend --resume {folder}, or choose another --out"
                if held
                else "choose a new or empty folder with --out",
            )
        journal.write(folder)
        # The user started this recommendation. Store that it is permitted, so that resuming needs
        # no further permission.
        permission.permit(permission.collect_requests(journal.config, folder / FILE))
    except OSError as error:
        if error.errno in FULL:
            raise
        raise UsageError(
            f"cannot write to {folder}: {error.strerror}", "choose another --out"
        ) from error


def finish(folder: Path, result: Mapping[str, Any]) -> None:
    """Write the result, without paths of this machine, and remove the journal.

    Raises:
        OSError: the result cannot be written.
    """
    text = json.dumps(_public(result), indent=2, allow_nan=False)
    files.write_own(folder / RESULT, text + "\n", _is_result)
    files.remove_own(folder / FILE, _is_journal)


def read_result(folder: Path) -> dict[str, Any] | None:
    """Read the result in the folder of a recommendation; None if there is no result yet.

    Raises:
        UsageError: the result cannot be read.
    """
    try:
        found: dict[str, Any] = json.loads(files.read_text(folder / RESULT, MOST_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder / RESULT} is damaged: {error}", _ANEW) from error
    return found


def discard(folder: Path) -> None:
    """Remove the folder of a recommendation if none of its rounds was started."""
    if [each.name for each in folder.iterdir()] == [FILE]:
        files.remove_own(folder / FILE, _is_journal)
        with suppress(OSError):
            folder.rmdir()


def _is_journal(content: bytes) -> bool:
    """Return True if the content is the journal of a recommendation."""
    try:
        Journal.model_validate_json(content)
    except ValidationError:
        return False
    return True


def _is_result(content: bytes) -> bool:
    """Return True if the content is the result of a recommendation."""
    return "header" in files.json_object(content)


def _public(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _public(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_public(part) for part in value]
    return redact_paths(value) if isinstance(value, str) else value
