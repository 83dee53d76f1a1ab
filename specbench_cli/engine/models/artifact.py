"""Trained modules beside the models, which methods ask for: draft heads, predictors,
datastores.

Plans read this module, so it does not import torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

if TYPE_CHECKING:
    from specbench_cli.engine.models.decoder import Decoder

OWN = "auto"
"""The source that stands for the module that belongs to the run's target."""


class Artifact(ABC):
    """A trained module that a method asks for: a draft head, a predictor of acceptance.

    Attributes:
        kind: its word under a model's `heads`, by which the one that belongs to a target is found.
        inside: whether checkpoints ship it inside of the target's own files.
        hint: of what is no head: what to type where none is known for a target.
        weight_bytes: bytes held by its own weights.
    """

    kind: ClassVar[str]
    inside: ClassVar[bool] = False
    hint: ClassVar[str] = ""
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
class ArtifactSpec:
    """What a method asks for: a kind of module, and where it comes from.

    source: `OWN`, the name of one, or a folder.
    """

    kind: type[Artifact]
    source: str = OWN
