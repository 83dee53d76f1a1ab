"""Reader for YAML config files that keeps the line number of every key, for error messages."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from specbench_cli import files
from specbench_cli.errors import UsageError

_MAX_VALUES = 100_000
"""Maximum number of values in a file. An alias counts at each use."""
MAX_BYTES = files.MB
"""Maximum size of a config file in bytes."""
EXAMPLE = "each line has the name and value of an option, for example: limit: 24"


@dataclass(frozen=True)
class YamlDocument:
    """Content of a YAML config file.

    Attributes:
        name: File name without folders.
        values: The top-level mapping of the file.
        lines: Line number of every key. Keys are dotted paths, such as "set.sps.length".
        texts: Source text of every scalar value, by dotted path. It is needed because YAML reads a
            sweep like `1:6:1` as a number.
    """

    name: str
    values: dict[str, Any]
    lines: dict[str, int]
    texts: dict[str, str]

    def locate(self, key: str) -> str:
        """Return the file and line of a key, e.g. `specbench.yaml:3`.

        A key that comes from a YAML alias or merge has no line. Then return its parent's line.
        """
        parts = key.split(".")
        above = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
        line = next((f":{self.lines[each]}" for each in above if each in self.lines), "")
        return f"{self.name}{line}"


class _Loader(yaml.SafeLoader):
    """YAML loader that rejects text that UTF-8 cannot encode. Run folders could not store such
    text.
    """

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        value = super().construct_scalar(node)
        try:
            str(value).encode()
        except UnicodeEncodeError as fault:
            raise yaml.constructor.ConstructorError(
                None, None, f"half a character: {value!r}", node.start_mark
            ) from fault
        return value


def read(path: Path) -> YamlDocument:
    """Read a YAML file like `yaml.safe_load`, but reject duplicate keys.

    Raises:
        UsageError: The file cannot be read, is not YAML, or is not a mapping. Also raised for
            duplicate keys, recursive aliases, and aliases that expand to more than 100,000 values.
    """
    files.check_regular(path)
    try:
        text = files.read_text(path, MAX_BYTES)
    except (OSError, UnicodeDecodeError) as fault:
        reason = getattr(fault, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(f"cannot read {path}: {reason}") from fault
    loader = None
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        _count_values(root, path, {})
        lines, texts = _find_lines(root, path) if root is not None else ({}, {})
        values = loader.construct_document(root) if root is not None else {}
    except yaml.MarkedYAMLError as fault:
        mark = fault.problem_mark or fault.context_mark
        at = f":{mark.line + 1}" if mark else ""
        raise UsageError(f"{path}{at}: {fault.problem} (not valid YAML)", EXAMPLE) from fault
    except (yaml.YAMLError, ValueError) as fault:
        says = " ".join(str(fault).split())
        if "digits" in says:  # Python's message advises to change an interpreter setting
            says = f"it contains a number of more than {sys.get_int_max_str_digits()} digits"
        raise UsageError(f"{path}: {says} (not valid YAML)", EXAMPLE) from fault
    except RecursionError as fault:
        raise UsageError(f"{path}: it is nested too deeply", EXAMPLE) from fault
    finally:
        if loader is not None:
            loader.dispose()
    if not isinstance(values, dict):
        raise UsageError(
            f"{path} must consist of `key: value` lines, got {type(values).__name__}", EXAMPLE
        )
    return YamlDocument(path.name, values, lines, texts)


def parse_scalar(text: str) -> Any:
    """Parse a YAML number, true, false or null. Return any other text unchanged."""
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    return value if value is None or isinstance(value, (bool, int, float, str)) else text


def _count_values(node: yaml.Node | None, path: Path, counts: dict[int, int]) -> int:
    """Return the number of values in a YAML node, with all aliases expanded.

    Args:
        counts: The numbers for nodes that are already counted, by `id(node)`. The number 0 marks
            the
            nodes that contain this node, so that a recursive alias is found.
    """
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in counts:
        counts[id(node)] = 0
        pairs = (
            node.value if isinstance(node, yaml.MappingNode) else ((each,) for each in node.value)
        )
        counts[id(node)] = 1 + sum(
            _count_values(each, path, counts) for pair in pairs for each in pair
        )
    count, at = counts[id(node)], f"{path}:{node.start_mark.line + 1}"
    if count == 0:
        raise UsageError(f"{at}: an alias refers to the value that contains it", EXAMPLE)
    if count > _MAX_VALUES:
        raise UsageError(
            f"{at}: aliases expand to {count:,} values, at most {_MAX_VALUES:,} are allowed",
            EXAMPLE,
        )
    return count


def _find_lines(root: yaml.Node, path: Path) -> tuple[dict[str, int], dict[str, str]]:
    """Return the line of every key and the text of every scalar, by dotted path.

    Raises:
        UsageError: A mapping has a duplicate key.
    """
    lines: dict[str, int] = {}
    texts: dict[str, str] = {}
    seen = {id(root)}
    todo = [("", root)]
    while todo:
        prefix, node = todo.pop()
        if not isinstance(node, yaml.MappingNode):
            continue
        for key, member in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            name, line = f"{prefix}{key.value}", key.start_mark.line + 1
            if name in lines:
                raise UsageError(f"{path}:{line}: {name!r} is already on line {lines[name]}")
            lines[name] = line
            if isinstance(member, yaml.ScalarNode):
                texts[name] = str(member.value)
            if id(member) not in seen:
                seen.add(id(member))
                todo.append((f"{name}.", member))
    return lines, texts
