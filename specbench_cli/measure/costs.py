"""What forwards cost on a machine: a probe's curve, kept as JSON and read between its points.

Between points a time is interpolated linearly, in new tokens and in context length. Beyond the
last point it goes on with the last slope, but never falls; before the first it stays what it was
there. `covers` tells the two apart. The host's time of a step, all that is done between forwards,
is linear in the step's draft forwards and drafted tokens (`HostCost`); trees, and methods that were
probed by name, have such a line of their own.
"""

from __future__ import annotations

import errno
import hashlib
import json
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from specbench_cli import files
from specbench_cli.errors import UsageError

MOST_BYTES = 64 * files.MB
"""Maximum size of a cost file in bytes."""
SCHEMA = 4
"""Version of the file written now. Version 1 knew no trees and no heads, version 2 no batches,
version 3 no `lone` forwards, and the host's lines of heads by model, not by method."""

TREES = "draft"
"""The host's line of a draft model's trees."""

PROBE = "specbench predict --probe"

PointLine = Sequence[tuple[float, float]]
"""(x, ns), by increasing x."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class CostPoint(_Frozen):
    """A forward over `n_tokens` new tokens after `context` rows: the mean of `samples` times in
    ns, far ones left out, and their interquartile range as a share of their median. A prefill has
    context 0."""

    n_tokens: int = Field(ge=1)
    context: int = Field(ge=0)
    ns: float = Field(gt=0)
    spread: float = Field(ge=0)
    samples: int = Field(ge=1)


class HostPoint(_Frozen):
    """Host time of a step in a real session, in ns; `drafts` forwards of the draft model and
    `nodes` drafted tokens a step."""

    name: str
    drafts: float = Field(ge=0)
    nodes: float = Field(ge=0)
    ns: float = Field(ge=0)
    spread: float = Field(ge=0)
    samples: int = Field(ge=1)


class HostCost(_Frozen):
    """Host time in ns: of any step, for each draft forward in it, for each drafted token in it."""

    step: float = Field(ge=0)
    draft: float = Field(ge=0)
    node: float = Field(ge=0)
    points: tuple[HostPoint, ...] = ()


class BatchPoint(_Frozen):
    """Host time of a step of `sequences` decoded together, in ns; per step, `drafts` forwards of
    the draft model times the sequences in them, and `nodes` drafted tokens."""

    name: str
    sequences: int = Field(ge=1)
    drafts: float = Field(ge=0)
    nodes: float = Field(ge=0)
    ns: float = Field(ge=0)
    samples: int = Field(ge=1)


class BatchCost(_Frozen):
    """What sequences cost that are decoded together, up to `most` of them.

    beside: by model, ns that each further sequence adds to a forward over as many rows of one; none
    of its states is the others'. step, sequence, draft, node: host time in ns of a step, for each
    sequence in it, for each of its draft forwards, for each of its drafted tokens.
    """

    most: int = Field(ge=2)
    beside: dict[str, float]
    step: float = Field(ge=0)
    sequence: float = Field(ge=0)
    draft: float = Field(ge=0)
    node: float = Field(ge=0)
    points: tuple[BatchPoint, ...] = ()


class Curve(_Frozen):
    """One model's forwards, its prefills (context 0), its forwards over a tree's root and nodes
    (none where only chains were measured), and some that came right after another one of the model,
    with its weights still in the caches (none: as any other)."""

    forwards: tuple[CostPoint, ...] = Field(min_length=1)
    prefills: tuple[CostPoint, ...] = Field(min_length=1)
    trees: tuple[CostPoint, ...] = ()
    lone: tuple[CostPoint, ...] = ()

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        for points in (self.forwards, self.trees, self.lone):
            if len({(point.n_tokens, point.context) for point in points}) < len(points):
                raise ValueError("two points of the same tokens and context")
        if len({point.n_tokens for point in self.prefills}) < len(self.prefills):
            raise ValueError("two prefills of the same tokens")
        return self

    @cached_property
    def by_context(self) -> list[tuple[int, PointLine]]:
        """(context, times over new tokens), by increasing context."""
        return _lines(self.forwards)

    @cached_property
    def trees_by_context(self) -> list[tuple[int, PointLine]]:
        """The same over the rows of a tree, from the root alone on."""
        alone = tuple(point for point in self.forwards if point.n_tokens == 1)
        return _lines((*alone, *self.trees)) if self.trees else self.by_context

    @cached_property
    def lone_ratios(self) -> PointLine:
        """What a forward takes by itself, as a share of one behind other models', over new tokens:
        the median over contexts."""
        shares: dict[float, list[float]] = {}
        for point in self.lone:
            usual = self.ns(point.n_tokens, point.context)
            shares.setdefault(point.n_tokens, []).append(point.ns / usual)
        return sorted((n, min(1.0, median(found))) for n, found in shares.items())

    def ns(
        self, n_tokens: float, context: float, *, tree: bool = False, lone: bool = False
    ) -> float:
        """Time of a forward over `n_tokens` new tokens, or a tree's rows, after `context` rows;
        lone: right after another one of the model."""
        lines = self.trees_by_context if tree else self.by_context
        took = interpolate([(at, interpolate(line, n_tokens)) for at, line in lines], context)
        if not lone or not self.lone_ratios:
            return took
        return took * interpolate(self.lone_ratios, min(n_tokens, self.lone_ratios[-1][0]))

    def covers(self, n_tokens: float, context: float, *, tree: bool = False) -> bool:
        """Return True if `ns` interpolates here, False if it extrapolates beyond the points."""
        lines = self.trees_by_context if tree else self.by_context
        return context <= lines[-1][0] and n_tokens <= min(line[-1][0] for _, line in lines)

    def prefill_ns(self, n_tokens: float) -> float:
        """Return the time of a forward over a prompt of `n_tokens`."""
        return interpolate(self.prefill, n_tokens)

    @cached_property
    def prefill(self) -> PointLine:
        """Times over prompt lengths."""
        return sorted((point.n_tokens, point.ns) for point in self.prefills)


class _CostAccelerator(BaseModel):
    name: str


class _CostHardware(BaseModel):
    cpu: str = "?"
    accelerators: list[_CostAccelerator] = []


class _CostMachine(BaseModel):
    """What is shown of a machine's fingerprint; it may say more."""

    hardware: _CostHardware = _CostHardware()


