"""Baseline files with the data of runs that a comparison needs, small enough to be committed.

`results/baselines/NAME/<machine id>.json` has digests, counters and times, but no texts, tokens or
paths. A baseline can have several runs of one program version. The file is JSON with one output per
line, so that `git diff` is readable:

    [prompt, turn, label, pass, seed, ids, finish, verdict, error, [counters], run, run ...]

Counters are in the order of `compared_output.Counters`. `pass` is the index of the repeat, and
`ids` is a digest of the token ids. Each `run` entry is a list with the times of the output in that
run, in the order of `compared_output.Times`. The entry is null if the time is noisy or the output
failed. The output of a later run can differ from the output of the first run, because steps can
depend on timing. Then the entry is an object with the ids, counters and times of the later run.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, core_schema
from typing_extensions import TypedDict

from specbench_cli import files
from specbench_cli.comparison.baselines.join import join_runs
from specbench_cli.comparison.compared_output import ComparedOutput, Counters, PairKey, Times
from specbench_cli.comparison.side import RowFacts, Side
from specbench_cli.config.problems import format_first_problem
from specbench_cli.errors import UsageError
from specbench_cli.former_names import current_params
from specbench_cli.store.schema import STRICT, Count, Family, Json, Name

ROOT = Path("results/baselines")
"""Folder of the baselines, with one subfolder per name."""

MAX_BYTES = 256 * files.MB
"""Maximum size of a baseline file in bytes."""
_NO_TIMES = ("times are not stored, because the runs are labelled noisy; ids and counters are",)
_NAME = re.compile(r"\w[\w.+-]*", re.ASCII)


def save(
    name: str,
    runs: Sequence[Path],
    *,
    root: Path = ROOT,
    warn: Callable[[str], object] = lambda _: None,
) -> Path:
    """Write the baseline file of this machine. An earlier file of the same baseline is replaced.

    Times of runs that are labelled noisy are not stored.

    Args:
        runs: runs of one program on one machine, with the same outputs; at least one.
        warn: called with a sentence for each run whose times are not stored.

    Returns:
        Path of the file.

    Raises:
        UsageError: a run is unfinished, the runs are not compatible, or their results differ. The
            message names the differences.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not a valid name of a baseline: use letters, digits and . _ + -",
            hint="specbench compare --save ci last",
        )
    side = _join(name, runs)
    if side.machine is None or not _NAME.fullmatch(side.machine):
        raise UsageError(
            f"the manifest of {runs[0]} has no machine id, which a baseline needs",
            hint="measure it again: specbench run",
        )
    path = root / name / f"{side.machine}.json"
    try:
        files.write_own(path, dump(side), _is_baseline)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    for sentence in side.left_out:
        warn(sentence)
    return path


def _is_baseline(content: bytes) -> bool:
    """Return True if the content is a baseline of any version."""
    return {"schema", "machine", "rows", "prompts"} <= files.json_object(content).keys()


def load(path: Path) -> Side:
    """Read a baseline file, as one side of a comparison.

    Raises:
        UsageError: the file is missing or damaged.
    """
    try:
        return parse(files.read_text(path, MAX_BYTES))
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {error.strerror}", hint="specbench compare --save NAME RUN"
        ) from error
    except (ValueError, TypeError, LookupError) as error:
        raise UsageError(
            f"{path} is not a baseline, or is damaged: {error}",
            hint=f"git checkout -- {shlex.quote(str(path))}, or specbench compare --save NAME RUN",
        ) from error


def list_names(root: Path = ROOT) -> list[str]:
    """Return the names of all baselines in a folder."""
    return sorted({path.parent.name for path in root.glob("*/*.json")})


def find_file(name: str, root: Path = ROOT) -> Path | None:
    """Return this machine's file of a baseline.

    If this machine has no file, return the first file of the baseline. Return None if the baseline
    does not exist.
    """
    files = sorted((root / name).glob("*.json")) if _NAME.fullmatch(name) else []
    if len(files) < 2:
        return files[0] if files else None
    # Import this module only when needed: it imports torch, which takes seconds.
    from specbench_cli.measure.machine import fingerprint

    own = f"{fingerprint()['id']}.json"
    return next((file for file in files if file.name == own), files[0])


def _join(name: str, runs: Sequence[Path]) -> Side:
    """Join runs to one side of a comparison.

    Remove the data that baseline files do not store.
    """
    if not runs:
        raise UsageError("a baseline needs a run", hint=f"specbench compare --save {name} last")
    side = join_runs(name, runs)
    return replace(
        side,
        outputs={key: _strip_output(output, side.noisy) for key, output in side.outputs.items()},
        processes=tuple(
            tuple(_strip_output(output, side.noisy) for output in process)
            for process in side.processes
        ),
        left_out=_NO_TIMES if side.noisy else side.left_out,
    )


