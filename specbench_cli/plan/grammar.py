"""Grammar that constrains the outputs of a run: `--grammar`.

A grammar is either built in or read from a file. The suffix of the file determines the kind of
grammar. The library llguidance parses grammars and computes token masks. Install it as an extra:
`pip install 'specbench-cli[grammar]'`.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench_cli import files
from specbench_cli.config.problems import did_you_mean
from specbench_cli.errors import EnvironmentFault, UsageError, is_library_error, reason_of
from specbench_cli.scoring.text import valid_json

if TYPE_CHECKING:
    from specbench_cli.engine.verify.grammar import GrammarMask

JSON = ".json"
KINDS = {
    JSON: "a JSON schema",
    ".lark": "a Lark grammar",
    ".gbnf": "a GBNF grammar",
    ".regex": "a regular expression",
}
"""Kinds of grammar files by suffix. Except .json, the suffixes are names in llguidance."""

BUILT_IN = {
    "json": json.dumps(
        {
            "x-guidance": {
                "whitespace_flexible": False,
                "item_separator": ", ?",
                "key_separator": ": ?",
            },
            "type": "object",
        }
    )
}
"""JSON schemas by name.

"json" is any object on one line. With free whitespace, a model could emit whitespace endlessly.
"""

LIBRARY = "llguidance"
_DIGITS = 12
"""Number of digits of a checksum in tables."""
MAX_BYTES = 10 * files.MB
"""Maximum size of a grammar file in bytes."""


@dataclass(frozen=True)
class Grammar:
    """A valid grammar.

    Attributes:
        name: A key of `BUILT_IN`, or the name of a file without its folder.
        kind: A key of `KINDS`.
        text: Content of the file.
    """

    name: str
    kind: str
    text: str

    @classmethod
    def read(cls, name: str) -> Grammar:
        """Read a grammar: a built-in grammar by its name, or a file.

        Raises:
            UsageError: The grammar does not exist or is invalid.
            EnvironmentFault: llguidance is not installed.
        """
        known = ", ".join(BUILT_IN)
        if name in BUILT_IN:
            found = cls(name, JSON, BUILT_IN[name])
        else:
            path = Path(name).expanduser()
            kinds = ", ".join(f"{ending} ({kind})" for ending, kind in KINDS.items())
            if not path.is_file():
                raise UsageError(
                    f"--grammar {name}: the file does not exist, and built-in grammars are:"
                    f" {known}{did_you_mean(name, [*BUILT_IN])}",
                    hint=f"--grammar json, or a file with the suffix {kinds}",
                )
            if path.suffix not in KINDS:
                raise UsageError(
                    f"--grammar {name}: its name must have one of the suffixes {kinds}",
                    hint=f"mv {name} {path.with_suffix(JSON)}",
                )
            try:
                found = cls(path.name, path.suffix, files.read_text(path, MAX_BYTES))
            except (OSError, UnicodeDecodeError) as fault:
                why = getattr(fault, "strerror", None) or fault
                raise UsageError(
                    f"--grammar {name} cannot be read: {why}",
                    hint="specbench run --grammar json",
                ) from fault
        found._check(name)
        return found

    def _check(self, name: str) -> None:
        """Raise UsageError unless the content of the grammar is valid for its kind."""
        matcher = _library().LLMatcher
        try:
            wrong, warnings = matcher.validate_grammar_with_warnings(self._compiled)
        except ValueError as fault:
            wrong, warnings = True, [str(fault)]
        if wrong:
            why = " ".join(" ".join(warnings).split())
            raise UsageError(
                f"--grammar {name} is not {KINDS[self.kind]}: {why}",
                hint="correct the grammar; docs/how-to/grammars.md describes the supported syntax",
            )

    @property
    def sha256(self) -> str:
        """Checksum of the grammar's text."""
        return sha256(self.text.encode()).hexdigest()

    @property
    def library(self) -> str:
        """Name and version of the library that computes the token masks."""
        return f"{LIBRARY} {metadata.version(LIBRARY)}"

    def __str__(self) -> str:
        """Return the name of the grammar and the first digits of its checksum."""
        return f"{self.name} {self.sha256[:_DIGITS]}"

    def facts(self) -> dict[str, str]:
        """Return the grammar's entry in the manifest."""
        return {"name": self.name, "sha256": self.sha256, "library": self.library}

    def create_mask(self, tokenizer: Any, eos: Iterable[int], label: str) -> GrammarMask:
        """Return the logits processor that enforces the grammar.

        Args:
            tokenizer: Tokenizer of the target, from transformers.
            eos: Token ids that end an output.
            label: Name of the target.

        Raises:
            UsageError: the target's tokens cannot express the grammar.
        """
        from specbench_cli.engine.verify.grammar import GrammarMask

        ends = sorted(eos)
        if not ends:
            raise UsageError(
                f"--grammar {self.name} needs a token that ends an output, and {label} has none",
                hint="omit --grammar, or choose a --target with an EOS token in its config.json",
            )
        library = _library()
        try:
            words = importlib.import_module(f"{LIBRARY}.hf").from_tokenizer(
                tokenizer, eos_token=ends[0]
            )
            matcher = library.LLMatcher(words, self._compiled)
            why = matcher.get_error()
        except (
            BaseException
        ) as fault:  # its Rust code can raise any exception for a damaged tokenizer
            if not is_library_error(fault):
                raise
            why = reason_of(fault)
        if why:
            raise UsageError(
                f"--grammar {self.name} cannot be expressed with the tokens of {label}:"
                f" {' '.join(why.split())}",
                hint="choose a --target with a fast tokenizer (tokenizer.json)",
            )
        return GrammarMask(matcher, ends)

    def accepts(self, text: str) -> bool:
        """Return True if the grammar accepts a text, in any tokenization."""
        if self.kind == JSON and not valid_json(text):
            return False
        letters, fresh = _byte_matcher(self._compiled)
        matcher, tokens = fresh.deep_copy(), letters.tokenize_str(text)
        read: int = matcher.try_consume_tokens(tokens)
        return read == len(tokens) and bool(matcher.is_accepting())

    @property
    def _compiled(self) -> str:
        """The grammar, compiled into the format of llguidance.

        Raises:
            ValueError: The text is not a valid grammar.
        """
        kind = "json_schema" if self.kind == JSON else self.kind.removeprefix(".")
        return str(_library().grammar_from(kind, self.text.strip("\n")))


@lru_cache(maxsize=8)
def _byte_matcher(compiled: str) -> tuple[Any, Any]:
    """Return a tokenizer with one token per byte, and a matcher of the grammar for it."""
    letters = _library().LLTokenizer("byte")
    return letters, _library().LLMatcher(letters, compiled)


def _library() -> Any:
    """Import and return llguidance. Raise EnvironmentFault if it is not installed."""
    try:
        return importlib.import_module(LIBRARY)
    except ModuleNotFoundError as fault:
        raise EnvironmentFault(
            f"--grammar needs the Python package {LIBRARY}, which is not installed",
            hint="pip install 'specbench-cli[grammar]'",
        ) from fault
