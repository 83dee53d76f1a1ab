"""Datastore of REST: texts as token ids of the target, and a suffix array over these texts.

He et al., NAACL 2024, arXiv:2311.08252, section 3.1. The authors store a corpus in several shards.
Here a datastore is a folder with config.json and one safetensors file, which is memory-mapped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from safetensors.torch import save_file

from specbench_cli.api import (
    Artifact,
    Decoder,
    EnvironmentFault,
    SuffixArray,
    Weights,
    sha256_of,
)

TOKENIZER = "tokenizer.json"
_HINT = "build one for this target: specbench train rest --target MODEL --out DIR"
_RANDOM = 64
"""Length of the text of a random datastore, as a multiple of the vocabulary size."""


class Datastore(SuffixArray, Artifact):
    """Read-only datastore of texts from which REST drafts."""

    kind: ClassVar[str] = "datastore"
    hint: ClassVar[str] = (
        "specbench train rest --target MODEL --out DIR [--text FILE], then"
        " --set rest.datastore=DIR/datastore"
    )

    @property
    def weight_bytes(self) -> int:  # type: ignore[override]
        """Size of the token ids and the suffix array, in bytes."""
        return int(self.tokens.nbytes + self.order.nbytes)

    @classmethod
    def load(cls, folder: Path, decoders: Mapping[str, Decoder]) -> Self:
        """Load a datastore that `write` wrote.

        Raises:
            EnvironmentFault: The files cannot be read, or they contain token ids of another
                tokenizer.
        """
        file, target = folder / "config.json", decoders["target"]
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        facts = config.get("specbench", {})
        if facts.get("kind") != cls.kind:
            raise EnvironmentFault(f"{folder.name} is not a datastore", cls.hint)
        if config["vocab_size"] != target.vocab_size:
            raise EnvironmentFault(
                f"{folder.name} is for a vocabulary of {config['vocab_size']} tokens; this target"
                f" has {target.vocab_size}",
                _HINT,
            )
        built_with, loaded = facts.get("tokenizer_sha256"), sha256_of(target, TOKENIZER)
        if None not in (built_with, loaded) and built_with != loaded:
            raise EnvironmentFault(f"{folder.name} was built with another tokenizer", _HINT)
        weights = Weights(folder)
        try:
            return cls(weights["tokens"].numpy(), weights["order"].numpy())
        except KeyError as missing:
            raise EnvironmentFault(f"{folder.name}: missing tensor {missing}", _HINT) from None

    @classmethod
    def random(cls, decoders: Mapping[str, Decoder], seed: int = 0) -> Self:
        """Return a datastore with one random text."""
        vocab = decoders["target"].vocab_size
        text = np.random.default_rng(seed).integers(vocab, size=_RANDOM * vocab).tolist()
        return cls(*cls.sort([text], vocab))


def write(
    texts: Iterable[Sequence[int]], vocab_size: int, folder: Path, facts: Mapping[str, Any]
) -> None:
    """Build a datastore and write it to a new folder.

    Args:
        texts: Token ids of each text.
        vocab_size: Number of token ids of the target.
        folder: New folder.
        facts: Entries for "specbench" in config.json, which describe the source of the texts.
    """
    tokens, order = Datastore.sort(texts, vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {"tokens": torch.from_numpy(tokens), "order": torch.from_numpy(order)}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = {
        "vocab_size": vocab_size,
        "tokens": len(tokens),
        "texts": int((tokens == vocab_size).sum()),
        "specbench": {"kind": Datastore.kind, **facts},
    }
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
