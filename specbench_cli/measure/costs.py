"""Costs of forwards and of host work on a machine, stored as a JSON file.

A probe (`measure.probe`) measures the time of a forward at several points. A point is a number of
new tokens and a context length. Times between two points are interpolated linearly. Beyond the last
point, times are extrapolated, and `CostCurve.covers` returns False.

Host work is all work of a decoding step between its forwards. Its time is a linear function of the
number of draft forwards and drafted tokens (`HostCost`). Steps with draft trees have their own
coefficients. So do methods that the user names in `specbench probe`.
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

MAX_BYTES = 64 * files.MB
"""Maximum size of a cost file in bytes."""
SCHEMA = 4
"""Version of the file format. Version 1 had no trees and no heads, version 2 had no batches.
Version 3 had no `lone` forwards, and its host costs of heads were by model instead of by method."""

TREES = "draft"
"""Key of the draft model's trees in `Costs.hosts`."""

PROBE = "specbench predict --probe"

PointLine = Sequence[tuple[float, float]]
"""Points (x, time in ns) of a function, by increasing x. x is a number of tokens."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class CostPoint(_Frozen):
    """Measured time of a forward over `n_tokens` new tokens, with `context` cached tokens.

    A prefill has context 0.

    ns: Mean of the measured times in ns, without outliers.
    spread: Interquartile range of these times, divided by their median.
    samples: Number of measured times.
    """

    n_tokens: int = Field(ge=1)
    context: int = Field(ge=0)
    ns: float = Field(gt=0)
    spread: float = Field(ge=0)
    samples: int = Field(ge=1)


class HostPoint(_Frozen):
    """Measured host time of a decoding step in ns: the time of all work between its forwards.

    name: Method with its parameters.
    drafts: Mean number of draft forwards per step.
    nodes: Mean number of drafted tokens per step.
    spread: Interquartile range of the times, divided by their median.
    samples: Number of decodings that were timed.
    """

    name: str
    drafts: float = Field(ge=0)
    nodes: float = Field(ge=0)
    ns: float = Field(ge=0)
    spread: float = Field(ge=0)
    samples: int = Field(ge=1)


class HostCost(_Frozen):
    """Coefficients of the host time in ns: per step, per draft forward, and per drafted token.

    points: The measurements to which the coefficients were fitted.
    """

    step: float = Field(ge=0)
    draft: float = Field(ge=0)
    node: float = Field(ge=0)
    points: tuple[HostPoint, ...] = ()


class BatchPoint(_Frozen):
    """Measured host time in ns of a step that decodes `sequences` sequences together.

    name: Method with its parameters.
    drafts: Mean number of draft forwards per step. A forward over n sequences counts n times.
    nodes: Mean number of drafted tokens per step, summed over all sequences.
    samples: Number of batches that were timed.
    """

    name: str
    sequences: int = Field(ge=1)
    drafts: float = Field(ge=0)
    nodes: float = Field(ge=0)
    ns: float = Field(ge=0)
    samples: int = Field(ge=1)


class BatchCost(_Frozen):
    """Costs of decoding several sequences in a batch.

    most: Largest batch that was measured, as a number of sequences.
    beside: Model -> time in ns that each sequence after the first adds to a forward with the same
        total number of tokens. It is the cost of reading another KV cache.
    step, sequence, draft, node: Host time in ns per step, per sequence, per draft forward and per
        drafted token.
    points: The measurements to which the host times were fitted.
    """

    most: int = Field(ge=2)
    beside: dict[str, float]
    step: float = Field(ge=0)
    sequence: float = Field(ge=0)
    draft: float = Field(ge=0)
    node: float = Field(ge=0)
    points: tuple[BatchPoint, ...] = ()


class CostCurve(_Frozen):
    """Measured forward times of one model, with interpolation.

    forwards: Times of forwards over a chain of tokens.
    prefills: Times of forwards over a prompt.
    trees: Times of forwards over a draft tree with its root. Empty if only chains were measured.
    lone: Times of forwards that directly follow another forward of the same model. They are
        shorter, because the model's weights are still in the CPU caches.
    """

    forwards: tuple[CostPoint, ...] = Field(min_length=1)
    prefills: tuple[CostPoint, ...] = Field(min_length=1)
    trees: tuple[CostPoint, ...] = ()
    lone: tuple[CostPoint, ...] = ()

    @model_validator(mode="after")
    def _check_unique_points(self) -> Self:
        for points in (self.forwards, self.trees, self.lone):
            if len({(point.n_tokens, point.context) for point in points}) < len(points):
                raise ValueError("two points with the same number of tokens and context length")
        if len({point.n_tokens for point in self.prefills}) < len(self.prefills):
            raise ValueError("two prefills with the same number of tokens")
        return self

    @cached_property
    def by_context(self) -> list[tuple[int, PointLine]]:
        """Forward times as a function of the number of new tokens, one line per context length."""
        return _lines(self.forwards)

    @cached_property
    def trees_by_context(self) -> list[tuple[int, PointLine]]:
        """Times of forwards over a draft tree, by tree size. One line per context length.

        The tree size includes the root. A tree of size 1 is the root alone.
        """
        alone = tuple(point for point in self.forwards if point.n_tokens == 1)
        return _lines((*alone, *self.trees)) if self.trees else self.by_context

    @cached_property
    def lone_ratios(self) -> PointLine:
        """Times of lone forwards divided by times of normal forwards, as a function of new tokens.

        A lone forward directly follows another forward of the same model. Each ratio is the median
        over all context lengths, and at most 1.
        """
        shares: dict[float, list[float]] = {}
        for point in self.lone:
            usual = self.ns(point.n_tokens, point.context)
            shares.setdefault(point.n_tokens, []).append(point.ns / usual)
        return sorted((n, min(1.0, median(found))) for n, found in shares.items())

    def ns(
        self, n_tokens: float, context: float, *, tree: bool = False, lone: bool = False
    ) -> float:
        """Return the interpolated time of a forward in ns.

        Args:
            n_tokens: Number of new tokens.
            context: Number of cached tokens before them.
            tree: True if the new tokens are a draft tree with its root.
            lone: True if the forward directly follows another forward of the same model.
        """
        lines = self.trees_by_context if tree else self.by_context
        took = interpolate([(at, interpolate(line, n_tokens)) for at, line in lines], context)
        if not lone or not self.lone_ratios:
            return took
        return took * interpolate(self.lone_ratios, min(n_tokens, self.lone_ratios[-1][0]))

    def covers(self, n_tokens: float, context: float, *, tree: bool = False) -> bool:
        """Return True if `ns` interpolates between measured points, False if it extrapolates."""
        lines = self.trees_by_context if tree else self.by_context
        return context <= lines[-1][0] and n_tokens <= min(line[-1][0] for _, line in lines)

    def prefill_ns(self, n_tokens: float) -> float:
        """Return the interpolated time in ns of a forward over a prompt of `n_tokens` tokens."""
        return interpolate(self.prefill, n_tokens)

    @cached_property
    def prefill(self) -> PointLine:
        """Prefill times as a function of the prompt length."""
        return sorted((point.n_tokens, point.ns) for point in self.prefills)


class _CostAccelerator(BaseModel):
    name: str


class _CostHardware(BaseModel):
    cpu: str = "?"
    accelerators: list[_CostAccelerator] = []


class _CostMachine(BaseModel):
    """Fields of a machine's fingerprint that specbench displays. Other fields are ignored."""

    hardware: _CostHardware = _CostHardware()


