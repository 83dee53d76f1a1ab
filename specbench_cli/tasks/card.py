"""The YAML card that describes a dataset: its schema, and how it is read."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from specbench_cli.config import document
from specbench_cli.config.problems import Place, usage_error
from specbench_cli.errors import UsageError
from specbench_cli.tasks import fill
from specbench_cli.tasks.formats import ENDINGS, ending
from specbench_cli.tasks.schema import FAMILIES, Column, Family, Scorer

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

_LONGEST_PATH = 240
"""Most bytes of a source's path. No file system has names of more than 255 bytes."""

Template = Annotated[str, Field(min_length=1), AfterValidator(fill.checked)]
"""A text with a row's columns in braces; braces that are meant are doubled."""

Program = Annotated[Template, AfterValidator(fill.checked_program)]
"""A template that has a place for the answer too."""

_MAP, _OTHER = "map", "other"
"""Tags of the two forms that a field may have; they never show in messages."""

_form = Discriminator(lambda value: _MAP if isinstance(value, dict) else _OTHER)
_source_form = Discriminator(lambda value: _OTHER if isinstance(value, list) else _MAP)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Hub(_Strict):
    """A file, or else a split, of a dataset on the Hugging Face hub, pinned."""

    id: str
    """The dataset's name there, owner/name."""
    revision: str
    """The commit."""
    path: str | None = None
    """The file in the dataset's repository, taken as it is."""
    config: str | None = None
    """Of a split: the dataset's configuration."""
    split: str | None = None
    """In place of a path: the split whose rows become JSON lines."""

    @property
    def address(self) -> str | None:
        """Where a browser gets the file; None for a split."""
        at = f"https://huggingface.co/datasets/{self.id}/resolve/{self.revision}"
        return f"{at}/{self.path}" if self.path is not None else None

    @model_validator(mode="after")
    def _path_or_split(self) -> Hub:
        if (self.path is None) == (self.split is None):
            raise ValueError("needs either a path or a split")
        return self


class Source(_Strict):
    """Where rows come from.

    The file is looked for beside the YAML, in $SPECBENCH_DATA and in the cache, then downloaded
    from `url`, then from `hub`; all must have the same `sha256`. Any of them may be gzipped (on
    disk with `.gz` behind the name).
    """

    file: str
    """File name that ends in .jsonl, .ndjson, .json, .csv, .tsv, .parquet, .txt or .zip."""
    sha256: Sha256 | None = None
    """Checksum of the file, uncompressed if it is gzipped."""
    url: Annotated[str, Field(pattern=r"^https?://")] | None = None
    """Where it is downloaded from; may be gzipped."""
    hub: Hub | None = None
    """Where it is downloaded from if there is no url, or that fails."""
    member: str | None = None
    """The file inside a .zip."""
    category: str | None = None
    """The category of all its rows; with several sources, the prefix of their ids."""

    @property
    def rows_file(self) -> str:
        """The name of the file that holds the rows."""
        return self.member or self.file

    @field_validator("file")
    @classmethod
    def _inside(cls, file: str) -> str:
        path = PurePosixPath(file)
        if path.is_absolute() or ".." in path.parts or not path.name:
            raise ValueError("must be a relative path without '..'")
        if len(file.encode()) > _LONGEST_PATH:
            raise ValueError(f"must have at most {_LONGEST_PATH} bytes, got {len(file.encode())}")
        return file

    @model_validator(mode="after")
    def _checked(self) -> Source:
        if self.url and not self.sha256:
            raise ValueError("a url needs a sha256, so that the download can be checked")
        if self.file.lower().endswith(".zip") != (self.member is not None):
            raise ValueError("a .zip needs a member, the file inside it, and nothing else has one")
        if ending(self.rows_file) not in ENDINGS:
            raise ValueError(f"{self.rows_file} must end in one of {', '.join(ENDINGS)}")
        return self


def _told_apart(sources: list[Source]) -> list[Source]:
    categories = [source.category for source in sources]
    if len(categories) > 1 and (None in categories or len(set(categories)) < len(categories)):
        raise ValueError("must be several with a category of its own each")
    return sources


Sources = Annotated[list[Source], Field(min_length=1), AfterValidator(_told_apart)]