def _check_machine(machine: dict[str, Any]) -> dict[str, Any]:
    _CostMachine.model_validate(machine)
    return machine


class CostSetup(_Frozen):
    """What else a time depends on besides machine and models."""

    device: str
    dtype: str
    threads: int = Field(ge=1)
    graphs: Literal["on", "off"] = "off"

    def __str__(self) -> str:
        graphs = " graphs" if self.graphs == "on" else ""
        return f"{self.device} {self.dtype} {self.threads} threads{graphs}"


class ProbeNoise(_Frozen):
    """How the probe went: rounds asked for and rounds lost to noise, the largest share of the CPUs
    that other programs took in a round kept (None: unknown), and whether noise was allowed."""

    rounds: int
    void: int
    other_cpu: float | None
    noisy: bool


class Costs(_Frozen):
    """A machine's costs.

    Attributes:
        machine: its fingerprint (`measure.machine`).
        models: by role, `label`, `sha256`, `n_layers` and whatever else is known of it.
        curves: by role ("target", "draft"), or a head's kind ("eagle3").
        host: of steps with chains of a draft model, or none.
        hosts: by method, of its steps; and that of a draft model's trees (TREES). In files of
            schema 3 by the model that drafts.
        batch: of several sequences together; None where they were not probed.
    """

    schema_: int = Field(SCHEMA, alias="schema")
    version: str
    created_utc: str
    machine: Annotated[dict[str, Any], AfterValidator(_check_machine)]
    models: dict[str, dict[str, Any]]
    setup: CostSetup
    seed: int
    quietness: ProbeNoise
    curves: dict[str, Curve]
    host: HostCost
    hosts: dict[str, HostCost] = {}
    batch: BatchCost | None = None

    def host_ns(
        self, drafts: float = 0, nodes: float = 0, *, steps: int = 1, method: str = ""
    ) -> float:
        """Time of steps outside of forwards.

        Args:
            drafts: forwards of the draft model in them.
            nodes: drafted tokens that they verify.
            of: see `hosts`; where it has no such line, and by default, `host` counts.
        """
        host = self.hosts.get(method, self.host)
        return host.step * steps + host.draft * drafts + host.node * nodes

    def covers_models(self, models: Mapping[str, str]) -> bool:
        """Whether it was these models (role -> sha256 of the weights) that were probed."""
        ours = {role: facts.get("sha256") for role, facts in self.models.items()}
        return models.items() <= ours.items()

    @property
    def label(self) -> str:
        """The machine and the set-up, for a person."""
        hardware = _CostMachine.model_validate(self.machine).hardware
        on_cpu = self.setup.device == "cpu" or not hardware.accelerators
        return f"{hardware.cpu if on_cpu else hardware.accelerators[0].name}, {self.setup}"

    @property
    def facts(self) -> dict[str, Any]:
        """Whose they are, for programs."""
        return {
            "machine": self.machine.get("id"),
            "label": self.label,
            "created_utc": self.created_utc,
            "noisy": self.quietness.noisy,
        }

    def save(self, path: Path, *, overwrite: bool = False, tracked: bool = False) -> None:
        """Write the file whole or not at all.

        Args:
            overwrite: True replaces a file that specbench did not write.
            listed: True lists the file's hash, so that a changed file is not replaced later.

        Raises:
            UsageError: the file cannot be written, or contains no costs.
        """
        text = json.dumps(self.model_dump(mode="json", by_alias=True), indent=1, allow_nan=False)
        with _report_errors(path):
            if tracked:
                files.write_listed(path, text + "\n", overwrite=overwrite)
            else:
                files.write_own(path, text + "\n", _is_costs, overwrite=overwrite)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file that `save` wrote.

        Raises:
            UsageError: no such file, not costs, damaged, or of a newer schema.
        """
        again = f"{PROBE} --out {path.name}"
        try:
            data = json.loads(files.read_text(path, MOST_BYTES))
            json.dumps(data, ensure_ascii=False).encode()  # half a character: nothing can write it
        except OSError as error:
            raise UsageError(f"cannot read costs from {path}: {error.strerror}", again) from error
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path} is no file of costs: {error}", again) from error
        schema = data.get("schema") if isinstance(data, dict) else None
        if not isinstance(schema, int) or "curves" not in data:
            raise UsageError(f"{path} is no file of costs: no schema number or no curves", again)
        if schema > SCHEMA:
            raise UsageError(
                f"{path} has schema {schema}; this specbench reads costs up to {SCHEMA}",
                "pip install --upgrade specbench-cli",
            )
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise UsageError(f"{path} is damaged: {where}: {first['msg']}", again) from error


# ---- the costs in the cache ----------------------------------------------------------------------


def cache_path(machine_id: str, models: Mapping[str, Mapping[str, Any]], setup: CostSetup) -> Path:
    """Return the file in the user's cache of a machine's costs with some models and a set-up."""
    key = {
        "machine": machine_id,
        "models": {role: facts["sha256"] for role, facts in models.items()},
        **setup.model_dump(),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return _cache() / f"{digest[:16]}.json"


def find_cached(
    machine_id: str | None,
    models: Mapping[str, str],
    setup: CostSetup,
    *,
    heads: Mapping[str, str] | None = None,
) -> Costs | None:
    """Return the newest costs in the cache of a machine and a set-up that know certain models.

    Args:
        models: role -> sha256 of the weights.
        heads: the same of models that they had better know too: those that know most count.
    """
    fitting = []
    for path in _cache().glob("*.json"):
        try:
            costs = Costs.load(path)
        except UsageError:
            continue  # a newer program's, or damaged: as good as not there
        if (
            costs.machine.get("id") == machine_id
            and costs.setup == setup
            and costs.covers_models(models)
        ):
            fitting.append(costs)
    wanted = (heads or {}).items()

    def rank(costs: Costs) -> tuple[int, str]:
        return sum(costs.covers_models(dict([head])) for head in wanted), costs.created_utc

    return max(fitting, key=rank, default=None)


def _cache() -> Path:
    return files.cache_folder() / "costs"


def interpolate(line: PointLine, x: float) -> float:
    """The value at x of a line of points.

    Linear between them; the first value before them; after them the last slope goes on, unless it
    falls: costs do not fall with work.
    """
    if x <= line[0][0] or len(line) == 1:
        return line[0][1]
    right = min(bisect_right(line, x, key=lambda point: point[0]), len(line) - 1)
    (x0, y0), (x1, y1) = line[right - 1], line[right]
    if x >= x1:
        return y1 + max(0.0, (y1 - y0) / (x1 - x0)) * (x - x1)
    return y0 + (y1 - y0) * ((x - x0) / (x1 - x0))


def _lines(points: Iterable[CostPoint]) -> list[tuple[int, PointLine]]:
    """(context, times over new tokens), by increasing context; the last of two at one place."""
    lines: dict[int, dict[float, float]] = {}
    for point in points:
        lines.setdefault(point.context, {})[point.n_tokens] = point.ns
    return [(context, sorted(lines[context].items())) for context in sorted(lines)]


def _is_costs(content: bytes) -> bool:
    """Return True if any version of `Costs.save` wrote the content."""
    return {"schema", "machine", "curves", "host"} <= files.json_object(content).keys()


@contextmanager
def _report_errors(path: Path) -> Iterator[None]:
    """Makes the folder of a file to be written, and says in our words what goes wrong."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UsageError(
            f"cannot write the costs to {path}: {error.strerror or error}",
            "give another --out FILE, or set SPECBENCH_CACHE to a folder that can be written",
        ) from error