def _check_machine(machine: dict[str, Any]) -> dict[str, Any]:
    _CostMachine.model_validate(machine)
    return machine


class CostSetup(_Frozen):
    """Settings of a probe that change its times, in addition to the machine and the models."""

    device: str
    dtype: str
    threads: int = Field(ge=1)
    graphs: Literal["on", "off"] = "off"

    def __str__(self) -> str:
        graphs = " graphs" if self.graphs == "on" else ""
        return f"{self.device} {self.dtype} {self.threads} threads{graphs}"


class ProbeNoise(_Frozen):
    """Disturbance of a probe by other programs on the machine.

    rounds: Number of measured rounds.
    void: Number of rounds with too much disturbance. Their times are not used.
    other_cpu: Largest CPU share of other programs in a round that is used. None if unknown.
    noisy: True if times of a disturbed round are used, because the user allowed a noisy machine.
    """

    rounds: int
    void: int
    other_cpu: float | None
    noisy: bool


class Costs(_Frozen):
    """Result of a probe: costs of forwards and host work for some models on a machine.

    Attributes:
        machine: Fingerprint of the machine (`measure.machine`).
        models: Facts about each model by role, such as `label`, `sha256` and `n_layers`.
        setup: Device, dtype and threads.
        quietness: Disturbance by other programs.
        curves: Forward times by role ("target", "draft") or by kind of head ("eagle3").
        host: Host costs of steps in which the draft model drafts a chain, and of steps without a
            draft.
        hosts: Host costs by method. The key `TREES` has the host costs of steps in which the draft
            model drafts a tree. In version 3 of the file, the keys are models instead of methods.
        batch: Costs of batches. None if they were not measured.
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
        """Return the host time of one or several steps in ns.

        Args:
            drafts: Number of draft forwards in these steps.
            nodes: Number of drafted tokens that these steps verify.
            steps: Number of steps.
            method: Key in `hosts`. If there is no such key, `host` is used.
        """
        host = self.hosts.get(method, self.host)
        return host.step * steps + host.draft * drafts + host.node * nodes

    def covers_models(self, models: Mapping[str, str]) -> bool:
        """Return True if the probe measured all of these models.

        Args:
            models: Role -> SHA-256 of the weights.
        """
        ours = {role: facts.get("sha256") for role, facts in self.models.items()}
        return models.items() <= ours.items()

    @property
    def label(self) -> str:
        """Name of the processor and the setup, for display."""
        hardware = _CostMachine.model_validate(self.machine).hardware
        on_cpu = self.setup.device == "cpu" or not hardware.accelerators
        return f"{hardware.cpu if on_cpu else hardware.accelerators[0].name}, {self.setup}"

    @property
    def facts(self) -> dict[str, Any]:
        """Return the machine, label, date and noise of the probe, for JSON output."""
        return {
            "machine": self.machine.get("id"),
            "label": self.label,
            "created_utc": self.created_utc,
            "noisy": self.quietness.noisy,
        }

    def save(self, path: Path, *, overwrite: bool = False, tracked: bool = False) -> None:
        """Write the costs to a file atomically.

        Args:
            path: Path of the file. An existing file with costs is replaced.
            overwrite: True also replaces a file that specbench did not write.
            tracked: True stores the hash of the file, so that specbench can detect changes by the
                user. It does not replace a file that the user changed.

        Raises:
            UsageError: the file cannot be written or must not be replaced.
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
            UsageError: the file does not exist, is not a cost file, is damaged, or was written by a
                newer version of specbench.
        """
        again = f"{PROBE} --out {path.name}"
        try:
            data = json.loads(files.read_text(path, MAX_BYTES))
            json.dumps(data, ensure_ascii=False).encode()  # raises ValueError for invalid Unicode
        except OSError as error:
            raise UsageError(f"cannot read costs from {path}: {error.strerror}", again) from error
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path} is not a cost file: {error}", again) from error
        schema = data.get("schema") if isinstance(data, dict) else None
        if not isinstance(schema, int) or "curves" not in data:
            raise UsageError(f"{path} is not a cost file: it has no schema or no curves", again)
        if schema > SCHEMA:
            raise UsageError(
                f"{path} has schema {schema}; this specbench reads schemas up to {SCHEMA}",
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
    """Return the path of a cost file in the user's cache.

    Args:
        machine_id: Id of the machine (`measure.machine`).
        models: Facts of the models by role, with `sha256`.
        setup: Device, dtype and threads.
    """
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
    """Return the best costs in the user's cache for a machine, models and a setup, or None.

    The best costs cover the most heads. If several cost files cover equally many heads, return the
    newest.

    Args:
        machine_id: Id of the machine (`measure.machine`).
        models: Role -> SHA-256 of the weights. The costs must cover all of these models.
        setup: Device, dtype and threads. The setup of the costs must be equal.
        heads: Kind of a draft head -> SHA-256. Costs may lack some of these heads.
    """
    suitable = []
    for path in _cache().glob("*.json"):
        try:
            costs = Costs.load(path)
        except UsageError:
            continue  # the file is damaged, or a newer version of specbench wrote it
        if (
            costs.machine.get("id") == machine_id
            and costs.setup == setup
            and costs.covers_models(models)
        ):
            suitable.append(costs)
    wanted = (heads or {}).items()

    def rank(costs: Costs) -> tuple[int, str]:
        return sum(costs.covers_models(dict([head])) for head in wanted), costs.created_utc

    return max(suitable, key=rank, default=None)


def _cache() -> Path:
    return files.cache_folder() / "costs"


def interpolate(line: PointLine, x: float) -> float:
    """Return the value at x of a piecewise linear function through some points.

    Before the first point, the value is constant. After the last point, the slope of the last
    segment continues. This slope counts as at least 0, because more work cannot cost less.
    """
    if x <= line[0][0] or len(line) == 1:
        return line[0][1]
    right = min(bisect_right(line, x, key=lambda point: point[0]), len(line) - 1)
    (x0, y0), (x1, y1) = line[right - 1], line[right]
    if x >= x1:
        return y1 + max(0.0, (y1 - y0) / (x1 - x0)) * (x - x1)
    return y0 + (y1 - y0) * ((x - x0) / (x1 - x0))


def _lines(points: Iterable[CostPoint]) -> list[tuple[int, PointLine]]:
    """Group points into lines, one per context length, by increasing context length.

    A line maps numbers of new tokens to times. If two points have the same context and number of
    tokens, the last one is used.
    """
    lines: dict[int, dict[float, float]] = {}
    for point in points:
        lines.setdefault(point.context, {})[point.n_tokens] = point.ns
    return [(context, sorted(lines[context].items())) for context in sorted(lines)]


def _is_costs(content: bytes) -> bool:
    """Return True if a file has content that `Costs.save` of any version wrote."""
    return {"schema", "machine", "curves", "host"} <= files.json_object(content).keys()


@contextmanager
def _report_errors(path: Path) -> Iterator[None]:
    """Create the folder of a file. Turn an OSError in the `with` block into a UsageError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UsageError(
            f"cannot write the costs to {path}: {error.strerror or error}",
            "choose another --out FILE, or set SPECBENCH_CACHE to a folder with write permission",
        ) from error


