"""What a run is asked to do: one frozen, validated object, stored in the manifest as it is."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from specbench_cli.config.arrivals import Arrivals
from specbench_cli.config.contrast import contrasting
from specbench_cli.config.devices import places

Rule = Literal["greedy", "rejection", "block", "coupled"]
"""How tokens are decided."""

Verify = Rule | Literal["replay"]
"""How drafts are verified; the `sampling` word of the records."""

SAMPLED_VERIFY = ("rejection", "block", "coupled")
"""The rules that apply above temperature 0 alone."""

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Short names of the dtypes."""


COLDEST, HOTTEST = 1e-3, 1e6
"""The lowest temperature above 0, and the highest."""
SMALLEST_P = 1e-9
"""The smallest top-p: float32 holds what is far below as 0, which would keep no token."""


def _number(value: Any) -> Any:
    """YAML's `yes` is no number, though Python's True is one; and nan passes comparisons."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not yes or no")
    try:
        finite = math.isfinite(float(value))
    except (TypeError, ValueError, OverflowError):
        return value  # no float: the field's own check says so
    if not finite:
        raise ValueError(f"must be a finite number, got {value}")
    return value


def _workable(value: float) -> float:
    """A temperature below the coldest leaves float32 no digits for logits over it, and greedy
    decoding is what it comes to; above the hottest all tokens are as good as equally likely, and
    one that float32 cannot hold leaves no numbers."""
    if 0 < value < COLDEST:
        raise ValueError(f"must be 0, which is greedy, or at least {COLDEST}, got {value}")
    if value > HOTTEST:
        raise ValueError(f"must be at most {HOTTEST:g}, got {value}")
    return value


def _device_of(place: str) -> str:
    """The device of a place, without the cores."""
    return "cpu" if place.startswith("cpu") else place


def _listed(value: Any) -> Any:
    """A single word stands for a list of one."""
    return [value] if isinstance(value, str) else value


Number = Annotated[int, BeforeValidator(_number), Field(lt=2**63)]
Real = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Words = Annotated[list[str], BeforeValidator(_listed)]


class MethodChoice(BaseModel):
    """One row of the result: a method, what the row is called, and the parameters passed to it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1)
    label: str = Field("", min_length=1)
    params: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _named_by_one_word(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value, "label": value}
        if isinstance(value, dict) and "label" not in value:
            return {**value, "label": value.get("name", "")}
        if not isinstance(value, dict | cls):
            raise ValueError(f"must hold names, or mappings of name, label, params; got {value!r}")
        return value


def _known_load(value: str) -> str:
    Arrivals.sweep(value)
    return value


def nbytes(text: str) -> int:
    """The bytes that a size stands for: `2GB`, `500MiB`, `1500000`.

    Raises:
        ValueError: it stands for none.
    """
    try:
        size = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        size = 0
    if size < 1:
        raise ValueError(f"must be a size above 0 such as 2GB, 500MB or 1.5GiB, got {text!r}")
    return size


def _known_budget(value: str) -> str:
    nbytes(value)
    return value


