"""Checkpoints from the Hugging Face hub: its local cache, and a download that cannot hang."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from specbench_cli.errors import EnvironmentFault

TIMEOUT_S = 10.0
"""Longest wait for the hub's answer before a download is given up."""

WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
UNWANTED = ["*/*", "consolidated*"]
"""The same weights once more, in other formats."""


class Wanted(NamedTuple):
    """What is to be had from the hub.

    Attributes:
        hub_id, revision: where it is; None is the main branch.
        size: how much there is to download, in words.
        gated: whether the licence is known to be asked for first.
    """

    hub_id: str
    revision: str | None = None
    size: str = "download size not known"
    gated: bool = False

    @property
    def page(self) -> str:
        """Where a person reads about it, and accepts its licence."""
        return f"https://huggingface.co/{self.hub_id}"

    @property
    def command(self) -> str:
        """What downloads it into the hub's cache."""
        revision = f" --revision {self.revision}" if self.revision else ""
        include = " ".join(f"--include '{pattern}'" for pattern in WANTED)
        return f"hf download {self.hub_id}{revision} {include}"


def cached_snapshot(hub_id: str, revision: str | None = None) -> Path | None:
    """The folder of a model's snapshot in the hub's cache, None if it is not (wholly) there.

    The folder's name is the commit. Never asks the network.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            hub_id,
            revision=revision,
            allow_patterns=WANTED,
            ignore_patterns=UNWANTED,
            local_files_only=True,
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return Path(folder)


def download(name: str, wanted: Wanted, also: Wanted | None, instead: str) -> Path:
    """Download a model's weights (safetensors only), configuration and tokenizer.

    Args:
        name: the model as the user gave it, for the message.
        also: what else has to be downloaded for it to be of use, for the message.
        instead: what to do where it cannot be had.

    Raises:
        EnvironmentFault: offline, gated, unknown to the hub, or the download failed.
    """
    from huggingface_hub import HfApi, snapshot_download

    hub_id, revision = wanted.hub_id, wanted.revision
    try:
        # asked first because this question has a limit; those of the download wait for ever
        HfApi().model_info(hub_id, revision=revision, timeout=TIMEOUT_S)
        folder = snapshot_download(
            hub_id,
            revision=revision,
            allow_patterns=WANTED,
            ignore_patterns=UNWANTED,
            etag_timeout=TIMEOUT_S,
        )
    except Exception as fault:  # network, disk, gate and hub fail in many unrelated types
        raise _explained(fault, name, wanted, also, instead) from fault
    return Path(folder)


def _explained(
    fault: Exception, name: str, wanted: Wanted, also: Wanted | None, instead: str
) -> EnvironmentFault:
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    subject = wanted.hub_id if name == wanted.hub_id else f"{name}: {wanted.hub_id}"
    here = f"{subject} is not on this machine ({wanted.size})"
    accept = f"accept the licence at {wanted.page}, then: hf auth login"
    match fault:
        case GatedRepoError():
            return EnvironmentFault(
                f"{here}, and the hub gives it only to those who have accepted its licence",
                f"{accept}; then the same command again; {instead}",
            )
        case RepositoryNotFoundError() | HFValidationError():
            return EnvironmentFault(
                f"{subject} is not on this machine, and the hub has no such model or it is private",
                f"check the name at {wanted.page}; if it is private: hf auth login; {instead}",
            )
        case OfflineModeIsEnabled():
            reason = "HF_HUB_OFFLINE forbids asking the hub"
        case _:
            says = str(fault).strip().partition("\n")[0] or type(fault).__name__
            reason = f"the hub could not be used: {says}"
    steps = [accept] if wanted.gated else []
    steps.append(f"download it where there is a network: {wanted.command}")
    if also:
        steps.append(f"and its customary draft ({also.size}): {also.command}")
    return EnvironmentFault(f"{here}, and {reason}", "; ".join([*steps, instead]))
