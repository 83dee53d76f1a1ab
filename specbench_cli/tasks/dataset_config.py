"""YAML configuration of a dataset: schema and reader."""

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
from specbench_cli.tasks.formats import EXTENSIONS, get_extension
from specbench_cli.tasks.schema import FAMILIES, Column, Family, Scorer

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

_MAX_PATH_BYTES = 240
"""Maximum size of a source's path in bytes. File systems limit names to 255 bytes."""

Template = Annotated[str, Field(min_length=1), AfterValidator(fill.validate_template)]
"""A text with column names in braces. Literal braces are doubled."""

Program = Annotated[Template, AfterValidator(fill.validate_program)]
"""A template with a placeholder for the answer."""

_MAP, _OTHER = "map", "other"
"""Tags of the two forms of a field, which messages leave out."""

_form = Discriminator(lambda value: _MAP if isinstance(value, dict) else _OTHER)
_source_form = Discriminator(lambda value: _OTHER if isinstance(value, list) else _MAP)


class _StrictConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class HubSource(_StrictConfig):
    """A file or a split of a dataset on the Hugging Face hub, at a fixed commit."""

    id: str
    """Name of the dataset on the hub, owner/name."""
    revision: str
    """Commit of the dataset."""
    path: str | None = None
    """Path of a file in the dataset's repository, downloaded unchanged."""
    config: str | None = None
    """Configuration of the dataset, for a split."""
    split: str | None = None
    """Split whose rows are stored as JSON Lines, instead of a path."""

    @property
    def url(self) -> str | None:
        """URL of the file; None for a split."""
        at = f"https://huggingface.co/datasets/{self.id}/resolve/{self.revision}"
        return f"{at}/{self.path}" if self.path is not None else None

    @model_validator(mode="after")
    def _path_or_split(self) -> HubSource:
        if (self.path is None) == (self.split is None):
            raise ValueError("needs either a path or a split")
        return self


class DatasetSource(_StrictConfig):
    """Source of rows.

    The file is searched in the folder of the YAML, in $SPECBENCH_DATA and in the cache. Otherwise
    it is downloaded from `url`, or else from `hub`. All copies must have the same `sha256`. They
    may be gzipped (on disk with the extension `.gz`).
    """

    file: str
    """File name that ends in .jsonl, .ndjson, .json, .csv, .tsv, .parquet, .txt or .zip."""
    sha256: Sha256 | None = None
    """Checksum of the file, uncompressed if it is gzipped."""
    url: Annotated[str, Field(pattern=r"^https?://")] | None = None
    """URL to download the file from; may be gzipped."""
    hub: HubSource | None = None
    """Hub dataset to download from if there is no url, or if it fails."""
    member: str | None = None
    """Name of the file inside a .zip."""
    category: str | None = None
    """Category of all rows. With several sources it is also the prefix of their ids."""

    @property
    def rows_file(self) -> str:
        """Name of the file with the rows."""
        return self.member or self.file

    @field_validator("file")
    @classmethod
    def _check_file(cls, file: str) -> str:
        path = PurePosixPath(file)
        if path.is_absolute() or ".." in path.parts or not path.name:
            raise ValueError("must be a relative path without '..'")
        if len(file.encode()) > _MAX_PATH_BYTES:
            raise ValueError(f"must have at most {_MAX_PATH_BYTES} bytes, got {len(file.encode())}")
        return file

    @model_validator(mode="after")
    def _check_consistency(self) -> DatasetSource:
        if self.url and not self.sha256:
            raise ValueError("a url needs a sha256, so that the download can be checked")
        if self.file.lower().endswith(".zip") != (self.member is not None):
            raise ValueError("a .zip needs a member, the file inside it, and nothing else has one")
        if get_extension(self.rows_file) not in EXTENSIONS:
            raise ValueError(f"{self.rows_file} must end in one of {', '.join(EXTENSIONS)}")
        return self


def _check_categories(sources: list[DatasetSource]) -> list[DatasetSource]:
    categories = [source.category for source in sources]
    if len(categories) > 1 and (None in categories or len(set(categories)) < len(categories)):
        raise ValueError("must be several with a category of its own each")
    return sources


Sources = Annotated[list[DatasetSource], Field(min_length=1), AfterValidator(_check_categories)]


