"""Classes of inputs: how each is made, who reads it, and what must not be accepted."""

from __future__ import annotations

import json
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from mutate import bytes_changed, changed, line

from specbench_cli.comparison.baselines import baseline
from specbench_cli.comparison.baselines.from_run import read_run
from specbench_cli.comparison.compare import compare
from specbench_cli.errors import SpecbenchError
from specbench_cli.report import outputs
from specbench_cli.report.report_data import read_report_data
from specbench_cli.store.run_dir import RunDir
from specbench_cli.summary import summary

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "results/reference/default-2cores"
PARALLEL = ROOT / "results/reference/parallel-2cores"
RESAMPLES = 19
"""Resamples of a bootstrap whose result is ignored."""
FEW = 12
"""Number of records that are read where another file of the run is changed."""
LABELS = ("vanilla", "sps", "pld", "hf:vanilla", "hf:assisted")
"""Methods of the run whose lines are changed."""
REPORTED, WRITTEN = 0.3, 0.01
"""Shares of the accepted inputs for which a report, or every report format, is written."""


class Subject(ABC):
    """Class of inputs.

    `folder` is the folder to write into, which does not exist yet.
    """

    name: str
    inputs: ClassVar[int] = 1200
    """Default number of inputs, which take two to four seconds."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder

    def trial(self, rng: Random) -> tuple[bool, str | None]:
        """Return whether an input is accepted, and an error message or None. Any exception is a
        finding."""
        try:
            return True, self.tried(rng)
        except SpecbenchError:
            return False, None

    @abstractmethod
    def tried(self, rng: Random) -> str | None:
        """Make an input, have it read, and return an error message if it is wrongly accepted."""


def _parse_line(data: bytes) -> dict[str, Any]:
    """Return a line's values. A missing key reads as null."""
    return {key: value for key, value in json.loads(data).items() if value is not None}


class _Lines(Subject):
    """Lines of a file of a run, one of them changed.

    `free` has patterns of the places where any other value may be valid.
    """

    file: str
    free: Sequence[str]

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        summary.RESAMPLES = RESAMPLES
        self.run = self.folder / "run"
        shutil.copytree(REFERENCE, self.run, ignore=shutil.ignore_patterns("figures", "*.parquet"))
        self.seeds_ = [line(each).encode() for each in self.seeds()]
        self.free_at = re.compile("|".join(f"(?:{each})" for each in self.free))

    def seeds(self) -> list[Any]:
        """Return the run's lines, few enough to be read a hundred times a second."""
        return [json.loads(each) for each in (self.run / self.file).read_text().splitlines()]

    def tried(self, rng: Random) -> str | None:
        at = rng.randrange(len(self.seeds_))
        paths = None
        if rng.random() < 0.15:
            data = bytes_changed(rng, self.seeds_[at])
        else:
            new, paths = changed(rng, json.loads(self.seeds_[at]), rng.choice([1, 1, 1, 2, 3]))
            data = line(new).encode()
        rest = [each for place, each in enumerate(self.seeds_) if place != at]
        if rng.random() < 0.02:
            rest.append(data)
        (self.run / self.file).write_bytes(b"".join(each + b"\n" for each in (data, *rest)))
        self.read(rng)
        if paths is not None and (wrong := self.beyond(new, paths)) is not None:
            return wrong
        if paths is None or len(paths) != 1 or _parse_line(data) == _parse_line(self.seeds_[at]):
            return None
        place = ".".join(map(str, paths[0]))
        free = self.free_at.fullmatch(place)
        return None if free else f"accepted another {re.sub(r'[0-9]+', 'N', place)}: {place}"

    def beyond(self, data: Any, paths: Sequence[tuple[int | str, ...]]) -> str | None:
        """Return what is wrong with accepted data of which these places were changed."""
        return None

    @abstractmethod
    def read(self, rng: Random) -> None:
        """Read the run in every way that specbench reads it."""

    def reported(self, rng: Random) -> None:
        """Sometimes write a report and a comparison, and rarely every format of the report."""
        run = RunDir.open(self.run)
        list(run.prompts())
        list(run.records())
        if rng.random() > REPORTED:
            return
        reading = read_report_data(RunDir.open(self.run))
        side = read_run(self.run)
        compare(side, side, tolerance=0.05, fail_on=("broken",))
        if rng.random() < WRITTEN:
            out = self.folder / "report"
            out.mkdir(exist_ok=True)
            outputs.write(reading, out, list(outputs.FORMATS))


