"""The draft head of EAGLE-3.

Li, Wei, Zhang and Zhang: EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test, NeurIPS 2025, arXiv:2503.01840.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from methods._heads.files import HeadFiles
from methods._heads.layer import LayerHead, random_layer, random_matrix, wrong_size
from specbench_cli.api import Decoder, Layer, LayerReader, Scratch

ROWS_AT_ONCE = 256
"""Rows of the target's output matrix are read in blocks, so that little is held at a time."""


class Eagle3Head(LayerHead):
    """Slot t joins the token x_{t+1} and g_t, made of the target's rows at three layers.

    True features, three rows side by side, become g_t through `fc`; at later levels of a draft the
    row that left this layer is g itself. Attention reads [norm(embed(x_{t+1})), norm(g_t)], the
    residual stream is g_t. Its own output matrix speaks a part of the target's vocabulary.
    """

    kind: ClassVar[str] = "eagle3"
    first_norm = None

    def __init__(self, files: HeadFiles, target: Decoder) -> None:
        self._check(files, target)
        self.taps = files.taps(target.n_layers)
        self._ids = _said(files, target)
        self._true_width = files.tensors["fc.weight"].shape[1]
        self._norm_first = bool(files.config.get("norm_before_residual", False))
        self._own_embedding = _embedding(files, target)
        super().__init__(files, target)

    def _read_rest(self, read: LayerReader) -> None:
        self._enorm, self._hnorm, self._final = map(read.norm, ("enorm", "hnorm", "norm"))
        self._fc_norm = read.get("fc_norm.weight") if "fc_norm.weight" in read else None
        self.weight_bytes += 3 * self._final.nbytes
        if self._own_embedding is not None:
            self.weight_bytes += self._own_embedding.nbytes
        self._own_output = None
        if "lm_head.weight" in read:
            self._own_output = read.linear(read.get("lm_head.weight"))
        elif self._ids is not None:
            self._own_output = read.linear(_rows_of_output(self.target, self._ids))
        if self._own_output is not None:
            self.weight_bytes += self._own_output.nbytes

    def embed(self, ids: Tensor) -> Tensor:
        """See `Decoder`: the target's, unless the head was trained with one of its own."""
        if self._own_embedding is None:
            return self.target.embed(ids)
        return torch.embedding(self._own_embedding, ids)

    def norm(self, rows: Tensor) -> Tensor:
        """See `Decoder`."""
        return self._norm(rows, self._final)

    def unembed(self, rows: Tensor) -> Tensor:
        """See `Decoder`; ids that the head cannot say get -inf."""
        if self._own_output is None:
            return self.target.unembed(rows)
        said = self._own_output(rows.reshape(-1, self.hidden_size)).view(*rows.shape[:-1], -1)
        if self._ids is None:
            return said
        logits = said.new_full((*rows.shape[:-1], self.vocab_size), -torch.inf)
        return logits.index_copy_(-1, self._ids, said)

    def _join(self, tokens: Tensor, rows: Tensor) -> Tensor:
        self._tokens = self._norm(tokens, self._enorm)  # for attention, in this same forward
        if rows.shape[1] == self._true_width:
            if self._fc_norm is not None:
                rows = torch.rms_norm(rows, (self._true_width,), self._fc_norm, self._eps)
            g = self.fc(rows)
        elif rows.shape[1] == self.hidden_size:
            g = rows.clone()  # the layer adds to it
        else:
            raise ValueError(
                f"features of {rows.shape[1]} numbers; true ones have {self._true_width}, the"
                f" head's own {self.hidden_size}"
            )
        return self._norm(g, self._hnorm) if self._norm_first else g

    def _seen(self, layer: Layer, h: Tensor, scratch: Scratch) -> Tensor:
        rows = h if self._norm_first else self._norm(h, self._hnorm, scratch.size, scratch.normed)
        return torch.cat((self._tokens, rows), -1)

    @classmethod
    def _check(cls, files: HeadFiles, target: Decoder) -> None:
        d, wide = files.shape.hidden_size, 3 * target.hidden_size
        found = tuple(files.tensors["fc.weight"].shape)
        reads = files.tensors["layer.self_attn.q_proj.weight"].shape[1]
        if found != (d, wide) or wide == d:
            raise wrong_size(
                files,
                f"fc is {list(found)}; this target's rows of {target.hidden_size}, three at a time,"
                f" need {[d, wide]}",
            )
        if reads != 2 * d:
            raise wrong_size(files, f"attention reads rows of {reads}; {2 * d} are computed here")

    @classmethod
    def random_files(cls, target: Decoder, seed: int) -> HeadFiles:
        """See `LayerHead`; it can say every second id, and the first two."""
        width = target.hidden_size
        shape, tensors, generator = random_layer(target, seed, reads=2 * width)
        tensors["fc.weight"] = random_matrix(width, 3 * width, generator)
        for norm in ("enorm", "hnorm", "norm"):
            tensors[f"{norm}.weight"] = torch.ones(width)
        every = torch.arange(target.vocab_size)
        said = (every % 2 == 0) | (every < 2)
        ids = said.nonzero()[:, 0]
        tensors |= {"t2d": said, "d2t": ids - torch.arange(len(ids))}
        tensors["lm_head.weight"] = random_matrix(len(ids), width, generator)
        return HeadFiles("a random head", tensors, shape)


