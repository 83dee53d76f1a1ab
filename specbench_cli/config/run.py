"""Settings of a run, as one immutable and validated model. The manifest of a run stores them."""

from __future__ import annotations

import math
import re
from pathlib import Path
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
from specbench_cli.config.contrast import parse_contrast
from specbench_cli.config.devices import parse_devices
from specbench_cli.config.options import DECODING, MEASURING, OUTPUT, TRUST, WHAT, Option
from specbench_cli.config.problems import first_duplicate, shorten
from specbench_cli.errors import MAX_TEXT_LENGTH

DEFAULT_METHODS = ("vanilla", "sps", "pld", "hf:vanilla", "hf:assisted")
"""Methods that are measured by default."""

Rule = Literal["greedy", "rejection", "block", "coupled"]
"""Verification rule, which determines the distribution of the emitted tokens."""

Verify = Rule | Literal["replay"]
"""Verification rule, or "replay": all methods emit vanilla's tokens. Records: `sampling`."""

SAMPLED_VERIFY = ("rejection", "block", "coupled")
"""Rules that need a temperature above 0."""

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Short names of the dtypes."""


MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e6
"""Lowest temperature above 0, and highest temperature."""
MAX_DIGITS = 300
"""Maximum number of digits of a number. Longer numbers do not fit into a float."""
MAX_METHODS = 128
"""Maximum number of methods in a run or table, limited because all pairs are compared."""
MAX_NAMES = 10_000
"""Maximum length of any other list of names, such as tasks."""
MIN_TOP_P = 1e-9
"""Lowest top-p. float32 rounds much lower values to 0, which would keep no token."""


def _check_number(value: Any) -> Any:
    """Reject booleans, NaN and infinity. YAML parses `yes` as True, which is a number in Python."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not yes or no")
    digits = len(value.strip()) if isinstance(value, str) and value.strip().isdecimal() else 0
    if digits > MAX_DIGITS:
        raise ValueError(f"must have at most {MAX_DIGITS} digits, got {digits}")
    try:
        finite = math.isfinite(float(value))
    except (TypeError, ValueError, OverflowError):
        return value  # the field's own check rejects it
    if not finite:
        raise ValueError(f"must be a finite number, got {shorten(str(value))}")
    return value


def _check_temperature(value: float) -> float:
    """Raise ValueError if a temperature is too low or too high for float32 logits.

    Decoding divides the logits by the temperature. If it is too low, rounding errors dominate the
    quotients, and decoding is greedy. If it is too high, all tokens are almost equally likely.
    """
    if 0 < value < MIN_TEMPERATURE:
        raise ValueError(f"must be 0 (greedy) or at least {MIN_TEMPERATURE}, got {value}")
    if value > MAX_TEMPERATURE:
        raise ValueError(f"must be at most {MAX_TEMPERATURE:g}, got {value}")
    return value


def _device_of(place: str) -> str:
    """Return the device without its CPU cores, e.g. `cpu` for `cpu:0-3`."""
    return "cpu" if place.startswith("cpu") else place


def _to_list(value: Any) -> Any:
    """Return a list that contains the value if it is a text. Return any other value unchanged."""
    return [value] if isinstance(value, str) else value


Number = Annotated[int, BeforeValidator(_check_number), Field(lt=2**63)]
Real = Annotated[float, BeforeValidator(_check_number), Field(allow_inf_nan=False)]
Words = Annotated[list[str], BeforeValidator(_to_list), Field(max_length=MAX_NAMES)]