def _strip_output(output: ComparedOutput, noisy: bool) -> ComparedOutput:
    """Return an output without its error text, which may contain paths.

    If the run is noisy, also remove the output's times.
    """
    if noisy:
        output = replace(output, times=None)
    if output.error is None:
        return output
    kind = output.error.partition(":")[0]
    return replace(output, error=kind if kind.isidentifier() else "failed")


# ---- the file ------------------------------------------------------------------------------------

SCHEMA = 2
"""Version of the file format."""

_Counters = Annotated[tuple[Count | None, ...], Field(min_length=9, max_length=9)]
_Times = Annotated[tuple[Count | None, ...], Field(min_length=6, max_length=8)]
_Verdict = Literal["reference", "identical", "near-tie", "mismatch", "unchecked"]
_Finish = Literal["eos", "length", "stop", "error"]


class _BaselineRun(TypedDict):
    """Output in a later run of the baseline, if it differs from the output in the first run."""

    __pydantic_config__ = STRICT  # type: ignore[misc]

    ids: str | None
    finish: _Finish
    verdict: _Verdict | None
    error: str | None
    counters: _Counters
    times: _Times | None


class _BaselineRow(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]

    label: Name
    method: Name
    sampling: Name
    guarantee: Name
    peer: bool
    params: dict[str, Json]
    timing_free: bool | None
    models: list[Name] | None


class _BaselineLine:
    """Schema of a line of the baseline file, which stores one output.

    The line has the output's fields in the first run, and then one entry per run.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of a tuple whose last item may repeat."""
        key, own = (Name, Count, Name, Count, Count), (_Finish, _Verdict | None, str | None)
        of = (*key, str | None, *own, _Counters, _Times | _BaselineRun | None)
        places = [handler.generate_schema(each) for each in of]
        return core_schema.tuple_schema(places, variadic_item_index=len(places) - 1)


class _BaselineFile(TypedDict):
    """Schema of a baseline file."""

    __pydantic_config__ = STRICT  # type: ignore[misc]

    schema: Annotated[Count, Field(ge=1, le=SCHEMA)]
    name: Name
    created_utc: str
    machine: Name
    noisy: bool
    facts: dict[str, str]
    rows: list[_BaselineRow]
    prompts: list[tuple[Name, Count, Name, Family, str, str | None]]
    outputs: list[Annotated[list[Any], _BaselineLine]]


_ROW_FIELDS = ("method", "sampling", "guarantee", "peer")
_PROMPT_FIELDS = ("task", "family", "cluster")
_OUTPUT_FIELDS = ("ids", "finish", "verdict", "error")
"""Fields of an output, in the order of the file, between the key and the counters."""


def dump(side: Side) -> str:
    """Return the content of the baseline file for a side.

    Raises:
        UsageError: outputs of the same method, or of the same prompt, contradict each other.
    """
    rows: dict[str, dict[str, Any]] = {}
    prompts: dict[tuple[str, int], list[Any]] = {}
    for output in (output for process in side.processes for output in process):
        _set_consistent(
            rows, output.key.label, {name: getattr(output, name) for name in _ROW_FIELDS}
        )
        _set_consistent(
            prompts, output.key.prompt_turn, [getattr(output, name) for name in _PROMPT_FIELDS]
        )
    parts = {
        "schema": _json(SCHEMA),
        "name": _json(side.name),
        "created_utc": _json(side.created_utc),
        "machine": _json(side.machine),
        "noisy": _json(side.noisy),
        "facts": _format_block(
            "{}", (f"{_json(what)}: {_json(v)}" for what, v in side.facts.items())
        ),
        "rows": _format_block(
            "[]", (_json(_dump_row(row, rows[label])) for label, row in side.rows.items())
        ),
        "prompts": _format_block(
            "[]", (_json([*at, *prompts[at], side.prompts.get(at)]) for at in sorted(prompts))
        ),
        "outputs": _format_block("[]", map(_json, _dump_outputs(side))),
    }
    return _format_block("{}", (f"{_json(name)}: {part}" for name, part in parts.items())) + "\n"


def parse(text: str) -> Side:
    """Parse the content of a baseline file.

    Raises:
        UsageError: the schema is newer than this program.
        ValueError, TypeError, LookupError: the text is not a baseline, or contradicts itself.
    """
    data = _validate_file(text)
    rows = {row["label"]: row for row in data["rows"]}
    prompts = {(prompt_id, turn): rest for prompt_id, turn, *rest in data["prompts"]}
    if len(rows) < len(data["rows"]) or len(prompts) < len(data["prompts"]):
        raise ValueError("a method or a prompt is listed twice")
    outputs: dict[PairKey, ComparedOutput] = {}
    processes: dict[tuple[int, int], list[ComparedOutput]] = defaultdict(list)
    for line in data["outputs"]:
        output, *more = _read_outputs(line, rows, prompts)
        if output.key in outputs:
            raise ValueError(f"a second output of {output.key}")
        outputs[output.key] = output
        for run, own in enumerate((output, *more)):
            if own.error is None and own.counters.contradiction is not None:
                raise ValueError(f"{own.key}: {own.counters.contradiction}")
            processes[run, output.key.pass_].append(own)
    if not outputs:
        raise ValueError("it contains no output")
    return Side(
        name=data["name"],
        created_utc=data["created_utc"],
        facts=data["facts"],
        machine=data["machine"],
        noisy=data["noisy"],
        rows={label: _read_row(row) for label, row in rows.items()},
        outputs=dict(sorted(outputs.items())),
        processes=tuple(
            tuple(sorted(processes[at], key=lambda output: output.key)) for at in sorted(processes)
        ),
        prompts={at: rest[-1] for at, rest in prompts.items() if rest[-1] is not None},
    )