def check_writable(path: Path, *, overwrite: bool = False) -> None:
    """Raise UsageError if costs cannot be saved to a file. A probe calls this before it starts."""
    with _report_errors(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        tempfile.TemporaryFile(dir=path.parent).close()
        files.check_listed(path, overwrite=overwrite)


class ProbeDifference(_Frozen):
    """Difference between two probes in the time of one forward.

    name: Description of the forward, such as "target, 4 tokens after 256".
    """

    name: str
    first_ns: float
    second_ns: float

    @property
    def relative(self) -> float:
        """Relative difference |second - first| / first. `first` counts as at least 1 ns."""
        return abs(self.second_ns - self.first_ns) / max(self.first_ns, 1.0)


def compare_probes(first: Costs, second: Costs) -> list[ProbeDifference]:
    """Return the forwards that both probes timed, with the largest relative difference first."""
    first_points, second_points = _named_points(first), _named_points(second)
    differences = [
        ProbeDifference(name=name, first_ns=ns, second_ns=second_points[name])
        for name, ns in first_points.items()
        if name in second_points
    ]
    return sorted(differences, key=lambda each: -each.relative)


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
    batches = costs.batch.points if costs.batch else ()
    return named | {f"host, {at.sequences} together, {at.name}": at.ns for at in batches}