def _said(files: HeadFiles, target: Decoder) -> Tensor | None:
    """The target's ids that the head can say, [r] in its order; None for all of them.

    Raises:
        EnvironmentFault: the vocabulary is not the target's, or told in two ways that disagree.
    """
    offsets, mask = files.tensors.get("d2t"), files.tensors.get("t2d")
    matrix = files.tensors.get("lm_head.weight")
    if offsets is None and mask is None:
        rows = target.vocab_size if matrix is None else len(matrix)
        if rows != target.vocab_size:
            raise wrong_size(
                files,
                f"its output matrix has {rows} rows, this target {target.vocab_size} ids, and"
                " there is neither d2t nor t2d to say which is which",
            )
        return None
    if offsets is None:
        assert mask is not None
        ids = mask.nonzero()[:, 0]
    else:
        ids = torch.arange(len(offsets)) + offsets.to(torch.int64)
    rows = len(ids) if matrix is None else len(matrix)
    known = bool(((ids >= 0) & (ids < target.vocab_size)).all()) and len(ids.unique()) == len(ids)
    if not known or rows != len(ids):
        raise wrong_size(
            files,
            f"d2t names {len(ids)} ids up to {int(ids.max())}, the output matrix has {rows} rows,"
            f" the target {target.vocab_size} ids",
        )
    if mask is not None and not torch.equal(mask.nonzero()[:, 0], ids.sort().values):
        raise wrong_size(files, "d2t and t2d name different ids")
    everything = torch.equal(ids, torch.arange(target.vocab_size))
    return None if everything else ids.to(target.device)


def _embedding(files: HeadFiles, target: Decoder) -> Tensor | None:
    """The head's embedding where it is not a copy of the target's.

    Raises:
        EnvironmentFault: it has none, and the target's is of another width.
    """
    own, d = files.tensors.get("embed_tokens.weight"), files.shape.hidden_size
    if own is None:
        if d != target.hidden_size:
            raise wrong_size(
                files, f"no embedding, and rows of {d} where the target's are {target.hidden_size}"
            )
        return None
    own = own.to(device=target.device, dtype=target.dtype)
    ids = torch.arange(min(len(own), target.vocab_size), device=target.device)
    if d == target.hidden_size and torch.equal(own[ids], target.embed(ids)):
        return None
    return own.contiguous()


def _rows_of_output(target: Decoder, ids: Tensor) -> Tensor:
    """Rows [r, hidden] of the target's output matrix."""
    unit = torch.eye(target.hidden_size, dtype=target.dtype, device=target.device)
    blocks = [target.unembed(block)[:, ids] for block in torch.split(unit, ROWS_AT_ONCE)]
    return torch.cat(blocks).t()
