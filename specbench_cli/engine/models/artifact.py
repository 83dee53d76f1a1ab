"""Trained modules that methods need besides the models: draft heads, predictors, datastores.

Code that only plans a run imports this module, so it does not import torch.
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
"""Value of `ArtifactSpec.source`: the module that is registered for the run's target."""


class Artifact(ABC):
    """A trained module that a method needs, such as a draft head or an acceptance predictor.

    Attributes:
        kind: Name of this kind of module. A target's description lists its modules under `heads` by
            kind.
        inside: Whether checkpoints of targets contain the module.
        hint: Command that trains or downloads the module. Empty for draft heads.
        weight_bytes: Size of the module's own weights in bytes.
    """

    kind: ClassVar[str]
    inside: ClassVar[bool] = False
    hint: ClassVar[str] = ""
    weight_bytes: int

    @classmethod
    @abstractmethod
    def load(cls, folder: Path, decoders: Mapping[str, Decoder]) -> Self:
        """Load the module from a folder.

        Args:
            decoders: Decoders of the run, by role ("target", "draft").

        Raises:
            EnvironmentFault: The folder is not readable, or its module was trained for another
                model.
        """

    @classmethod
    @abstractmethod
    def random(cls, decoders: Mapping[str, Decoder], seed: int = 0) -> Self:
        """Return an untrained module that fits the decoders. Audits on tiny models use it."""


@dataclass(frozen=True, slots=True)
class ArtifactSpec:
    """A trained module that a method needs, and where to find it.

    Attributes:
        kind: Class of the module.
        source: `OWN`, a registered name, or a folder.
    """

    kind: type[Artifact]
    source: str = OWN
