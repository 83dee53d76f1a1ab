"""Pickled weights to safetensors, reading nothing but tensors."""

import pickle
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from specbench_cli import files
from specbench_cli.errors import EnvironmentFault, UsageError

PATTERNS = ("pytorch_model*.bin", "*_lm_head.pt")
"""The second: Medusa's and Hydra's heads (medusa_lm_head.pt, hydra_lm_head.pt)."""


def convert(folder: Path, out: Path) -> Path:
    """Write model.safetensors and config.json to `out`, from `folder`'s pickles.

    The pickles are read by PyTorch's weights-only unpickler, which builds tensors and runs no code
    of theirs.

    Raises:
        UsageError: no pickle or no config.json in `folder`.
        EnvironmentFault: a pickle of more than tensors, or none at all.
    """
    files.check_model_folder(folder)
    pickles = sorted(file for pattern in PATTERNS for file in folder.glob(pattern))
    config = folder / "config.json"
    if not pickles or not config.is_file():
        missing = "config.json" if pickles else " or ".join(PATTERNS)
        raise UsageError(f"{folder} has no {missing}", "specbench train convert FOLDER --out DIR")
    tensors: dict[str, Tensor] = {}
    for file in pickles:
        tensors |= _tensors(file)
    with files.staging_folder(out, overwrite=None) as staging:
        # Clone every tensor, because safetensors cannot store tensors that share memory.
        cloned = {name: tensor.clone() for name, tensor in tensors.items()}
        save_file(cloned, staging / "model.safetensors", {"format": "pt"})
        shutil.copyfile(config, staging / "config.json")
    return out / "model.safetensors"


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as fault:
        # Do not show torch's message: it advises to run the code in the file.
        needed = re.search(r"GLOBAL ([\w.]+)", str(fault))
        what = f" ({needed[1]})" if needed else ""
        raise EnvironmentFault(
            f"{file} is not read: it contains other objects than tensors{what}, or is damaged",
            "ask its authors for safetensors",
        ) from fault
    if not isinstance(loaded, dict) or not all(isinstance(v, Tensor) for v in loaded.values()):
        raise EnvironmentFault(
            f"{file} is not a mapping of names to tensors", "ask its authors for safetensors"
        )
    return {str(name): tensor.contiguous() for name, tensor in loaded.items()}
