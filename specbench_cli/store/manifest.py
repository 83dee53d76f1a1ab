"""Types of `manifest.json`, which describes a run.

A key may be missing if an older version of specbench wrote the manifest. Unknown keys are kept
unchanged. Known keys must have the right type.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from specbench_cli.config.problems import format_first_problem
from specbench_cli.errors import UsageError, truncate
from specbench_cli.store.schema import SCHEMA, Count, Finite, Json, Name, Share

_ALLOW_EXTRA = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
_Positive = Annotated[Finite, Field(gt=0)]
_Hash = Annotated[str, Field(pattern=r"^[0-9a-f]+$")]

RESUME_FILE = ".resume.json"
"""Name of the file with the configuration of an unfinished run, to resume it.

The configuration may contain paths of this machine. So the file is removed once the run is
finished.
"""


def _check_timestamp(text: str) -> str:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"must be a time in ISO 8601 format, got {text!r:.60}") from None
    return text


_Timestamp = Annotated[str, AfterValidator(_check_timestamp)]
"""Timestamp in ISO 8601 format."""


class _MethodConfig(TypedDict, total=False):
    """Method in the configuration of a run."""

    __pydantic_config__ = _ALLOW_EXTRA  # type: ignore[misc]

    name: Name
    label: Name
    params: dict[str, Json]


class _EffectiveConfig(TypedDict, total=False):
    """Configuration of a run, as stored in its manifest. It may contain more keys.

    Only the keys that specbench reads are listed here. Their types are checked when a manifest is
    loaded.
    """

    __pydantic_config__ = _ALLOW_EXTRA  # type: ignore[misc]

    methods: list[_MethodConfig]
    tasks: list[Name]
    target: Name | None
    draft: Name | None
    limit: Annotated[Count, Field(ge=1)] | None
    category: list[Name] | None
    seed: Count
    temperature: Annotated[Finite, Field(ge=0)]
    top_p: Annotated[Finite, Field(gt=0, le=1)]
    top_k: Count
    verify: Name
    grammar: Name | None
    contrast: dict[Name, Finite] | None
    acceptance: Annotated[Finite, Field(ge=0, le=1)] | None
    max_new_tokens: Annotated[Count, Field(ge=1)] | None
    repeats: Annotated[Count, Field(ge=1)]
    batch: Annotated[Count, Field(ge=1)]
    prefill_chunk: Annotated[Count, Field(ge=1)]
    load: Name | None
    threads: Annotated[Count, Field(ge=1)] | None
    executor: Name
    device: Name
    devices: dict[str, Name] | None
    dtype: Name
    graphs: Name
    raw: bool
    sweep: dict[str, dict[str, list[Json]]]
    tune: Annotated[Count, Field(ge=2)] | None
    tune_by: Name


class _Config(TypedDict, total=False):
    __pydantic_config__ = _ALLOW_EXTRA  # type: ignore[misc]

    effective: _EffectiveConfig


class _Git(TypedDict, total=False):
    __pydantic_config__ = _ALLOW_EXTRA  # type: ignore[misc]

    commit: Name | None
    dirty: bool | None


class _HardwareFacts(TypedDict, total=False):
    __pydantic_config__ = _ALLOW_EXTRA  # type: ignore[misc]

    cpu: str | None
    cores: Annotated[Count, Field(ge=1)] | None
    memory_gib: Annotated[Finite, Field(ge=0)] | None
    accelerators: list[Json] | None


class _MachineFacts(TypedDict, total=False):
    __pydantic_config__ = _ALLOW_EXTRA  # type: ignore[misc]

    id: Name | None
    hardware: _HardwareFacts
    system: dict[str, Json]
    versions: dict[str, str | None]
    git: _Git | None


class _Weights(TypedDict, total=False):
    """Manifest entry about the weights of a model or a draft head."""

    __pydantic_config__ = _ALLOW_EXTRA  # type: ignore[misc]

    label: Name
    sha256: _Hash
    hash: str
    family: Name
    dtype: Name
    vocab_size: Annotated[Count, Field(ge=1)] | None
    n_layers: Annotated[Count, Field(ge=1)] | None
    hidden_size: Annotated[Count, Field(ge=1)] | None
    max_positions: Annotated[Count, Field(ge=1)] | None
    parameters: Count | None
    eos: list[Count]
    weight_bytes: Count
    engine: Name


class _MethodEntry(TypedDict):
    __pydantic_config__ = _ALLOW_EXTRA  # type: ignore[misc]

    label: Name
    method: NotRequired[Name]
    params: NotRequired[dict[str, Json]]
    source: NotRequired[str | None]
    timing_free: NotRequired[bool | None]
    state_scope: NotRequired[Literal["prompt", "run", "corpus"] | None]
    uses: NotRequired[list[Name] | None]
    accept: NotRequired[Name | None]
    workers: NotRequired[Annotated[Count, Field(ge=1)] | None]
    baseline: NotRequired[Name | None]
    control: NotRequired[bool | None]


class _Task(TypedDict):
    __pydantic_config__ = _ALLOW_EXTRA  # type: ignore[misc]

    name: Name
    version: NotRequired[str | int | None]
    sha256: NotRequired[_Hash]
    n_questions: NotRequired[Count]
    embedded: NotRequired[str | None]


class _Candidate(TypedDict):
    __pydantic_config__ = _ALLOW_EXTRA  # type: ignore[misc]

    params: dict[str, Json]
    cost: Finite | None
    chosen: bool


class _TunedMethod(TypedDict):
    __pydantic_config__ = _ALLOW_EXTRA  # type: ignore[misc]

    tried: Annotated[Count, Field(ge=1)]
    prompts: Count
    candidates: list[_Candidate]
    passed: dict[str, Json]


class _Tuning(TypedDict):
    __pydantic_config__ = _ALLOW_EXTRA  # type: ignore[misc]

    budget: Annotated[Count, Field(ge=2)]
    by: Literal["time", "forwards"]
    development: dict[str, Count]
    held_out: dict[str, Count]
    rows: dict[str, _TunedMethod]


class _NearTies(TypedDict):
    __pydantic_config__ = _ALLOW_EXTRA  # type: ignore[misc]

    chances: list[tuple[Name, Count, Share]]


class _Tolerance(TypedDict, total=False):
    __pydantic_config__ = _ALLOW_EXTRA  # type: ignore[misc]

    value: Annotated[Finite, Field(ge=0)]
    largest: Annotated[Finite, Field(ge=0)]
    positions: Count


class _Grammar(TypedDict):
    __pydantic_config__ = _ALLOW_EXTRA  # type: ignore[misc]

    name: Name
    sha256: _Hash
    library: Name


class _Memory(TypedDict, total=False):
    __pydantic_config__ = _ALLOW_EXTRA  # type: ignore[misc]

    weight_bytes: Count
    state_bytes: Count
    again: dict[Name, Count]
    peaks: dict[Name, Count]


class _Energy(TypedDict, total=False):
    __pydantic_config__ = _ALLOW_EXTRA  # type: ignore[misc]

    counters: list[Name]
    why_not: Name | None


class _StepCosts(TypedDict, total=False):
    __pydantic_config__ = _ALLOW_EXTRA  # type: ignore[misc]

    target_ns: _Positive
    relative: dict[str, dict[str, _Positive]]
    context: Count
    noisy: bool


class _FileDigest(TypedDict):
    """Size and SHA-256 of a file of a finished run."""

    __pydantic_config__ = _ALLOW_EXTRA  # type: ignore[misc]

    bytes: Count
    sha256: _Hash


class _Worker(TypedDict):
    __pydantic_config__ = _ALLOW_EXTRA  # type: ignore[misc]

    device: Name
    lost: NotRequired[str]


class Manifest(TypedDict, total=False):
    """Complete content of `manifest.json`."""

    __pydantic_config__ = _ALLOW_EXTRA  # type: ignore[misc]

    schema: Annotated[Count, Field(ge=1)]
    version: Name
    created_utc: _Timestamp
    finished_utc: _Timestamp
    status: Literal["running", "finished", "interrupted"]
    config: _Config
    config_sources: dict[str, str]
    machine: _MachineFacts
    versions: dict[str, str | None]
    git: _Git | None
    models: dict[Name, _Weights | None]
    heads: dict[Name, _Weights] | None
    rows: list[_MethodEntry] | None
    tuning: _Tuning | None
    method_files: dict[str, str | None] | None
    upper_bounds: list[Name] | None
    tasks: list[_Task]
    spoiled: Name
    synthetic: Name | None
    grammar: _Grammar | None
    containment: Literal["namespaces", "limits"] | None
    noisy: bool
    tolerance: _Tolerance | None
    near_ties: _NearTies | None
    leaks: dict[Name, str] | None
    left_out: dict[Name, str]
    aa_noise: Annotated[Finite, Field(ge=0)] | None
    memory: _Memory | None
    energy: _Energy | None
    program: dict[str, str | None] | None
    mixed: list[Name] | None
    dropped: dict[Name, str] | None
    forced: list[Name] | None
    runs: list[Json] | None
    row_files: dict[str, str | None] | None
    step_costs: _StepCosts | None
    workers: dict[Name, _Worker]
    line_digests: dict[Name, dict[_Hash, _Hash]]
    files: dict[Name, _FileDigest]


def parse(text: str) -> dict[str, Any]:
    """Parse the text of a manifest.

    Raises:
        UsageError: the schema is newer than the newest schema that this program can read.
        ValueError: the text is not a manifest. The message names the key and its value.
    """
    try:
        _manifest_adapter().validate_json(text)
    except ValidationError as error:
        raise ValueError(format_first_problem(error)) from None
    content: dict[str, Any] = json.loads(text)  # keeps the order of keys, and integers as integers
    # Truncate long strings, except in the keys that a resumed run compares with its configuration.
    found = {
        key: value if key in _COMPARED else truncate_texts(value) for key, value in content.items()
    }
    if found.get("schema", 0) > SCHEMA:
        raise UsageError(
            f"this run has schema {found['schema']}; this specbench reads up to {SCHEMA}",
            hint="pip install --upgrade specbench-cli",
        )
    _check_agreement(found)
    if "status" not in found:
        raise ValueError("it has no `status`")
    return found


_COMPARED = ("config", "program")


def truncate_texts(value: Any) -> Any:
    """Return a JSON value with every string truncated to `MAX_TEXT_LENGTH`."""
    if isinstance(value, str):
        return truncate(value)
    if isinstance(value, list):
        return [truncate_texts(each) for each in value]
    if isinstance(value, dict):
        return {truncate(key): truncate_texts(each) for key, each in value.items()}
    return value


@cache
def _manifest_adapter() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)


def _check_agreement(manifest: dict[str, Any]) -> None:
    """Raise ValueError if parts of a manifest contradict each other."""
    if "target" in (models := manifest.get("models", {})) and models["target"] is None:
        raise ValueError("models.target must be a mapping of keys to values, got None")
    for what, key in (("rows", "label"), ("tasks", "name")):
        names = [row[key] for row in manifest.get(what) or ()]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"{what} has {twice!r} twice")
    labels = {row["label"] for row in manifest.get("rows") or ()}
    for key, label in _find_labels(manifest) if labels else ():
        if label not in labels:
            raise ValueError(f"{key} names {label!r}, but rows has no such label")
    for role, model in models.items():
        largest, width = max((model or {}).get("eos") or [0]), (model or {}).get("vocab_size")
        if width is not None and largest >= width:
            raise ValueError(f"models.{role}.eos has {largest}, but there are {width} tokens")


def _find_labels(manifest: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each manifest key that names a method, together with the method's label."""
    for key in ("upper_bounds", "leaks", "dropped"):
        yield from ((key, label) for label in manifest.get(key) or ())
    for label in (manifest.get("tuning") or {}).get("rows") or ():
        yield "tuning.rows", label


def damaged_error(file: Path, why: object) -> UsageError:
    """Return the error for a file that is not a valid manifest."""
    return UsageError(f"{file} is damaged: {why}", hint="begin a new run: specbench run")
