"""Checkpoints from the Hugging Face hub: its local cache, and a download that cannot hang."""

from __future__ import annotations

from pathlib import Path

from specbench_cli.errors import EnvironmentFault

TIMEOUT_S = 10.0
"""Longest wait for the hub's answer before a download is given up."""

WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
UNWANTED = ["*/*", "consolidated*"]
"""The same weights once more, in other formats."""


def cached_snapshot(hub_id: str) -> Path | None:
    """The folder of a model's snapshot in the hub's cache, None if it is not (wholly) there.

    The folder's name is the commit. Never asks the network.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            hub_id, allow_patterns=WANTED, ignore_patterns=UNWANTED, local_files_only=True
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return Path(folder)


def download(name: str, hub_id: str, size: str, instead: str) -> Path:
    """Download a model's weights (safetensors only), configuration and tokenizer.

    Args:
        name: the model as the user gave it, for the message.
        size: how much there is to download, in words.
        instead: what to do where it cannot be had.

    Raises:
        EnvironmentFault: offline, refused, or the download failed.
    """
    from huggingface_hub import HfApi, snapshot_download

    try:
        # asked first because this question has a limit; those of the download wait for ever
        HfApi().model_info(hub_id, timeout=TIMEOUT_S)
        folder = snapshot_download(
            hub_id,
            allow_patterns=WANTED,
            ignore_patterns=UNWANTED,
            etag_timeout=TIMEOUT_S,
        )
    except Exception as fault:  # network, disk, gate and hub fail in many unrelated types
        reason = str(fault).strip().partition("\n")[0] or type(fault).__name__
        include = " ".join(f"--include '{pattern}'" for pattern in WANTED)
        raise EnvironmentFault(
            f"{name}: {hub_id} is not on this machine ({size} to download), and the hub could not "
            f"be used: {reason}",
            f"download it where there is a network: hf download {hub_id} {include}; {instead}",
        ) from fault
    return Path(folder)
