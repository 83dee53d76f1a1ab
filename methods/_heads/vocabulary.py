"""Draft vocabulary of a head: the token ids that the head can draft, often a subset of the
target's.

A checkpoint stores the draft vocabulary as offsets to the target's ids (`d2t`) or as a mask over
these ids (`t2d`), as in EAGLE-3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from methods._heads.files import LoadedHead, head_mismatch
from specbench_cli.api import Decoder, output_id_tensors, read_output_ids


@dataclass(frozen=True)
class HeadVocabulary:
    """Token ids that a head can draft, and whether the head has its own embedding and output
    matrix.

    Attributes:
        size: Number of token ids of the target.
        ids: Target ids that the head can draft, [r], in the order of its output. None means all
            ids.
        embedding_rows: Number of rows of the head's own embedding. None if the head uses the
            target's embedding.
        has_output_matrix: Whether the head has its own output matrix.
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
        draft_ids = _read_ids(files, target)
        return cls(target.vocab_size, draft_ids, embeds, "lm_head.weight" in files.tensors)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the draft vocabulary as tensors `d2t` and `t2d`, or no tensors if all ids are
        used.
        """
        return {} if self.ids is None else output_id_tensors(self.ids, self.size)


def _read_ids(files: LoadedHead, target: Decoder) -> Tensor | None:
    """Return the target ids that the head can draft, [r], or None if the head can draft all ids.

    Raises:
        EnvironmentFault: The vocabulary does not match the target's, or d2t and t2d disagree.
    """
    matrix = files.tensors.get("lm_head.weight")
    rows = target.vocab_size if matrix is None else len(matrix)
    if not {"d2t", "t2d"} & files.tensors.keys() and rows != target.vocab_size:
        raise head_mismatch(
            files,
            f"its output matrix has {rows} rows, this target has {target.vocab_size} token ids, and"
            " the tensors d2t and t2d, which map one to the other, are missing",
        )
    return read_output_ids(files.tensors, target.vocab_size, files.source)


def _read_own_embedding(files: LoadedHead, target: Decoder) -> Tensor | None:
    """Return the head's own embedding.

    Return None if the head has none, or an exact copy of the target's.

    Raises:
        EnvironmentFault: The head has no embedding, and its hidden size is not the target's.
    """
    own, d = files.tensors.get("embed_tokens.weight"), files.shape.hidden_size
    if own is None:
        if d != target.hidden_size:
            raise head_mismatch(
                files, f"no embedding, and hidden size {d}; the target's is {target.hidden_size}"
            )
        return None
    ids = torch.arange(min(len(own), target.vocab_size), device=target.device)
    rows = own.to(device=target.device, dtype=target.dtype)[ids]
    return None if d == target.hidden_size and torch.equal(rows, target.embed(ids)) else own