class Card(_Strict):
    """A dataset's YAML."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")]
    """The task's name; prompts are called <name>/<id>."""
    version: str
    """Changes whenever results before and after are not to be compared."""
    title: str = ""
    """What it is, in a line."""
    source: Annotated[Annotated[Source, Tag(_MAP)] | Annotated[Sources, Tag(_OTHER)], _source_form]
    """One file, or several, each with a category of its own."""
    rows: Annotated[int, Field(ge=1)] | None = None
    """How many questions there must be."""
    columns: list[str] = []
    """Names of the columns of a CSV or TSV file without a heading."""
    fields: dict[Column, str] = {}
    """Which column holds what, where the usual names do not fit."""
    samples: Annotated[int, Field(ge=1, le=1000)] = 1
    """How often each question is asked, with draws of its own each time (best of n)."""
    only: dict[str, tuple[int, int]] = {}
    """Column -> lowest and highest number of the rows that count; others are left out."""
    template: Annotated[
        Annotated[dict[str, Template], Tag(_MAP)] | Annotated[Template | None, Tag(_OTHER)], _form
    ] = None
    """The prompt, with columns in braces; or category -> prompt, "" standing for any other."""
    program: Program | None = None
    """The code that tests an answer, with columns and {answer} in braces."""
    placeholder: Annotated[str, Field(min_length=1)] | None = None
    """Words that stand where a question is still missing: a file with such rows is refused."""
    families: dict[str, Family] = {}
    """Category -> family."""
    family: Family | None = None
    """The family of every category that `families` does not name."""
    scorer: Annotated[
        Annotated[dict[Literal[Family, "default"], Scorer], Tag(_MAP)]
        | Annotated[Scorer | None, Tag(_OTHER)],
        _form,
    ] = Field(None, validate_default=True)
    """How answers are scored; or family -> that, `default` standing for any other."""
    max_new_tokens: Annotated[int, Field(ge=1)] | None = None
    """Longest output, unless the run says otherwise."""
    embedded: Literal["trained", "plumbing"] = "plumbing"
    """Whether the embedded models learnt such tasks; if not, their speedups there say nothing."""
    obtain: str = ""
    """What a person has to do for data that cannot be downloaded as it is."""
    licence: str = ""
    """Of the data."""
    citation: str = ""
    """The paper to cite."""

    @field_validator("scorer")
    @classmethod
    def _tests_need_a_program(cls, scorer: Any, info: ValidationInfo) -> Any:
        named = scorer.values() if isinstance(scorer, dict) else (scorer,)
        if ("unit_tests" in named) != (info.data.get("program") is not None):
            raise ValueError("unit_tests and a program need each other")
        return scorer

    @property
    def sources(self) -> list[Source]:
        """The files, in order."""
        return [self.source] if isinstance(self.source, Source) else self.source

    def family_of(self, category: str) -> Family:
        """The family of a category: as the card says, else the category itself if it is one."""
        if category in self.families:
            return self.families[category]
        if self.family is not None:
            return self.family
        return next((family for family in FAMILIES if family == category), "other")

    def scorer_of(self, family: Family) -> Scorer | None:
        """How answers of a family are scored; None where they are not."""
        if not isinstance(self.scorer, dict):
            return self.scorer
        return self.scorer.get(family) or self.scorer.get("default")

    def template_of(self, category: str) -> str | None:
        """The prompt of a category; None where a row holds its turns as they are."""
        if not isinstance(self.template, dict):
            return self.template
        return self.template.get(category) or self.template.get("")

    def facts(self) -> dict[str, Any]:
        """The card as plain values without the empty ones, for people and for the manifest."""
        return self.model_dump(exclude_none=True, exclude_defaults=True)


def read_card(path: Path) -> Card:
    """Read and check a dataset's YAML.

    Raises:
        UsageError: not readable, not YAML, or a field is unknown, missing or wrong.
    """
    hint = f"fields of a task's YAML: {', '.join(Card.model_fields)}"
    try:
        written = document.read(path)
    except UsageError as fault:
        raise UsageError(fault.message, hint) from fault
    try:
        return Card.model_validate(written.values)
    except ValidationError as fault:
        raise usage_error(
            fault,
            subject=lambda place: _subject(path, place, written),
            keys=_siblings,
            hint=hint,
        ) from fault


def _keys(place: Place) -> list[str]:
    """The keys that lead to a value, without the form that a field of two forms was found in."""
    keys = [str(key) for at, key in enumerate(place) if at != 1 or key not in (_MAP, _OTHER)]
    return [key for key in keys if key != "[key]"]


def _subject(path: Path, place: Place, written: document.Document) -> str:
    """`own.yaml:3: source.sha256`; the line is that of the innermost key that the file has."""
    keys = _keys(place)
    known = (".".join(keys[:n]) for n in range(len(keys), 0, -1))
    line = next((f":{written.lines[key]}" for key in known if key in written.lines), "")
    return f"{path}{line}: {'.'.join(keys)}"


def _siblings(place: Place) -> list[str]:
    """The fields that there are where a key stands."""
    owner = Hub if "hub" in place else Source if "source" in place else Card
    return list(owner.model_fields)


def json_schema() -> str:
    """The JSON Schema of a task's YAML, for editors: what `datasets_cfg/schema.json` holds."""
    return json.dumps(Card.model_json_schema(), indent=2) + "\n"
