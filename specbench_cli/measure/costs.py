"""Costs of forwards and host work on a machine, measured by a probe and stored as JSON.

Between the points, times are interpolated linearly over new tokens and context length. Beyond the
last point, the last slope continues but never falls. Before the first point, the time is constant.
`covers` distinguishes interpolation from extrapolation. The host time of a step, which is all work
between forwards, is linear in draft forwards and drafted tokens (`HostCost`). Trees, and methods
that were probed by name, have their own coefficients.
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
"""Version of the file. Version 1 had no trees and no heads, version 2 no batches, version 3 no
`lone` forwards, and host costs of heads by model instead of by method."""

TREES = "draft"
"""Key of the host costs of draft trees."""

PROBE = "specbench predict --probe"

PointLine = Sequence[tuple[float, float]]
"""Points (x, ns) by increasing x."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class CostPoint(_Frozen):
    """Time of a forward over `n_tokens` new tokens after `context` rows.

    A prefill has context 0.

    ns: Mean of `samples` times without outliers.
    spread: Interquartile range as a share of the median.
    """

    n_tokens: int = Field(ge=1)
    context: int = Field(ge=0)
    ns: float = Field(gt=0)
    spread: float = Field(ge=0)
    samples: int = Field(ge=1)


class HostPoint(_Frozen):
    """Host time of a step in a real session, in ns.

    drafts: Draft forwards per step.
    nodes: Drafted tokens per step.
    """

    name: str
    drafts: float = Field(ge=0)
    nodes: float = Field(ge=0)
    ns: float = Field(ge=0)
    spread: float = Field(ge=0)
    samples: int = Field(ge=1)


class HostCost(_Frozen):
    """Host time in ns: per step, per draft forward, and per drafted token."""

    step: float = Field(ge=0)
    draft: float = Field(ge=0)
    node: float = Field(ge=0)
    points: tuple[HostPoint, ...] = ()


class BatchPoint(_Frozen):
    """Host time in ns of a step with `sequences` decoded together.

    drafts: Draft forwards per step times their sequences.
    nodes: Drafted tokens per step.
    """

    name: str
    sequences: int = Field(ge=1)
    drafts: float = Field(ge=0)
    nodes: float = Field(ge=0)
    ns: float = Field(ge=0)
    samples: int = Field(ge=1)


class BatchCost(_Frozen):
    """Costs of decoding up to `most` sequences together.

    beside: Time in ns, by model, that each further sequence adds to a forward over the same number
        of rows of one sequence, because states are not shared.
    step, sequence, draft, node: Host time in ns per step, sequence, draft forward, and drafted
        token.
    """

    most: int = Field(ge=2)
    beside: dict[str, float]
    step: float = Field(ge=0)
    sequence: float = Field(ge=0)
    draft: float = Field(ge=0)
    node: float = Field(ge=0)
    points: tuple[BatchPoint, ...] = ()


class CostCurve(_Frozen):
    """Forward times of one model.

    forwards: Forwards over chains.
    prefills: Forwards with context 0.
    trees: Forwards over the rows of a tree with its root; empty if only chains were measured.
    lone: Forwards right after another one of the same model, whose weights are still in the caches.
    """

    forwards: tuple[CostPoint, ...] = Field(min_length=1)
    prefills: tuple[CostPoint, ...] = Field(min_length=1)
    trees: tuple[CostPoint, ...] = ()
    lone: tuple[CostPoint, ...] = ()

    @model_validator(mode="after")
    def _check_unique_points(self) -> Self:
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
        """The same for the rows of a tree, starting with the root alone."""
        alone = tuple(point for point in self.forwards if point.n_tokens == 1)
        return _lines((*alone, *self.trees)) if self.trees else self.by_context

    @cached_property
    def lone_ratios(self) -> PointLine:
        """Time of a lone forward divided by that of a normal one, over new tokens: the median over
        contexts."""
        shares: dict[float, list[float]] = {}
        for point in self.lone:
            usual = self.ns(point.n_tokens, point.context)
            shares.setdefault(point.n_tokens, []).append(point.ns / usual)
        return sorted((n, min(1.0, median(found))) for n, found in shares.items())

    def ns(
        self, n_tokens: float, context: float, *, tree: bool = False, lone: bool = False
    ) -> float:
        """Return the time of a forward over `n_tokens` new tokens, or a tree's rows, after
        `context` rows.

        Args:
            lone: True if it follows another forward of the same model.
        """
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
    """Fields of a machine's fingerprint that are shown. It may have more."""

    hardware: _CostHardware = _CostHardware()


def _check_machine(machine: dict[str, Any]) -> dict[str, Any]:
    _CostMachine.model_validate(machine)
    return machine


class CostSetup(_Frozen):
    """Settings besides machine and models that a time depends on."""

    device: str
    dtype: str
    threads: int = Field(ge=1)
    graphs: Literal["on", "off"] = "off"

    def __str__(self) -> str:
        graphs = " graphs" if self.graphs == "on" else ""
        return f"{self.device} {self.dtype} {self.threads} threads{graphs}"


class ProbeNoise(_Frozen):
    """Noise during a probe.

    rounds: Number of rounds.
    void: Number of noisy rounds, which are not used.
    other_cpu: Largest CPU share of other programs in a used round. None if unknown.
    noisy: True if noise was allowed.
    """

    rounds: int
    void: int
    other_cpu: float | None
    noisy: bool