class Records(_Lines):
    """Lines of `records.jsonl`."""

    name = "records"
    file = "records.jsonl"
    free = (
        "sampling|guarantee|pass|turn|seed",
        "schema|peak_bytes|energy_j|other_cpu|score|void|finish|log_likelihood|version|valid|synthetic",
        r"verdict|verdict\.(gap|rounding|kind|position|expected)|params(\..*)?|extra(\..*)?|peer",
        r"output_ids\.\d+|drafts(\.\d+)?(\.(tokens|path)(\.\d+)?|\.parents)?|log_probs(\.\d+)?|likelihood|batch",
        r"origin\.\d+",
        r"forwards\.kinds\.\d+(\.(worker|batch|share|layers(\.\d)?|model|role))?",
        r"forwards\.(t0_ns|t1_ns|n_tokens|unused|kind|messages)(\.\d+){0,2}|forwards",
        r"steps\.(levels|nodes|tested)\.\d+|steps\.relaxed|steps|ns\.(learn|total|prefill|decode)",
        r"ns\.(draft|verify|host)|target_equivalents|origin|target_forwards|draft_forwards",
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        run = RunDir.open(self.run)
        parallel = json.loads((PARALLEL / "manifest.json").read_text())["rows"]
        more = [{"label": f"w {row['label']}", "method": row["method"]} for row in parallel]
        run.update(rows=[*run.manifest["rows"], *more])
        self.asked = {(prompt.prompt_id, prompt.turn) for prompt in run.prompts()}

    def seeds(self) -> list[Any]:
        lines = super().seeds()
        parallel = [json.loads(each) for each in (PARALLEL / self.file).read_text().splitlines()]
        few = lines[:9] + [each | {"label": f"w {each['label']}"} for each in parallel[1:3]]
        return [_shortened(each) for each in few]

    def beyond(self, data: Any, paths: Sequence[tuple[int | str, ...]]) -> str | None:
        known = (data["prompt_id"], data["turn"]) in self.asked
        return None if known else "accepted a turn that nobody asked"

    def read(self, rng: Random) -> None:
        self.reported(rng)


class Prompts(_Lines):
    """Lines of `prompts.jsonl`, all of prompts that records answer."""

    name = "prompts"
    file = "prompts.jsonl"
    free = (r"text|ids(\.\d+)?",)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        _shorten(self.run)

    def seeds(self) -> list[Any]:
        records = (self.run / "records.jsonl").read_text().splitlines()
        answered = {json.loads(each)["prompt_id"] for each in records[:FEW]}
        return [each for each in super().seeds() if each["prompt_id"] in answered]

    def read(self, rng: Random) -> None:
        self.reported(rng)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


class Manifests(_Lines):
    """`manifest.json`: whoever reads it puts up with whatever its types allow.

    What is said of the machine, of the program and of parameters may be anything, and a key may
    lack or be one that nobody knows. What else was changed must be as `KINDS` has it.
    """

    name = "manifests"
    file = "manifest.json"
    free = (".*",)
    KINDS: ClassVar[dict[str, Callable[[Any], bool]]] = {
        r"(created|finished)_utc": lambda x: isinstance(x, str) and x[:4].isdigit(),
        r"(.*\.)?(sha256)": lambda x: isinstance(x, str) and not x.strip("0123456789abcdef"),
        r"models\.[^.]+\.(vocab_size|n_layers|hidden_size|max_positions)": lambda x: (
            x is None or (_is_count(x) and x > 0)
        ),
        r"models\.[^.]+\.eos\.\d+": lambda x: _is_count(x) and x < 4096,
        r".*\.(weight_bytes|state_bytes|parameters|n_questions)": lambda x: (
            x is None or _is_count(x)
        ),
        r"rows\.\d+\.label": lambda x: x in LABELS,
        r"(dropped|leaks|method_files|memory|heads|models|config|machine|tuning)": lambda x: (
            x is None or isinstance(x, dict)
        ),
        r"(mixed|upper_bounds|rows|tasks)": lambda x: x is None or isinstance(x, list),
        r"(mixed|upper_bounds)\.\d+": lambda x: isinstance(x, str) and bool(x),
        r"status": lambda x: x in ("running", "finished", "interrupted"),
        r"noisy": lambda x: isinstance(x, bool),
        r"aa_noise": lambda x: x is None or (isinstance(x, (int, float)) and x >= 0),
        r"config\.effective\.(seed|top_k)": _is_count,
        r"config\.effective\.(limit|max_new_tokens|threads)": lambda x: (
            x is None or (_is_count(x) and x > 0)
        ),
        r"config\.effective\.(batch|repeats)": lambda x: _is_count(x) and x > 0,
        r"config\.effective\.temperature": lambda x: isinstance(x, (int, float)) and x >= 0,
        r"config\.effective\.top_p": lambda x: isinstance(x, (int, float)) and 0 < x <= 1,
    }
    """Allowed values by pattern of the place."""

    def beyond(self, data: Any, paths: Sequence[tuple[int | str, ...]]) -> str | None:
        for path in paths:
            place, value = ".".join(map(str, path)), data
            try:
                for key in path:
                    value = value[key]
            except (LookupError, TypeError):
                continue  # deleted, or removed by another change
            for pattern, right in self.KINDS.items():
                if re.fullmatch(pattern, place) and not right(value):
                    return f"accepted {re.sub(r'[0-9]+', 'N', place)} {value!r:.60}: {place}"
        tasks = data.get("tasks") or ()  # an additional task without records is valid
        known = any(isinstance(task, dict) and task.get("name") == "mini" for task in tasks)
        return None if known or not tasks else "accepted tasks without that of the records"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        _shorten(self.run)

    def seeds(self) -> list[Any]:
        return [json.loads((self.run / self.file).read_text())]

    def read(self, rng: Random) -> None:
        self.reported(rng)


class Baselines(Subject):
    """Fuzz target: a baseline file."""

    name = "baselines"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        file = next((ROOT / "results/baselines/ci").glob("*.json"))
        self.good = baseline.load(file)
        whole = json.loads(file.read_text())
        few = {tuple(each[:2]) for each in whole["outputs"][:2]}
        whole["outputs"] = [each for each in whole["outputs"] if tuple(each[:2]) in few]
        self.text = line(whole)

    def tried(self, rng: Random) -> str | None:
        file = self.folder / "x.json"
        if rng.random() < 0.15:
            file.write_bytes(bytes_changed(rng, self.text.encode()))
        else:
            file.write_text(line(changed(rng, json.loads(self.text), rng.choice([1, 1, 2]))[0]))
        side = baseline.load(file)
        compare(side, self.good, tolerance=0.05, fail_on=("broken",))
        return None


def _shorten(run: Path) -> None:
    """Keep only the first records of a run."""
    records = run / "records.jsonl"
    few = records.read_text().splitlines()[:FEW]
    records.write_text("".join(f"{each}\n" for each in few))


def _shortened(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record without the drafts, which are most of it."""
    return record | {"drafts": None} if len(record["drafts"] or ()) > 30 else record
