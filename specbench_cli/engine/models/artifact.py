"""Trained modules that methods need besides the models: draft heads, predictors, datastores.

Planning code imports this module, so it does not import torch.
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
"""Source of the module that belongs to the target of the run."""


class Artifact(ABC):
    """A trained module that a method needs, such as a draft head or an acceptance predictor.

    Attributes:
        kind: Its key under `heads` of a model, used to find the module of a target.
        inside: Whether checkpoints include it in the files of the target.
        hint: Command that obtains the module if none is known for a target. Draft heads need none.
        weight_bytes: Bytes of its own weights.
    """

    kind: ClassVar[str]
    inside: ClassVar[bool] = False
    hint: ClassVar[str] = ""
    weight_bytes: int

    @classmethod
    @abstractmethod
    def load(cls, folder: Path, decoders: Mapping[str, Decoder]) -> Self:
        """Load the module from a folder, for the decoders of a run by role.

        Raises:
            EnvironmentFault: The folder is not readable, or belongs to another model.
        """

    @classmethod
    @abstractmethod
    def random(cls, decoders: Mapping[str, Decoder], seed: int = 0) -> Self:
        """Return a module with random weights that fits the decoders, for audits on tiny models."""


@dataclass(frozen=True, slots=True)
class ArtifactSpec:
    """A module that a method needs, and its source.

    Attributes:
        kind: Class of the module.
        source: `OWN`, a name, or a folder.
    """

    kind: type[Artifact]
    source: str = OWN
