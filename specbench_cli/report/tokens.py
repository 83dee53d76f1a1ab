"""Decoding of token ids to text in reports, if the target's tokenizer is on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specbench_cli.errors import SpecbenchError, is_library_error
from specbench_cli.models.aliases import aliases
from specbench_cli.models.hub import cached_snapshot
from specbench_cli.models.resolve import resolve
from specbench_cli.summary.comparison import Decode


def load_text_decoder(target: str) -> Decode | None:
    """Return a function that decodes token ids to text, or None if the tokenizer is not available.

    Nothing is downloaded.

    Args:
        target: Name of the target in a manifest. For a local model this is only the name of its
            folder, so the model is found only in the current folder.
    """
    tokenizer = load_tokenizer(target)
    if tokenizer is None:
        return None

    return lambda ids: decode_ids(tokenizer, ids)


def decode_ids(tokenizer: Any, ids: Sequence[int], **options: Any) -> str:
    """Return the text of token ids, or the ids as "<id>" if the tokenizer cannot decode them.

    Some tokenizers fail on ids beyond their vocabulary, which padded models can return.
    """
    try:
        return str(tokenizer.decode(list(ids), **options))
    except BaseException as fault:
        if not is_library_error(fault):
            raise
        return " ".join(f"<{token}>" for token in ids)


def load_tokenizer(target: str) -> Any:
    """Load a target's tokenizer with transformers. Return None if it is not on this machine."""
    folder = _folder(target)
    if folder is None:
        return None
    from specbench_cli.engine.models.checkpoint import read_tokenizer  # imports torch

    try:
        return read_tokenizer(folder)
    except SpecbenchError:
        return None


def _folder(target: str) -> Path | None:
    alias = aliases().get(target)
    hub_id = alias.hub if alias is not None else target if "/" in target else None
    packed = alias is not None and alias.package is not None  # `resolve` never downloads it
    if hub_id and not packed:
        return cached_snapshot(hub_id)
    try:
        return resolve(target).path
    except SpecbenchError:
        return None
