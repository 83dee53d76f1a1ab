"""Draft vocabulary of a head: a subset of the target's ids, as offsets (d2t) or a mask (t2d)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from methods._heads.files import LoadedHead, head_mismatch
from specbench_cli.api import Decoder, output_id_tensors, read_output_ids


@dataclass(frozen=True)
class HeadVocabulary:
    """Token ids that a head can draft, and the matrices of its own for them.

    Attributes:
        size: Number of token ids of the target.
        ids: Ids that the head can draft, [r] in the order of its output. None: all.
        embeds: Number of rows of the head's own embedding. None: the target's embedding is used.
        matrix: Whether the head has its own output matrix.
    """

    size: int
    ids: Tensor | None = None
    embedding_rows: int | None = None
    has_output_matrix: bool = False

    @classmethod
    def from_files(cls, files: LoadedHead, target: Decoder) -> Self:
        """Return the draft vocabulary of a loaded head.

        Raises:
            EnvironmentFault: The vocabulary does not match the target's.
        """
        embedding = _read_own_embedding(files, target)
        embeds = None if embedding is None else len(embedding)
        says = _read_ids(files, target)
        return cls(target.vocab_size, says, embeds, "lm_head.weight" in files.tensors)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the tensors to store: the ids as offsets and as a mask, or nothing if all ids are
        used."""
        return {} if self.ids is None else output_id_tensors(self.ids, self.size)


def _read_ids(files: LoadedHead, target: Decoder) -> Tensor | None:
    """Return the target's ids that the head can draft, [r] in its order, or None for all.

    Raises:
        EnvironmentFault: The vocabulary does not match the target's, or d2t and t2d disagree.
    """
    matrix = files.tensors.get("lm_head.weight")
    rows = target.vocab_size if matrix is None else len(matrix)
    if not {"d2t", "t2d"} & files.tensors.keys() and rows != target.vocab_size:
        raise head_mismatch(
            files,
            f"its output matrix has {rows} rows, this target {target.vocab_size} ids, and"
            " there is neither d2t nor t2d to say which is which",
        )
    return read_output_ids(files.tensors, target.vocab_size, files.source)


def _read_own_embedding(files: LoadedHead, target: Decoder) -> Tensor | None:
    """Return the head's embedding, or None if it is a copy of the target's.

    Raises:
        EnvironmentFault: The head has no embedding, and the target's has another width.
    """
    own, d = files.tensors.get("embed_tokens.weight"), files.shape.hidden_size
    if own is None:
        if d != target.hidden_size:
            raise head_mismatch(
                files, f"no embedding, and rows of {d} where the target's are {target.hidden_size}"
            )
        return None
    ids = torch.arange(min(len(own), target.vocab_size), device=target.device)
    rows = own.to(device=target.device, dtype=target.dtype)[ids]
    return None if d == target.hidden_size and torch.equal(rows, target.embed(ids)) else own