def check_writable(path: Path, *, overwrite: bool = False) -> None:
    """Find out before a probe whether its costs can be saved. Raises UsageError if not."""
    with _report_errors(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        tempfile.TemporaryFile(dir=path.parent).close()
        files.check_listed(path, overwrite=overwrite)


class ProbeDifference(_Frozen):
    """A point of two probes, and how far the second's time is from the first's, as a share."""

    name: str
    first_ns: float
    second_ns: float

    @property
    def relative(self) -> float:
        """|second - first| / first, nothing counting as a nanosecond."""
        return abs(self.second_ns - self.first_ns) / max(self.first_ns, 1.0)


def compare_probes(first: Costs, second: Costs) -> list[ProbeDifference]:
    """The points that two probes share, the farthest apart first."""
    ours, theirs = _named_points(first), _named_points(second)
    found = [
        ProbeDifference(name=name, first_ns=ours[name], second_ns=theirs[name])
        for name in ours
        if name in theirs
    ]
    return sorted(found, key=lambda each: -each.relative)


def _named_points(costs: Costs) -> dict[str, float]:
    named = {}
    for role, curve in costs.curves.items():
        for p in curve.forwards:
            named[f"{role}, {p.n_tokens} tokens after {p.context}"] = p.ns
        for p in curve.lone:
            named[f"{role}, {p.n_tokens} tokens by itself after {p.context}"] = p.ns
        for p in curve.trees:
            named[f"{role}, a tree of {p.n_tokens} rows after {p.context}"] = p.ns
        for p in curve.prefills:
            named[f"{role}, prefill of {p.n_tokens}"] = p.ns
    hosts = (costs.host, *costs.hosts.values())
    named |= {f"host, {point.name}": point.ns for host in hosts for point in host.points}
    together = costs.batch.points if costs.batch else ()
    return named | {f"host, {at.sequences} together, {at.name}": at.ns for at in together}