class MethodChoice(BaseModel):
    """A method to measure, its label and its parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1)
    label: str = Field("", min_length=1, max_length=MAX_TEXT_LENGTH)
    params: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _accept_name_only(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value, "label": value}
        if isinstance(value, dict) and "label" not in value:
            return {**value, "label": value.get("name", "")}
        if not isinstance(value, dict | cls):
            got = shorten(repr(value))
            raise ValueError(
                f"must contain names, or mappings with name, label and params; got {got}"
            )
        return value


def _check_load(value: str) -> str:
    Arrivals.parse_sweep(value)
    return value


def parse_size(text: str) -> int:
    """Return the number of bytes of a size like `2GB`, `500MiB` or `1500000`.

    Raises:
        ValueError: The text is not a size.
    """
    try:
        size = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        size = 0
    if size < 1:
        raise ValueError(
            f"must be a size above 0 such as 2GB, 500MB or 1.5GiB, got {shorten(repr(text))}"
        )
    return size


def _check_size(value: str) -> str:
    parse_size(value)
    return value


class RunConfig(BaseModel):
    """Settings of a run. Fields are the keys of a config file, and each has an `Option`.

    The default of `verify` is "greedy" at temperature 0, else "rejection". `targets` and `drafts`
    describe one run per pair of models (see `plan.matrix`). `devices` applies to methods that draft
    in parallel with the target. All other methods use `device` and `threads`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    methods: Annotated[
        list[MethodChoice],
        Option(
            WHAT,
            "NAME",
            "Methods to measure. Repeat the option or separate names by commas.",
            default=", ".join(DEFAULT_METHODS),
            short="-m",
            complete="specbench_cli.registry:entries",
        ),
    ] = Field(min_length=1, max_length=MAX_METHODS)
    tasks: Annotated[
        Words,
        Option(
            WHAT,
            "NAME",
            "Task names or files (.jsonl, .json, .csv, .txt, .yaml).",
            short="-t",
            complete="specbench_cli.tasks:task_names",
        ),
    ] = Field(["mini"], min_length=1)
    target: Annotated[
        str,
        Option(
            WHAT,
            "MODEL",
            "Target model: short name, Hugging Face id, folder or GGUF file. embedded: a small"
            " model that is part of specbench.",
            complete="specbench_cli.models:model_names",
        ),
    ] = Field("embedded", min_length=1)
    draft: Annotated[
        str | None,
        Option(
            WHAT,
            "MODEL",
            "Draft model, in the same forms as --target.",
            default="known for the target",
        ),
    ] = Field(None, min_length=1)
    targets: Annotated[
        Words,
        Option(
            WHAT,
            "MODEL",
            "Measure several targets, one run each, in one table.",
            default="--target",
            complete="specbench_cli.models:model_names",
        ),
    ] = []
    drafts: Annotated[
        Words,
        Option(
            WHAT,
            "MODEL",
            "Measure several draft models per target.",
            default="--draft",
            complete="specbench_cli.models:model_names",
        ),
    ] = []
    limit: Annotated[
        Number | None,
        Field(ge=1),
        Option(
            WHAT,
            "N",
            "Maximum number of prompts per task, spread over its categories. A conversation of"
            " several turns counts once.",
            default="all; 12 for mini",
        ),
    ] = None
    category: Annotated[
        Words,
        Option(
            WHAT,
            "NAME",
            "Use only prompts of these categories or task families, e.g. translation.",
            default="all",
        ),
    ] = []
    prompts: Annotated[
        Words, Option(WHAT, "ID", "Use only these prompts, e.g. mini/qa-003.", default="all")
    ] = []
    set: Annotated[
        dict[str, dict[str, Any]],
        Option(WHAT, "METHOD.PARAM=VALUE", "Set a method parameter, e.g. sps.length=7."),
    ] = {}
    sweep: Annotated[
        dict[str, dict[str, list[Any]]],
        Option(
            WHAT,
            "METHOD.PARAM=VALUES",
            "Measure a method once per value, e.g. sps.length=1:6:1 or sps.length=3,5,7. With"
            " several sweeps of one method, measure all combinations of their values.",
        ),
    ] = {}
    tune: Annotated[
        Number | None,
        Field(ge=2),
        Option(
            WHAT,
            "[N]",
            "Tune each method's parameters over N candidates (8 if N is omitted) on development"
            " prompts, then measure on the other prompts.",
            default="off",
        ),
    ] = None
    tune_by: Annotated[
        Literal["time", "forwards"],
        Option(
            WHAT,
            "time|forwards",
            "Criterion for --tune: time per token, or forwards weighted by model size, which are"
            " free of timing noise.",
        ),
    ] = "time"
    profile: Annotated[
        str | None,
        Option(
            WHAT,
            "NAME",
            "Use a named set of settings, listed below.",
            complete="specbench_cli.config.profile:profiles",
        ),
    ] = None
    plugins: Annotated[Words, Option(WHAT, "FILE", "Load methods from a Python file.")] = []
    temperature: Annotated[
        Real,
        AfterValidator(_check_temperature),
        Option(DECODING, "T", "Sampling temperature. 0 means greedy decoding."),
    ] = Field(0.0, ge=0)
    top_p: Annotated[Real, Option(DECODING, "P", "Top-p (nucleus) sampling. 1 disables it.")] = (
        Field(1.0, ge=MIN_TOP_P, le=1)
    )
    top_k: Annotated[Number, Option(DECODING, "K", "Top-k sampling. 0 disables it.")] = Field(
        0, ge=0
    )
    verify: Annotated[
        Verify,
        Option(
            DECODING,
            "RULE",
            "Verification rule. rejection (speculative sampling) and block keep the target's"
            " distribution. coupled: all methods use the same random noise, so every lossless"
            " method generates vanilla's text. replay: every method, at any temperature, must emit"
            " vanilla's stored tokens. Its output says nothing about correctness, but all"
            " methods decode the same tokens, so counters and times can be compared directly.",
            default="rejection",
            choices=("rejection", "coupled", "block", "replay"),
        ),
    ]
    grammar: Annotated[
        str | None,
        Option(
            DECODING,
            "GRAMMAR",
            "Constrain every output to a grammar: json (any object) or a file: .json (a JSON"
            " schema), .lark, .gbnf or .regex.",
        ),
    ] = Field(None, min_length=1)
    contrast: Annotated[
        dict[str, float] | None,
        BeforeValidator(parse_contrast),
        Option(
            DECODING,
            "SETTINGS",
            "Decode contrastively (USCD): where the target is unsure, contrast its logits with"
            " those of a shortened prompt. E.g. beta=0.5,keep=0.5,below=0.45,floor=0.1. Paper and"
            " keys: docs/how-to/contrast.md.",
        ),
    ] = None
    acceptance: Annotated[
        Real | None,
        Field(ge=0, le=1),
        Option(
            DECODING,
            "P|RUN",
            "For targets with random weights (e.g. --target shape:llama-2-7b): accept each drafted"
            " token with probability P, or at the acceptance rate of an earlier run.",
            default="as the random weights decide",
        ),
    ] = None
    max_new_tokens: Annotated[
        Number | None,
        Field(ge=1),
        Option(
            DECODING,
            "N",
            "Maximum number of new tokens per turn.",
            default="the task's; 64 in the default run",
        ),
    ] = None
    batch: Annotated[
        Number, Option(DECODING, "N", "Number of prompts decoded together (batch size).")
    ] = Field(1, ge=1)
    prefill_chunk: Annotated[
        Number,
        Option(
            DECODING,
            "N",
            "Maximum number of prompt tokens per forward, with --batch.",
        ),
    ] = Field(256, ge=1)
    load: Annotated[
        Annotated[str, AfterValidator(_check_load)] | None,
        Option(
            DECODING,
            "ARRIVALS",
            "Measure latency and throughput under load. Arrivals: poisson:RATE (RATE prompts per"
            " second; several rates as 1,2,4 or START:STOP:STEP), burst:SIZE:SECONDS (SIZE prompts"
            " every SECONDS) or trace:FILE (one time in seconds per line). At most --batch prompts"
            " are decoded together.",
        ),
    ] = None
    memory_budget: Annotated[
        Annotated[str, AfterValidator(_check_size)] | None,
        Option(
            DECODING,
            "SIZE",
            "Memory limit, e.g. 2GB or 500MB. Batch size, draft length and tree size are lowered"
            " until the predicted memory fits.",
        ),
    ] = None
    raw: Annotated[bool, Option(DECODING, None, "Do not apply a chat template.")] = False
    seed: Annotated[Number, Option(DECODING, "N", "Random seed.")] = Field(0, ge=0)
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        Option(DECODING, "DTYPE", "Weight type: float32, bfloat16 or float16.", as_text=True),
    ] = "float32"
    device: Annotated[str, Option(DECODING, "DEVICE", "Device: auto, cpu, cuda or cuda:N.")] = (
        "auto"
    )
    graphs: Annotated[
        Literal["auto", "on", "off"],
        Option(
            DECODING,
            "auto|on|off",
            "Run forwards of up to 64 tokens as CUDA graphs. auto: on every GPU.",
        ),
    ] = "auto"
    devices: Annotated[
        dict[str, str] | None,
        BeforeValidator(parse_devices),
        Option(
            DECODING,
            "PLACES",
            "Devices of methods that draft in parallel with the target, e.g."
            " target=cpu:0-3,draft=cpu:4-7 or target=cuda:0,draft=cuda:1.",
            default="half of the cores each; two streams on a GPU",
        ),
    ] = None
    repeats: Annotated[
        Number, Option(MEASURING, "N", "Repeat the run N times, each in a fresh process.")
    ] = Field(1, ge=1)
    threads: Annotated[
        Number | None,
        Field(ge=1),
        Option(MEASURING, "N", "Number of CPU threads.", default="chosen by PyTorch"),
    ] = None
    allow_noise: Annotated[
        bool,
        Option(MEASURING, None, "Keep timings taken while other processes used the CPU."),
    ] = False
    judge: Annotated[
        Literal["sample", "all"],
        Option(
            MEASURING,
            "sample|all",
            "Vanilla outputs to check against transformers: those of the first prompt of each task"
            " family (sample), or all. No language model grades outputs.",
        ),
    ] = "sample"
    controls: Annotated[
        Literal["auto", "none"],
        Option(
            MEASURING,
            "auto|none",
            "Add controls for lossy methods: the draft model alone, the lossless method with the"
            " same drafts, and random acceptance at the same rate.",
        ),
    ] = "auto"
    run_code: Annotated[
        bool,
        Option(
            MEASURING,
            None,
            "Run generated code to score it (humaneval, mbpp), in sandboxed processes without"
            " access to files, the network or child processes.",
        ),
    ] = False
    uncontained: Annotated[
        bool,
        Option(
            MEASURING,
            None,
            "With --run-code: run the code without a sandbox, under resource limits only and with"
            " your permissions, if no sandbox is available.",
        ),
    ] = False
    isolation: Annotated[
        Literal["process", "none"],
        Option(
            MEASURING,
            "process|none",
            "Run plug-ins in a separate process, or in the main process (none), e.g. for a"
            " debugger.",
        ),
    ] = "process"
    executor: Annotated[
        Literal["local", "ray"],
        Option(
            MEASURING,
            "local|ray",
            "Run on this machine, or distribute the prompts over a Ray cluster"
            " (docs/how-to/workers.md).",
        ),
    ] = "local"
    timeout_per_prompt: Annotated[
        Real, Option(MEASURING, "SECONDS", "Time limit per prompt and method.")
    ] = Field(600.0, gt=0, le=1e9)
    stop_after: Annotated[
        Real | None,
        Field(gt=0),
        Option(
            MEASURING,
            "SECONDS",
            "End each repeat after this time, as soon as the current prompts are finished.",
        ),
    ] = None
    probe: Annotated[
        Number | None,
        Field(ge=1),
        Option(
            MEASURING,
            "N",
            "Measure the times of single forward passes between prompts, in N rounds, for"
            " specbench predict.",
        ),
    ] = None

    @model_validator(mode="before")
    @classmethod
    def _derive_verify(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("verify") is not None:
            return values
        try:
            sampled = float(values.get("temperature", 0)) > 0
        except (TypeError, ValueError, OverflowError):
            sampled = False  # the field's own check rejects it
        return {**values, "verify": "rejection" if sampled else "greedy"}

    @property
    def rule(self) -> Rule:
        """Verification rule of the run. In a replay, it is the rule by which vanilla chooses
        tokens.
        """
        if self.verify == "replay":
            return "rejection" if self.temperature > 0 else "greedy"
        return self.verify

    @property
    def main_device(self) -> str:
        """Device of the target, and of all work to which `devices` assigns no other device.

        One of auto, cpu, cuda and cuda:N.
        """
        return _device_of(self.devices["target"]) if self.devices else self.device

    @field_validator("device")
    @classmethod
    def _check_device(cls, value: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d{1,4})?", value):
            raise ValueError(f"must be auto, cpu, cuda or cuda:N, got {shorten(repr(value))}")
        return value

    @model_validator(mode="after")
    def _check_target_device(self) -> RunConfig:
        if self.devices is None or self.device == "auto":
            return self
        asked = "cuda:0" if self.device == "cuda" else self.device
        if asked != _device_of(self.devices["target"]):
            raise ValueError(
                f"device {self.device} and devices target={self.devices['target']} differ, but the"
                " target is loaded only once: omit one of them or make them equal"
            )
        return self

    @field_validator("dtype", mode="before")
    @classmethod
    def _full_dtype_name(cls, value: Any) -> Any:
        return DTYPES.get(value, value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_verify(self) -> RunConfig:
        if self.temperature == 0 and self.verify in SAMPLED_VERIFY:
            raise ValueError(
                f"verify {self.verify!r} needs a temperature above 0, where decoding is not greedy:"
                " omit it, or set a temperature such as 0.8"
            )
        if self.temperature > 0 and self.verify == "greedy":
            allowed = f"{', '.join(SAMPLED_VERIFY)} or replay"
            raise ValueError(f"verify 'greedy' needs temperature 0; above 0, choose {allowed}")
        return self

    @model_validator(mode="after")
    def _check_tune_by(self) -> RunConfig:
        if self.tune is None and self.tune_by != "time":
            raise ValueError(f"tune_by {self.tune_by!r} needs --tune; add --tune 8")
        return self

    @model_validator(mode="after")
    def _check_executor(self) -> RunConfig:
        if self.executor == "local":
            return self
        numbered = self.device.startswith("cuda:")
        alone = {
            f"load {self.load}, which needs the clock of one machine": self.load is not None,
            "tune: tune with --executor local, and pass the result with --set": bool(self.tune),
            "devices, which names devices of one machine": self.devices is not None,
            f"device {self.device}: Ray assigns a GPU to each worker, so use cuda": numbered,
            "probe, which measures one machine": self.probe is not None,
        }
        if why := next((words for words, given in alone.items() if given), None):
            raise ValueError(
                f"executor {self.executor} distributes prompts over several machines; omit {why}"
            )
        return self

    @model_validator(mode="after")
    def _check_memory_budget(self) -> RunConfig:
        if self.contrast is not None and self.memory_budget is not None:
            raise ValueError(
                f"memory_budget {self.memory_budget} does not include the KV states that contrast"
                " needs for shortened prompts: omit memory_budget or contrast"
            )
        if self.probe is not None and self.memory_budget is not None:
            raise ValueError(
                f"memory_budget {self.memory_budget} does not include the KV states of a probe:"
                " omit memory_budget or probe"
            )
        return self

    @model_validator(mode="after")
    def _check_stop_after(self) -> RunConfig:
        if self.stop_after is not None and (self.load is not None or self.executor != "local"):
            raise ValueError(
                "stop_after cannot be combined with load or with an executor other than local: omit"
                " one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_uncontained(self) -> RunConfig:
        if self.uncontained and not self.run_code:
            raise ValueError("uncontained needs run_code: add --run-code")
        return self

    @field_validator("targets", "drafts")
    @classmethod
    def _check_duplicates(cls, names: list[str]) -> list[str]:
        if (twice := first_duplicate(names)) is not None:
            raise ValueError(f"has {twice} twice")
        return names

    @model_validator(mode="after")
    def _check_one_or_several(self) -> RunConfig:
        for one, several in (("target", self.targets), ("draft", self.drafts)):
            if several and one in self.model_fields_set:
                raise ValueError(f"{one} and {one}s cannot be combined: omit one of them")
        return self

    @model_validator(mode="after")
    def _check_labels(self) -> RunConfig:
        if (twice := first_duplicate(choice.label for choice in self.methods)) is not None:
            raise ValueError(f"two methods have the label {twice!r}; choose another label for one")
        return self


class RunInvocation(BaseModel):
    """Options of `specbench run` that are not settings of the run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: Annotated[
        Path | None,
        Option(WHAT, "FILE", "Read settings from a YAML file.", default="./specbench.yaml"),
    ] = None
    in_turn: Annotated[
        Path | None,
        Option(
            MEASURING,
            "FILE",
            "Take turns with other runs that name the same lock file: one run measures for a second"
            " while the others wait. So the compared runs see the same conditions.",
        ),
    ] = None
    out: Annotated[
        Path | None,
        Option(OUTPUT, "DIR", "Output folder.", default="results/runs/NAME", short="-o"),
    ] = None
    format: Annotated[
        Literal["table", "tsv", "json"],
        Option(OUTPUT, "table|tsv|json", "Output format. json prints one event per line."),
    ] = "table"
    as_json: Annotated[bool, Option(OUTPUT, None, "Same as --format json.", name="--json")] = False
    dry_run: Annotated[bool, Option(OUTPUT, None, "Print the plan and exit.")] = False
    resume: Annotated[
        Path | None,
        Option(OUTPUT, "RUN", "Resume an interrupted run, given its folder or `last`."),
    ] = None
    force: Annotated[
        bool,
        Option(
            OUTPUT,
            None,
            "With --resume: continue even if the program, the machine or the data changed. The"
            " report then has a note.",
        ),
    ] = False
    trust: Annotated[bool, TRUST] = False
    only_pass: Annotated[
        int | None, Option(OUTPUT, "N", "Measure only this repeat.", hidden=True)
    ] = None
    parent: Annotated[
        int | None, Option(OUTPUT, "PID", "Process id of the parent.", hidden=True)
    ] = None