class DatasetConfig(_StrictConfig):
    """Configuration of a dataset, read from its YAML."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")]
    """Name of the task. Prompt ids are <name>/<id>."""
    version: str
    """Version. It changes whenever results are no longer comparable."""
    title: str = ""
    """Title in one line."""
    source: Annotated[
        Annotated[DatasetSource, Tag(_MAP)] | Annotated[Sources, Tag(_OTHER)], _source_form
    ]
    """One file, or several with a different category each."""
    rows: Annotated[int, Field(ge=1)] | None = None
    """Required number of questions."""
    columns: list[str] = []
    """Column names of a CSV or TSV file without a header."""
    fields: dict[Column, str] = {}
    """Names of columns that differ from the default names."""
    samples: Annotated[int, Field(ge=1, le=1000)] = 1
    """Number of independent samples of each question (best of n)."""
    only: dict[str, tuple[int, int]] = {}
    """Column -> minimum and maximum. Rows outside a range are left out."""
    template: Annotated[
        Annotated[dict[str, Template], Tag(_MAP)] | Annotated[Template | None, Tag(_OTHER)], _form
    ] = None
    """Prompt with columns in braces, or category -> prompt with "" for all others."""
    program: Program | None = None
    """Code that tests an answer, with columns and {answer} in braces."""
    placeholder: Annotated[str, Field(min_length=1)] | None = None
    """Text that marks a missing question. A file with such rows is rejected."""
    families: dict[str, Family] = {}
    """Category -> family."""
    family: Family | None = None
    """Family of all categories that `families` does not contain."""
    scorer: Annotated[
        Annotated[dict[Literal[Family, "default"], Scorer], Tag(_MAP)]
        | Annotated[Scorer | None, Tag(_OTHER)],
        _form,
    ] = Field(None, validate_default=True)
    """Scorer of answers, or family -> scorer with `default` for all others."""
    max_new_tokens: Annotated[int, Field(ge=1)] | None = None
    """Default maximum number of new tokens."""
    embedded: Literal["trained", "plumbing"] = "plumbing"
    """"trained" if the embedded models were trained on such tasks; otherwise "plumbing", and their
    speedups are meaningless."""
    obtain: str = ""
    """Manual steps to get data that cannot be downloaded directly."""
    licence: str = ""
    """Licence of the data."""
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
    def sources(self) -> list[DatasetSource]:
        """Source files of the dataset, in the order of their rows."""
        return [self.source] if isinstance(self.source, DatasetSource) else self.source

    def get_family(self, category: str) -> Family:
        """Return the task family of a category.

        Without a configured family, the category itself must be the name of a family.
        """
        if category in self.families:
            return self.families[category]
        if self.family is not None:
            return self.family
        return next((family for family in FAMILIES if family == category), "other")

    def get_scorer(self, family: Family) -> Scorer | None:
        """Return the scorer of a family, or None if its answers are not scored."""
        if not isinstance(self.scorer, dict):
            return self.scorer
        return self.scorer.get(family) or self.scorer.get("default")

    def get_template(self, category: str) -> str | None:
        """Return the prompt template of a category. None means that the rows contain the
        prompts.
        """
        if not isinstance(self.template, dict):
            return self.template
        return self.template.get(category) or self.template.get("")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, for display and for the manifest."""
        return self.model_dump(exclude_none=True, exclude_defaults=True)


def read_dataset_config(path: Path) -> DatasetConfig:
    """Read and validate the YAML of a dataset.

    Raises:
        UsageError: the file is not readable or not YAML, or a field is unknown, missing or invalid.
    """
    hint = f"fields of a task's YAML: {', '.join(DatasetConfig.model_fields)}"
    try:
        written = document.read(path)
    except UsageError as fault:
        raise UsageError(fault.message, hint) from fault
    try:
        return DatasetConfig.model_validate(written.values)
    except ValidationError as fault:
        raise usage_error(
            fault,
            subject=lambda place: _subject(path, place, written),
            keys=_known_fields,
            hint=hint,
        ) from fault


def _keys(place: Place) -> list[str]:
    """Return the keys that lead to a value. Leave out the tags that pydantic adds for unions."""
    keys = [str(key) for at, key in enumerate(place) if at != 1 or key not in (_MAP, _OTHER)]
    return [key for key in keys if key != "[key]"]


def _subject(path: Path, place: Place, written: document.YamlDocument) -> str:
    """Return how a message names a field: file, line and keys, e.g. `own.yaml:3: source.sha256`.

    The line is that of the innermost key.
    """
    keys = _keys(place)
    known = (".".join(keys[:n]) for n in range(len(keys), 0, -1))
    line = next((f":{written.lines[key]}" for key in known if key in written.lines), "")
    return f"{path}{line}: {'.'.join(keys)}"


def _known_fields(place: Place) -> list[str]:
    """Return the names of all fields that are allowed next to a key of the YAML."""
    owner = HubSource if "hub" in place else DatasetSource if "source" in place else DatasetConfig
    return list(owner.model_fields)


def json_schema() -> str:
    """Return the JSON Schema of a task's YAML, as stored in `datasets_cfg/schema.json`."""
    return json.dumps(DatasetConfig.model_json_schema(), indent=2) + "\n"