class RunConfig(BaseModel):
    """Everything that decides what `specbench run` measures, by the names of a config file's keys.

    `targets` and `drafts` stand for a run of each pair (`execute.planning.matrix`). `limit` is of
    each task. `verify` may be left out: it is "greedy" at temperature 0 and "rejection" above.
    `devices` are for methods whose workers compute at once; all others use `device` and
    `threads`. `graphs`: whether forwards of few rows are replayed from CUDA graphs; "auto": on
    every GPU. `prefill_chunk`: most tokens of prompts that a forward reads beside the drafts of a
    batch's others. `acceptance`: the chance that a draft's first choice is accepted, imposed on
    shapes. `grammar`: what all outputs are held to, a built-in one's name or a file.
    `contrast`: what the target's logits are contrasted by, all of its settings.
    `judge`: which of vanilla's outputs transformers' own module is asked about: a sample, or
    all. `controls`: whether lossy rows bring theirs. `isolation`: whether plug-ins decode in a
    process of their own, or in the run's. `executor`: who measures: this machine, or the workers
    of a Ray cluster. `timeout_per_prompt`: seconds after which a method has failed on a prompt.
    `prompts`: the ids of the questions that are asked. `stop_after`: seconds of a pass after which
    no further prompt is begun. `probe`: rounds of the cost probe between the prompts.
    `uncontained`: whether code may be run under limits alone, without namespaces. `profile` names
    the settings that took the place of the defaults
    (`config.profile`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    methods: list[MethodChoice] = Field(min_length=1)
    tasks: Words = Field(["mini"], min_length=1)
    target: str = Field("embedded", min_length=1)
    draft: str | None = Field(None, min_length=1)
    targets: Words = []
    drafts: Words = []
    limit: Annotated[Number | None, Field(ge=1)] = None
    category: Words = []
    prompts: Words = []
    seed: Number = Field(0, ge=0)
    temperature: Annotated[Real, AfterValidator(_workable)] = Field(0.0, ge=0)
    top_p: Real = Field(1.0, ge=SMALLEST_P, le=1)
    top_k: Number = Field(0, ge=0)
    verify: Verify
    grammar: str | None = Field(None, min_length=1)
    contrast: Annotated[dict[str, float] | None, BeforeValidator(contrasting)] = None
    acceptance: Annotated[Real | None, Field(ge=0, le=1)] = None
    max_new_tokens: Annotated[Number | None, Field(ge=1)] = None
    repeats: Number = Field(1, ge=1)
    batch: Number = Field(1, ge=1)
    prefill_chunk: Number = Field(256, ge=1)
    load: Annotated[str, AfterValidator(_known_load)] | None = None
    memory_budget: Annotated[str, AfterValidator(_known_budget)] | None = None
    threads: Annotated[Number | None, Field(ge=1)] = None
    device: str = "auto"
    devices: Annotated[dict[str, str] | None, BeforeValidator(places)] = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    graphs: Literal["auto", "on", "off"] = "auto"
    raw: bool = False
    allow_noise: bool = False
    run_code: bool = False
    uncontained: bool = False
    judge: Literal["sample", "all"] = "sample"
    controls: Literal["auto", "none"] = "auto"
    plugins: Words = []
    isolation: Literal["process", "none"] = "process"
    executor: Literal["local", "ray"] = "local"
    timeout_per_prompt: Real = Field(600.0, gt=0, le=1e9)
    stop_after: Annotated[Real | None, Field(gt=0)] = None
    probe: Annotated[Number | None, Field(ge=1)] = None
    set: dict[str, dict[str, Any]] = {}
    sweep: dict[str, dict[str, list[Any]]] = {}
    tune: Annotated[Number | None, Field(ge=2)] = None
    tune_by: Literal["time", "forwards"] = "time"
    profile: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _derive_verify(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("verify") is not None:
            return values
        try:
            sampled = float(values.get("temperature", 0)) > 0
        except (TypeError, ValueError, OverflowError):
            sampled = False  # no number: the field's own check says so
        return {**values, "verify": "rejection" if sampled else "greedy"}

    @property
    def rule(self) -> Rule:
        """How vanilla decides its tokens, which a replay hands to all others."""
        if self.verify == "replay":
            return "rejection" if self.temperature > 0 else "greedy"
        return self.verify

    @property
    def home(self) -> str:
        """Where the target is, and whatever has no place of its own: auto, cpu, cuda or cuda:N."""
        return _device_of(self.devices["target"]) if self.devices else self.device

    @field_validator("device")
    @classmethod
    def _known_device(cls, value: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
            raise ValueError(f"must be auto, cpu, cuda or cuda:N, got {value!r}")
        return value

    @model_validator(mode="after")
    def _target_is_in_one_place(self) -> RunConfig:
        if self.devices is None or self.device == "auto":
            return self
        asked = "cuda:0" if self.device == "cuda" else self.device
        if asked != _device_of(self.devices["target"]):
            raise ValueError(
                f"device {self.device} and devices target={self.devices['target']} differ, and the"
                " target is loaded once, for all methods: drop the one or change the other"
            )
        return self

    @field_validator("dtype", mode="before")
    @classmethod
    def _full_dtype_name(cls, value: Any) -> Any:
        return DTYPES.get(value, value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _verify_fits_temperature(self) -> RunConfig:
        if self.temperature == 0 and self.verify in SAMPLED_VERIFY:
            raise ValueError(
                f"verify {self.verify!r} applies above temperature 0, and at 0 decoding is greedy:"
                " drop it, or set a temperature such as 0.8"
            )
        if self.temperature > 0 and self.verify == "greedy":
            allowed = f"{', '.join(SAMPLED_VERIFY)} or replay"
            raise ValueError(f"verify 'greedy' is for temperature 0; above it choose {allowed}")
        return self

    @model_validator(mode="after")
    def _criterion_has_its_tuning(self) -> RunConfig:
        if self.tune is None and self.tune_by != "time":
            raise ValueError(f"tune_by {self.tune_by!r} says how --tune chooses; add --tune 8")
        return self

    @model_validator(mode="after")
    def _cluster_can_do_it(self) -> RunConfig:
        if self.executor == "local":
            return self
        numbered = self.device.startswith("cuda:")
        alone = {
            f"load {self.load}: requests arrive by one machine's clock": self.load is not None,
            "tune: tune by --executor local, and give what it chose with --set": bool(self.tune),
            "devices: they are one machine's": self.devices is not None,
            f"device {self.device}: Ray gives each worker a GPU of its own, say cuda": numbered,
            "probe: it is of one machine": self.probe is not None,
        }
        if why := next((words for words, given in alone.items() if given), None):
            raise ValueError(
                f"executor {self.executor} deals prompts to several machines; drop {why}"
            )
        return self

    @model_validator(mode="after")
    def _budget_knows_of_all_states(self) -> RunConfig:
        if self.contrast is not None and self.memory_budget is not None:
            raise ValueError(
                f"memory_budget {self.memory_budget} does not know of the state that a contrast's"
                " weakened prompts take: drop memory_budget, or contrast"
            )
        if self.probe is not None and self.memory_budget is not None:
            raise ValueError(
                f"memory_budget {self.memory_budget} does not know of the states that a probe"
                " takes: drop memory_budget, or probe"
            )
        return self

    @model_validator(mode="after")
    def _limit_is_between_prompts(self) -> RunConfig:
        if self.stop_after is not None and (self.load is not None or self.executor != "local"):
            raise ValueError(
                "stop_after ends a pass of this machine between two prompts: drop it, or load and"
                " executor"
            )
        return self

    @model_validator(mode="after")
    def _uncontained_is_said_of_code(self) -> RunConfig:
        if self.uncontained and not self.run_code:
            raise ValueError("uncontained says how code is run: add --run-code")
        return self

    @field_validator("targets", "drafts")
    @classmethod
    def _each_once(cls, names: list[str]) -> list[str]:
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"has {name} twice")
        return names

    @model_validator(mode="after")
    def _one_or_several(self) -> RunConfig:
        for one, several in (("target", self.targets), ("draft", self.drafts)):
            if several and one in self.model_fields_set:
                raise ValueError(f"both {one} and {one}s say what to run: drop one of the two")
        return self

    @model_validator(mode="after")
    def _labels_are_unique(self) -> RunConfig:
        labels = [choice.label for choice in self.methods]
        for label in labels:
            if labels.count(label) > 1:
                raise ValueError(f"two rows are called {label!r}; give one a label of its own")
        return self
