"""Spec-Bench's answer files: imported as a run, and written from specbench's runs.

A file has one answer per line, as `evaluation/eval.py` of github.com/hemingkx/Spec-Bench writes it.
EAGLE's own scripts omit `accept_lengths` and write `idxs` for `decoding_steps`. The files contain
texts, token counts and wall times, but no token ids. Therefore imported
outputs have no verdict.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from specbench_cli import __version__, output
from specbench_cli.errors import UsageError, to_one_line
from specbench_cli.report.spec_bench.formulas import Answer
from specbench_cli.store.run_dir import Prompt
from specbench_cli.store.schema import (
    BASELINE,
    FAMILIES,
    SCHEMA,
    Family,
    Ns,
    Params,
    Record,
    Verdict,
)

T = TypeVar("T")

TASK = "spec_bench"
_CHAT = (
    *("writing", "roleplay", "reasoning", "math"),
    *("coding", "extraction", "stem", "humanities"),
)
"""Categories of MT-bench, which Spec-Bench reports together as `mt_bench`."""
_FAILED = "ERROR"
"""Text of a failed turn in Spec-Bench's files. Its counts are those of the previous turn."""
_MAX_COUNT = 2**63
"""Upper bound of nanoseconds and token counts in a record."""


@dataclass(frozen=True, slots=True)
class AnswerFile:
    """A Spec-Bench answer file. If a question has several answers, the last one is kept."""

    path: Path
    model_id: str
    answers: Sequence[Answer]


class ImportedAnswers:
    """Spec-Bench answer files, read like the folder of a run (`summary.source.RecordSource`).

    The first file has the answers of vanilla. Each further file is a method.

    Attributes:
        files: Paths of the files.
        answers: Label of a method -> its answers.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        files = [read_answers(path) for path in paths]
        self.files = tuple(paths)
        self.path = paths[0].parent
        self.answers: dict[str, Sequence[Answer]] = {}
        for place, file in enumerate(files):
            label = BASELINE if place == 0 else f"imported:{to_one_line(file.path.stem)}"
            if label in self.answers:
                raise UsageError(f"two answer files are called {file.path.name}; rename one")
            self.answers[label] = file.answers
        self.manifest: dict[str, Any] = {
            "schema": SCHEMA,
            "version": __version__,
            "status": "finished",
            "imported": {file.path.name: file.model_id for file in files},
            "models": {"target": {"label": f"imported ({files[0].model_id})"}},
            "tasks": [{"name": TASK}],
            "config": {"effective": {"verify": "imported, unchecked"}},
        }

    def records(self, prompt_ids: Container[str] | None = None) -> Iterator[Record]:
        """Yield one record per turn. It has no token ids, steps and verdict."""
        for label, answers in self.answers.items():
            for answer in answers:
                for turn in range(len(answer.new_tokens)):
                    record = _record(label, answer, turn)
                    if prompt_ids is None or record.prompt_id in prompt_ids:
                        yield record

    def map_records(self, make: Callable[[Record], T]) -> Iterator[T]:
        """Yield the result of a function for every record."""
        return map(make, self.records())

    def prompts(self) -> Iterator[Prompt]:
        """Return no prompts, since the files do not contain them."""
        return iter(())


def read_answers(path: Path) -> AnswerFile:
    """Read an answer file.

    Raises:
        UsageError: The file is invalid. The message names the line and the missing field.
    """
    if not path.is_file():
        raise UsageError(f"there is no answer file {path}")
    answers: dict[int | str, Answer] = {}
    model_id = path.stem
    for number, line in enumerate(_lines(path), start=1):
        try:
            data = json.loads(line)
            answer = _answer(data)
        except (ValueError, TypeError, LookupError, OverflowError) as error:
            why = f"it has no {error}" if isinstance(error, LookupError) else str(error)
            raise UsageError(
                f"{path}, line {number} is not a Spec-Bench answer: {why}",
                hint="needed: question_id, category, choices[0] with turns, new_tokens, wall_time",
            ) from error
        answers[answer.question_id] = answer
        model_id = to_one_line(str(data.get("model_id", model_id)))
    if not answers:
        raise UsageError(f"{path} has no answers")
    return AnswerFile(path, model_id, list(answers.values()))


def write_answers(answers: Sequence[Answer], model_id: str, path: Path) -> Path:
    """Write answers as a Spec-Bench file.

    An answer's id is a hash of its content, so the same answers give the same file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for answer in sorted(answers, key=lambda a: (str(type(a.question_id)), a.question_id)):
            seed = json.dumps([model_id, answer.question_id, answer.turns])
            line = _as_json(answer, model_id, uuid.uuid5(uuid.NAMESPACE_OID, seed).hex)
            file.write(output.escape_json(json.dumps(line, ensure_ascii=False)) + "\n")
    return path


