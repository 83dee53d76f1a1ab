"""Sampling parameters, the target's distribution of the next token, and coupled sampling noise.

The logits are changed in the same order as in transformers' generation: contrastive decoding and
logits processor, temperature, top-k, top-p, softmax. The result is called the warped distribution.
Greedy decoding takes the argmax of the logits and has no temperature.

In coupled sampling, the target's token is argmax(log p + Gumbel noise). The noise depends only on
seed, prompt and position, so all methods emit the same text.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbench_cli.engine.types import Rule
from specbench_cli.engine.verify.processor import LogitsProcessor
from specbench_cli.engine.verify.uscd import Contrast


@dataclass(frozen=True, slots=True)
class Sampling:
    """Decoding rule of a run.

    temperature: 0 for greedy decoding, above 0 otherwise.
    top_k, top_p: 0 disables top-k, and 1 disables top-p.
    contrast: Contrastive decoding, which changes the target's logits. None disables it.
    processor: Logits processor, which runs after the contrastive decoding. None disables it.
    """

    rule: Rule = "greedy"
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    processor: LogitsProcessor | None = None
    contrast: Contrast | None = None

    def __post_init__(self) -> None:
        if (self.rule == "greedy") != (self.temperature == 0.0):
            raise ValueError(f"rule {self.rule!r} does not go with temperature {self.temperature}")

    @property
    def draws(self) -> bool:
        """True under rejection sampling, where only the distribution of the output is reproducible.

        Under greedy decoding and coupled sampling, every lossless method reproduces the same
        tokens.
        """
        return self.rule in ("rejection", "block")


def warp_logits(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return logits divided by the temperature, with -inf for tokens outside of top-k and top-p.

    Args:
        logits: [..., V], any floating type.

    Returns:
        [..., V] in float32, or in float64 for float64 logits. If nothing changes, the input tensor
        itself.
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if sampling.temperature != 1.0:
        scores = scores / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        kth = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < kth, -math.inf)
    if sampling.top_p < 1.0:
        ordered, index = scores.sort(dim=-1, descending=True, stable=True)
        mass = ordered.softmax(-1)
        # Keep a token if the total probability of all more likely tokens is below top_p.
        outside = (mass.cumsum(-1) - mass) >= sampling.top_p
        scores = scores.masked_fill(outside.scatter(-1, index, outside), -math.inf)
    return scores


def warp(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the distribution [..., V] after temperature, top-k and top-p."""
    return warp_logits(logits, sampling).softmax(-1)


def log_warp(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the logarithm of the distribution after temperature, top-k and top-p.

    Tokens outside of top-k and top-p get -inf.
    """
    return warp_logits(logits, sampling).log_softmax(-1)


def hash_key(*parts: object) -> int:
    """Return a 64-bit hash of any printable parts. It is the same on every machine."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


_LOW = 0xFFFFFFFF


def philox(counter: Tensor, key: int) -> Tensor:
    """Return random words of the generator Philox4x32-10 (Salmon et al., SC 2011).

    The function uses int64 arithmetic, so that CPU and GPU give the same words.

    Args:
        counter: int64 [4, ...], each word in [0, 2**32).
        key: 64 bits. The low 32 bits are the first key word.

    Returns:
        int64 [4, ...], each word uniform in [0, 2**32).
    """
    near = counter.device.type == "cpu"
    # On a CPU, NumPy takes a third of torch's time. Its int64 arithmetic overflows in the same way.
    words: Any = counter.numpy().reshape(4, -1) if near else counter.unbind(0)
    c0, c1, c2, c3 = words
    k0, k1 = key & _LOW, key >> 32
    for _ in range(10):
        # int64 products overflow modulo 2**64. So they keep all 64 bits of the unsigned product.
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _LOW) ^ c1 ^ k0,
            p1 & _LOW,
            ((p0 >> 32) & _LOW) ^ c3 ^ k1,
            p0 & _LOW,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    words = (c0, c1, c2, c3)
    return torch.from_numpy(np.stack(words)).view(counter.shape) if near else torch.stack(words)


class Noise:
    """Gumbel noise for each output index and target token id, from (seed, prompt, turn).

    The noise does not depend on the draft. So `argmax(log p + noise)` is the same token, whatever
    the method proposed. The noise is computed in blocks of positions, and the last two blocks are
    cached.
    """

    def __init__(
        self, seed: int, prompt_id: str, turn: int, vocab: int, device: torch.device
    ) -> None:
        self._key = hash_key("noise", seed, prompt_id, turn)
        self._vocab = vocab
        self._device = device
        # A block has about a million numbers. This limits both the number of calls and the memory.
        self._block = max(1, min(32, (1 << 20) // vocab))
        self._blocks: dict[int, Tensor] = {}

    def rows(self, first: int, n: int) -> Tensor:
        """Return the noise float32 [n, V] of the output positions first to first + n - 1."""
        start, stop = first // self._block, (first + n - 1) // self._block
        parts = [self._make(b) for b in range(start, stop + 1)]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        offset = first - start * self._block
        return whole[offset : offset + n]

    def clear(self) -> None:
        """Delete the cached blocks. They are computed again when they are needed."""
        self._blocks.clear()

    def _make(self, block: int) -> Tensor:
        if block not in self._blocks:
            for old in [b for b in self._blocks if abs(b - block) > 1]:
                del self._blocks[old]
            self._blocks[block] = self._gumbel(block)
        return self._blocks[block]

    def _gumbel(self, block: int) -> Tensor:
        quads = -(-self._vocab // 4)  # each counter gives the random words of four token ids
        shape = (self._block, quads)
        token = torch.arange(quads, device=self._device).expand(shape)
        position = torch.arange(block * self._block, (block + 1) * self._block, device=self._device)
        zero = torch.zeros(shape, dtype=torch.int64, device=self._device)
        counter = torch.stack((token, position[:, None].expand(shape), zero, zero))
        words = philox(counter, self._key).permute(1, 2, 0).reshape(self._block, -1)
        uniform = (words[:, : self._vocab].double() + 0.5) * 2.0**-32
        return (-(-uniform.log()).log()).float()