def _dump_outputs(side: Side) -> Iterator[list[Any]]:
    """Yield one line of the baseline file per output, grouped by method."""
    runs: dict[PairKey, list[ComparedOutput]] = defaultdict(list)
    for output in (output for process in side.processes for output in process):
        runs[output.key].append(output)
    order = {label: place for place, label in enumerate(side.rows)}
    for key in sorted(runs, key=lambda key: (order[key.label], key)):
        first, *more = runs[key]
        own = [getattr(first, name) for name in _OUTPUT_FIELDS]
        yield [
            *key,
            *own,
            astuple(first.counters),
            _dump_times(first),
            *(_dump_run(c, first) for c in more),
        ]


def _dump_run(output: ComparedOutput, first: ComparedOutput) -> Any:
    """Return the entry of an output in a later run.

    It is a list of times, or an object if the output differs from the output in the first run.
    """
    if replace(output, times=first.times) == first:
        return _dump_times(output)
    own = {name: getattr(output, name) for name in _OUTPUT_FIELDS}
    return {**own, "counters": astuple(output.counters), "times": _dump_times(output)}


def _dump_times(output: ComparedOutput) -> Any:
    return None if output.times is None else astuple(output.times)


def _read_outputs(
    line: Sequence[Any],
    rows: Mapping[str, Mapping[str, Any]],
    prompts: Mapping[tuple[str, int], Sequence[Any]],
) -> Iterator[ComparedOutput]:
    prompt_id, turn, label, pass_, seed, *rest = line
    own, (counters, first, *more) = rest[: len(_OUTPUT_FIELDS)], rest[len(_OUTPUT_FIELDS) :]
    output = ComparedOutput(
        key=PairKey(prompt_id, turn, label, pass_, seed),
        **dict(zip(_PROMPT_FIELDS, prompts[prompt_id, turn][:-1], strict=True)),
        **{name: rows[label][name] for name in _ROW_FIELDS},
        **dict(zip(_OUTPUT_FIELDS, own, strict=True)),
        counters=Counters(*counters),
        times=_read_times(first),
    )
    yield output
    for run in more:
        if isinstance(run, dict):
            others = {name: run[name] for name in _OUTPUT_FIELDS}
            counted = Counters(*run["counters"])
            yield replace(output, **others, counters=counted, times=_read_times(run["times"]))
        else:
            yield replace(output, times=_read_times(run))


def _read_times(times: Any) -> Times | None:
    return None if times is None else Times(*times)


def _validate_file(text: str) -> _BaselineFile:
    """Parse a file; check types and ranges."""
    try:
        return _file_adapter().validate_json(text)
    except ValidationError as error:
        with contextlib.suppress(ValueError, RecursionError, LookupError, TypeError):
            _check_schema(json.loads(text)["schema"])
        raise ValueError(format_first_problem(error)) from None


@cache
def _file_adapter() -> TypeAdapter[_BaselineFile]:
    return TypeAdapter(_BaselineFile)


def _check_schema(schema: int) -> None:
    if schema > SCHEMA:
        raise UsageError(
            f"this baseline has schema {schema}; this specbench reads up to {SCHEMA}",
            hint="pip install --upgrade specbench-cli",
        )


def _dump_row(facts: RowFacts, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "label": facts.label,
        **fields,
        "params": dict(facts.params),
        "timing_free": facts.timing_free,
        "models": facts.models,
    }


def _read_row(row: Mapping[str, Any]) -> RowFacts:
    models = row["models"]
    return RowFacts(
        label=row["label"],
        method=row["method"],
        params=current_params(row["params"]),
        timing_free=row["timing_free"],
        models=None if models is None else tuple(models),
    )


def _set_consistent(table: dict[Any, Any], key: Any, value: Any) -> None:
    if table.setdefault(key, value) != value:
        raise UsageError(f"the outputs of {key} contradict each other: {table[key]}, {value}")


def _format_block(brackets: str, lines: Iterable[str]) -> str:
    """Return the lines, separated by commas and enclosed in brackets."""
    opening, closing = brackets[0], brackets[1]
    inside = ",\n".join(lines)
    return f"{opening}\n{inside}\n{closing}" if inside else brackets


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