def _as_json(answer: Answer, model_id: str, answer_id: str) -> dict[str, Any]:
    """Return an answer as a line of the file, without the time stamp.

    Spec-Bench groups answers by category. If Spec-Bench does not know a task's category, the task
    family is written instead.
    """
    known_category = answer.category in (*_CHAT, *FAMILIES)
    choice: dict[str, Any] = {
        "index": 0,
        "turns": list(answer.turns or ()),
        "decoding_steps": list(answer.decoding_steps or ()),
        "new_tokens": list(answer.new_tokens),
        "wall_time": list(answer.wall_time),
        "accept_lengths": list(answer.accept_lengths or ()),
    }
    return {
        "question_id": answer.question_id,
        "category": answer.category if known_category else answer.family,
        "answer_id": answer_id,
        "model_id": model_id,
        "choices": [choice],
    }


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file. The last newline may be missing."""
    try:
        yield from (line for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error}") from error


def _answer(data: Mapping[str, Any]) -> Answer:
    choice = data["choices"][0]
    times = tuple(float(seconds) for seconds in choice["wall_time"])
    tokens = tuple(int(n) for n in choice["new_tokens"])
    texts = tuple(str(text) for text in choice["turns"])
    if not 0 < len(texts) == len(tokens) == len(times):
        raise ValueError("turns, new_tokens and wall_time do not have the same length")
    if not all(
        0 < seconds * 1e9 < _MAX_COUNT for seconds in times
    ):  # larger values do not fit into a record
        raise ValueError("a wall_time is not positive, not finite, or above 292 years")
    if not all(0 <= count < _MAX_COUNT for count in tokens):
        raise ValueError("a number of new_tokens is negative, or above 2**63")
    category = to_one_line(str(data.get("category") or ""))
    question = data["question_id"]
    steps, lengths = choice.get("decoding_steps"), choice.get("accept_lengths")
    known_category: Family = next((family for family in FAMILIES if family == category), "other")
    family: Family = "multi_turn" if category in _CHAT else known_category
    return Answer(
        to_one_line(question) if isinstance(question, str) else question,
        category,
        family,
        texts,
        None if steps is None else tuple(int(n) for n in steps),
        tokens,
        times,
        None if lengths is None else tuple(int(n) for n in lengths),
    )


def _record(label: str, answer: Answer, turn: int) -> Record:
    failed = answer.turns is not None and answer.turns[turn] == _FAILED
    prompt_id = f"{TASK}/{answer.question_id}"
    baseline = label == BASELINE
    return Record(
        prompt_id=prompt_id,
        cluster=prompt_id,
        task=TASK,
        family=answer.family,
        category=answer.category,
        turn=turn + 1,
        method=BASELINE if baseline else "imported",
        label=label,
        peer=True,
        params=Params(),
        sampling="imported",
        guarantee="exact_tokens",
        pass_=1,
        seed=0,
        output_ids=None,
        origin=None,
        n_tokens=answer.new_tokens[turn],
        finish="error" if failed else "length",
        steps=None,
        target_forwards=None,
        draft_forwards=None,
        forwards=None,
        ns=Ns(total=None if failed else round(answer.wall_time[turn] * 1e9)),
        peak_bytes=None,
        other_cpu=None,
        verdict=Verdict("reference" if baseline else "unchecked"),
        score=None,
        void=False,
        error="the answer file says ERROR" if failed else None,
    )