class Costs(_Frozen):
    """Costs of a machine.

    Attributes:
        machine: Fingerprint (`measure.machine`).
        models: By role: `label`, `sha256`, `n_layers` and other known facts.
        curves: By role ("target", "draft"), or by the kind of a head ("eagle3").
        host: Host costs of chains of a draft model, or of steps without drafts.
        hosts: Host costs by method, and of draft trees (TREES). Schema 3: by the model that drafts.
        batch: Costs of several sequences together. None if they were not probed.
    """

    schema_: int = Field(SCHEMA, alias="schema")
    version: str
    created_utc: str
    machine: Annotated[dict[str, Any], AfterValidator(_check_machine)]
    models: dict[str, dict[str, Any]]
    setup: CostSetup
    seed: int
    quietness: ProbeNoise
    curves: dict[str, CostCurve]
    host: HostCost
    hosts: dict[str, HostCost] = {}
    batch: BatchCost | None = None

    def host_ns(
        self, drafts: float = 0, nodes: float = 0, *, steps: int = 1, method: str = ""
    ) -> float:
        """Return the time of steps outside of forwards.

        Args:
            drafts: Number of their draft forwards.
            nodes: Number of drafted tokens that they verify.
            method: Key of `hosts`. `host` applies if there is no such key.
        """
        host = self.hosts.get(method, self.host)
        return host.step * steps + host.draft * drafts + host.node * nodes

    def covers_models(self, models: Mapping[str, str]) -> bool:
        """Return True if exactly these models (role -> sha256 of the weights) were probed."""
        ours = {role: facts.get("sha256") for role, facts in self.models.items()}
        return models.items() <= ours.items()

    @property
    def label(self) -> str:
        """Name of the machine and the setup, for the user."""
        hardware = _CostMachine.model_validate(self.machine).hardware
        on_cpu = self.setup.device == "cpu" or not hardware.accelerators
        return f"{hardware.cpu if on_cpu else hardware.accelerators[0].name}, {self.setup}"

    @property
    def facts(self) -> dict[str, Any]:
        """Machine, label and age of the costs, for programs."""
        return {
            "machine": self.machine.get("id"),
            "label": self.label,
            "created_utc": self.created_utc,
            "noisy": self.quietness.noisy,
        }

    def save(self, path: Path, *, overwrite: bool = False, tracked: bool = False) -> None:
        """Write the file atomically.

        Args:
            overwrite: True replaces a file that specbench did not write.
            tracked: True lists the file's hash, so that a changed file is not replaced later.

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
            json.dumps(data, ensure_ascii=False).encode()  # rejects lone surrogates
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
    """Return the newest costs in the cache for a machine, a setup and models; None if there are
    none.

    Args:
        models: Role -> sha256 of the weights.
        heads: The same for heads. Costs that cover more of them are preferred.
    """
    fitting = []
    for path in _cache().glob("*.json"):
        try:
            costs = Costs.load(path)
        except UsageError:
            continue  # ignore costs of a newer program, and damaged files
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
    """Return the value of a line of points at x.

    Linear between the points, the first value before them. After them the last slope continues
    unless it falls, because costs do not fall with work.
    """
    if x <= line[0][0] or len(line) == 1:
        return line[0][1]
    right = min(bisect_right(line, x, key=lambda point: point[0]), len(line) - 1)
    (x0, y0), (x1, y1) = line[right - 1], line[right]
    if x >= x1:
        return y1 + max(0.0, (y1 - y0) / (x1 - x0)) * (x - x1)
    return y0 + (y1 - y0) * ((x - x0) / (x1 - x0))


def _lines(points: Iterable[CostPoint]) -> list[tuple[int, PointLine]]:
    """Return (context, times over new tokens) by increasing context; the last of equal points."""
    lines: dict[int, dict[float, float]] = {}
    for point in points:
        lines.setdefault(point.context, {})[point.n_tokens] = point.ns
    return [(context, sorted(lines[context].items())) for context in sorted(lines)]


def _is_costs(content: bytes) -> bool:
    """Return True if any version of `Costs.save` wrote the content."""
    return {"schema", "machine", "curves", "host"} <= files.json_object(content).keys()


@contextmanager
def _report_errors(path: Path) -> Iterator[None]:
    """Create the folder of a file and turn errors into a UsageError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UsageError(
            f"cannot write the costs to {path}: {error.strerror or error}",
            "give another --out FILE, or set SPECBENCH_CACHE to a folder that can be written",
        ) from error


def check_writable(path: Path, *, overwrite: bool = False) -> None:
    """Raise UsageError before a probe if its costs could not be saved."""
    with _report_errors(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        tempfile.TemporaryFile(dir=path.parent).close()
        files.check_listed(path, overwrite=overwrite)


class ProbeDifference(_Frozen):
    """Times of a point in two probes."""

    name: str
    first_ns: float
    second_ns: float

    @property
    def relative(self) -> float:
        """|second - first| / first, where first is at least 1 ns."""
        return abs(self.second_ns - self.first_ns) / max(self.first_ns, 1.0)


def compare_probes(first: Costs, second: Costs) -> list[ProbeDifference]:
    """Return the common points of two probes, largest difference first."""
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
