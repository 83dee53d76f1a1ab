"""Config files: a commented template and a JSON schema for editors."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from specbench_cli.config.options import PANELS, option_fields
from specbench_cli.config.run import RunConfig
from specbench_cli.config.sources import PARAM_FIELDS

HEADER = """\
# Settings of `specbench run` in this folder: one option per line. Lines with # show the defaults.
# Command-line options and environment variables (such as SPECBENCH_LIMIT) take precedence.
methods: [sps, pld]
tasks: [mini]
limit: 12
"""
_WIDTH = 96

DIALECT = "https://json-schema.org/draft/2020-12/schema"

_WORDS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_PARAMS = {"type": "object", "additionalProperties": {"type": "object"}}
_METHOD = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/MethodChoice"}]}

_FILE_SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "methods": {"anyOf": [*_METHOD["anyOf"], {"type": "array", "items": _METHOD, "minItems": 1}]},
    "tasks": _WORDS,
    "targets": _WORDS,
    "drafts": _WORDS,
    "category": _WORDS,
    "plugins": _WORDS,
    "devices": {
        "anyOf": [
            {"type": "string"},
            {"type": "object", "additionalProperties": {"type": "string"}},
        ]
    },
    "dtype": {"enum": ["float32", "bfloat16", "float16", "fp32", "bf16", "fp16"]},
    "set": _PARAMS,
    "sweep": _PARAMS,
}
"""JSON schemas of keys that accept more forms in a file than `RunConfig` does."""


def make_commented_file() -> str:
    """Return the text of a config file with all settings as comments, with help and default."""
    lines, found = [HEADER], [*option_fields(RunConfig)]
    for panel in PANELS:
        lines.append(f"# {panel}\n")
        for each in found:
            if each.option.panel == panel:
                about = f"# {each.option.help} Default: {each.default}."
                lines += textwrap.wrap(about, _WIDTH, subsequent_indent="# ")
                lines.append(f"# {PARAM_FIELDS.get(each.name, f'{each.name}:')}\n")
    return "\n".join(lines).rstrip() + "\n"


def make_schema() -> dict[str, Any]:
    """Return the JSON schema of `specbench.yaml`."""
    about = {each.name: each.option.help for each in option_fields(RunConfig)}
    own = RunConfig.model_json_schema()
    keys = {}
    for name, field_schema in own["properties"].items():
        key = _FILE_SCHEMAS.get(name, _to_json_schema(field_schema))
        keys[name] = {**key, "description": about[name]}
    return {
        "$schema": DIALECT,
        "title": "specbench.yaml",
        "type": "object",
        "additionalProperties": False,
        "$defs": own["$defs"],
        "properties": keys,
    }


def _to_json_schema(field_schema: Mapping[str, Any]) -> dict[str, Any]:
    """Convert pydantic's schema of a field to a JSON schema.

    The result has no `title`, and writes a lower bound as `minimum` instead of pydantic's `ge`.
    """
    options = [
        {"minimum" if word == "ge" else word: value for word, value in each.items()}
        for each in field_schema.get("anyOf", ())
    ]
    plain = {word: value for word, value in field_schema.items() if word not in ("anyOf", "title")}
    return {**plain, **({"anyOf": options} if options else {})}
