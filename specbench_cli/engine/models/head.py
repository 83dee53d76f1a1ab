"""Draft heads: decoders that read the target's own rows beside the tokens.

A head's row i holds the token i + 1 of the text beside the target's features of token i, and says
what token i + 2 may be (EAGLE, Li et al., ICML 2024, arXiv:2401.15077).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor

from specbench_cli.engine import host
from specbench_cli.engine.models.decoder import Decoder
from specbench_cli.engine.types import Out

NORMED = -1
"""The tap that stands for the rows that the target's output matrix reads."""


class Head(Decoder):
    """A decoder whose forward takes `Features` and whose logits are over the target's ids.

    Ids that it cannot say have logits of -inf. Its `Out.hidden` takes the place of the target's
    features for the next level of a draft.

    Attributes:
        taps: layers of the target whose outgoing rows it reads, side by side, or `NORMED`.
    """

    taps: tuple[int, ...]
    first = 1


class Tape:
    """The target's features of committed tokens, until a head has read them.

    Args:
        target: the model whose rows they are.
        taps: see `Head`.
    """

    def __init__(self, target: Decoder, taps: Sequence[int]) -> None:
        self._target, self._taps = target, tuple(taps)
        self.layers = tuple(tap for tap in self._taps if tap != NORMED)
        self._written: Tensor | None = None
        self._kept: list[Tensor] = []

    def write(self, out: Out) -> None:
        """Take the features [n, width] of a forward's rows."""
        self._written = features(out, self._taps, self._target)

    def keep(self, path: Sequence[int]) -> None:
        """Of the last forward's rows, keep those at `path`."""
        assert self._written is not None
        n = len(path)
        if n == 0 or path[-1] == n - 1:
            rows = self._written[:n]
        else:
            index = host.ids(path, self._written.device)
            rows = self._written.index_select(0, index)
        self._kept.append(rows)

    def read(self) -> Tensor:
        """All rows kept since the last time, [n, width]."""
        rows = self._kept[0] if len(self._kept) == 1 else torch.cat(self._kept)
        self._kept.clear()
        return rows


def features(out: Out, taps: Sequence[int], target: Decoder) -> Tensor:
    """What a head reads of a target's forward over one sequence, [n, width]."""
    parts = [target.norm(out.hidden[0]) if tap == NORMED else out.taps[tap][0] for tap in taps]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


# ---- trained modules beside the models ----------------------------------------------------------

OWN = "auto"
"""The source that stands for the module that belongs to the run's target."""


class Artifact(ABC):
    """A trained module that a method asks for: a draft head, a predictor of acceptance.

    Attributes:
        kind: its word under a model's `heads`, by which the one that belongs to a target is found.
        inside: whether checkpoints ship it inside of the target's own files.
        weight_bytes: bytes held by its own weights.
    """

    kind: ClassVar[str]
    inside: ClassVar[bool] = False
    weight_bytes: int

    @classmethod
    @abstractmethod
    def load(cls, folder: Path, decoders: Mapping[str, Decoder]) -> Self:
        """The module in a folder, for the decoders of a run, by role.

        Raises:
            EnvironmentFault: nothing that can be read, or made for another model.
        """

    @classmethod
    @abstractmethod
    def random(cls, decoders: Mapping[str, Decoder], seed: int = 0) -> Self:
        """One with random weights that fits the decoders: for audits on tiny models."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What a method asks for: a kind of module, and where it comes from.

    source: `OWN`, the name of one, or a folder.
    """

    kind: type[Artifact]
    source: str = OWN
