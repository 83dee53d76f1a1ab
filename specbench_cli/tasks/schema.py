"""What a task is: its questions, and the YAML card that describes a dataset."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from specbench_cli.errors import UsageError

Family = Literal[
    "multi_turn", "translation", "summarization", "qa", "math_reasoning", "rag", "code", "other"
]
"""What a question asks for: the strata of every statistic."""

FAMILIES: tuple[Family, ...] = get_args(Family)

Column = Literal["id", "turns", "category", "family", "cluster", "reference"]
"""What can be read from a row; see `rows.COLUMNS` for the names looked for by default."""

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True, slots=True)
class Question:
    """One question of a task, all its turns.

    Attributes:
        prompt_id: "<task>/<id>", unique.
        cluster: questions that are not independent share one (a generated task's template);
            otherwise the prompt_id.
        family, category: the stratum; `category` keeps the source's word.
        turns: what the user says, turn by turn.
        reference: the dataset's answers, if any (per turn, or one).
    """

    prompt_id: str
    cluster: str
    task: str
    family: Family
    category: str
    turns: tuple[str, ...]
    reference: tuple[str, ...] | None = None


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Hub(_Strict):
    """A split of a dataset on the Hugging Face hub, pinned."""

    id: str
    config: str | None = None
    split: str
    revision: str


class Source(_Strict):
    """Where the rows come from.

    The file is looked for beside the YAML, in $SPECBENCH_DATA and in the cache, then downloaded
    from `url`, then from `hub` (whose rows become JSON lines); all must have the same `sha256`.
    """

    file: str
    sha256: Sha256 | None = None
    url: Annotated[str, Field(pattern=r"^https?://")] | None = None
    hub: Hub | None = None

    @field_validator("file")
    @classmethod
    def _inside(cls, file: str) -> str:
        path = PurePosixPath(file)
        if path.is_absolute() or ".." in path.parts or not path.name:
            raise ValueError("must be a relative path without '..'")
        return file

    @model_validator(mode="after")
    def _checked(self) -> Source:
        if self.url and not self.sha256:
            raise ValueError("a url needs a sha256, so that the download can be checked")
        return self


class Card(_Strict):
    """A dataset's YAML.

    Attributes:
        rows: number of questions the file must hold.
        fields: which column holds what, where the usual names do not fit.
        families: category -> family.
        family: the family of every category that `families` does not name.
        max_new_tokens: the task's own default, where it has one.
        embedded: "trained" if the embedded models learnt such tasks; "plumbing" if they did not, so
            that their speedups there say nothing.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")]
    version: str
    title: str = ""
    source: Source
    rows: Annotated[int, Field(ge=1)] | None = None
    fields: dict[Column, str] = {}
    families: dict[str, Family] = {}
    family: Family | None = None
    max_new_tokens: Annotated[int, Field(ge=1)] | None = None
    embedded: Literal["trained", "plumbing"] = "plumbing"
    licence: str = ""
    citation: str = ""

    def family_of(self, category: str) -> Family:
        """The family of a category: as the card says, else the category itself if it is one."""
        if category in self.families:
            return self.families[category]
        if self.family is not None:
            return self.family
        return next((family for family in FAMILIES if family == category), "other")

    def facts(self) -> dict[str, Any]:
        """The card as plain values without the empty ones, for people and for the manifest."""
        return self.model_dump(exclude_none=True, exclude_defaults=True)


def read_card(path: Path) -> Card:
    """Read and check a dataset's YAML.

    Raises:
        UsageError: not readable, not YAML, or a field is unknown, missing or wrong.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as fault:
        raise UsageError(f"{path}: {fault.strerror or fault}") from fault
    except (yaml.YAMLError, UnicodeDecodeError) as fault:
        raise UsageError(f"{path} is not valid YAML: {fault}") from fault
    try:
        return Card.model_validate(values)
    except ValidationError as fault:
        lines = [
            f"{path}: {'.'.join(map(str, error['loc'])) or 'top level'}: {error['msg']}"
            for error in fault.errors()
        ]
        raise UsageError(
            "\n".join(lines), f"fields of a task's YAML: {', '.join(Card.model_fields)}"
        ) from fault
