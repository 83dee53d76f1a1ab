"""Checkpoints from the Hugging Face hub: search in the local cache, and download with timeouts."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from specbench_cli.errors import EnvironmentFault

TIMEOUT_S = 10.0
"""Timeout of the hub's answer in seconds."""

INCLUDED_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
EXCLUDED_FILES = ["*/*", "consolidated*"]
"""Files with the same weights in other formats."""


class HubDownload(NamedTuple):
    """Model to download from the hub.

    Attributes:
        hub_id, revision: Repository and revision on the hub. Revision None means the main branch.
        size: Download size as text.
        gated: Whether the user must accept the licence before the download.
    """

    hub_id: str
    revision: str | None = None
    size: str = "download size not known"
    gated: bool = False

    @property
    def page(self) -> str:
        """URL of the model's page, where the user can accept the licence."""
        return f"https://huggingface.co/{self.hub_id}"

    @property
    def command(self) -> str:
        """Shell command that downloads the model into the hub's cache."""
        revision = f" --revision {self.revision}" if self.revision else ""
        include = " ".join(f"--include '{pattern}'" for pattern in INCLUDED_FILES)
        return f"hf download {self.hub_id}{revision} {include}"


def cached_snapshot(hub_id: str, revision: str | None = None) -> Path | None:
    """Return the folder of a model's complete snapshot in the hub's cache, or None.

    The commit is the name of the folder. The function does not use the network.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            hub_id,
            revision=revision,
            allow_patterns=INCLUDED_FILES,
            ignore_patterns=EXCLUDED_FILES,
            local_files_only=True,
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return Path(folder)


def download(name: str, wanted: HubDownload, also: HubDownload | None, instead: str) -> Path:
    """Download a model's weights (safetensors only), configuration and tokenizer.

    Args:
        name: name of the model as the user gave it, for messages.
        also: another model that must be downloaded too, for messages.
        instead: alternative for the hint if the download fails.

    Raises:
        EnvironmentFault: the machine is offline, the model is gated or unknown to the hub, or the
            download failed.
    """
    from huggingface_hub import HfApi, snapshot_download

    hub_id, revision = wanted.hub_id, wanted.revision
    try:
        # Query the model's metadata first. This request has a timeout, and the download has none.
        HfApi().model_info(hub_id, revision=revision, timeout=TIMEOUT_S)
        folder = snapshot_download(
            hub_id,
            revision=revision,
            allow_patterns=INCLUDED_FILES,
            ignore_patterns=EXCLUDED_FILES,
            etag_timeout=TIMEOUT_S,
        )
    except Exception as fault:  # network, disk, gate and hub fail in many unrelated types
        raise _explain_failure(fault, name, wanted, also, instead) from fault
    return Path(folder)


def _explain_failure(
    fault: Exception, name: str, wanted: HubDownload, also: HubDownload | None, instead: str
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
