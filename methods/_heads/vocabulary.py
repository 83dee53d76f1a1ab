"""A head's own vocabulary: a part of the target's ids, told as offsets (d2t) or as a mask (t2d)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from methods._heads.files import LoadedHead, head_mismatch
from specbench_cli.api import Decoder, output_id_tensors, read_output_ids


@dataclass(frozen=True)
class HeadVocabulary:
    """What a head can say, and what it brings for that.

    size: how many ids the target has. says: those that the head can say, [r] in its order; None:
    all. embeds: rows of an embedding of its own. matrix: whether it has an output matrix.
    """

    size: int
    ids: Tensor | None = None
    embeds: int | None = None
    matrix: bool = False

    @classmethod
    def of(cls, files: LoadedHead, target: Decoder) -> Self:
        """The one of a head that was read; raises EnvironmentFault if it is not the target's."""
        embedding = _read_own_embedding(files, target)
        embeds = None if embedding is None else len(embedding)
        says = _read_ids(files, target)
        return cls(target.vocab_size, says, embeds, "lm_head.weight" in files.tensors)

    def to_tensors(self) -> dict[str, Tensor]:
        """What files hold of it: the ids as offsets and as a mask; nothing where it is all."""
        return {} if self.ids is None else output_id_tensors(self.ids, self.size)


def _read_ids(files: LoadedHead, target: Decoder) -> Tensor | None:
    """The target's ids that the head can say, [r] in its order; None for all of them.

    Raises:
        EnvironmentFault: the vocabulary is not the target's, or told in two ways that disagree.
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
    """The head's embedding where it is not a copy of the target's.

    Raises:
        EnvironmentFault: it has none, and the target's is of another width.
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
