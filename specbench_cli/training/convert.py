"""Conversion of pickled weights to safetensors. Only tensors are read from a pickle."""

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
"""Names of pickled weights. The second is for Medusa's and Hydra's heads (medusa_lm_head.pt)."""


def convert(folder: Path, out: Path) -> Path:
    """Convert the pickles in `folder`, and write model.safetensors and config.json to `out`.

    PyTorch's weights-only unpickler reads the pickles. It creates only tensors and runs no code
    from the file.

    Returns:
        The path of model.safetensors.

    Raises:
        UsageError: `folder` has no pickle or no config.json.
        EnvironmentFault: a file is damaged, or contains objects other than tensors.
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
        # Do not show torch's message, because it recommends loading the file without safety checks.
        needed = re.search(r"GLOBAL ([\w.]+)", str(fault))
        what = f" ({needed[1]})" if needed else ""
        raise EnvironmentFault(
            f"{file} cannot be converted: it contains objects other than tensors{what}, or is"
            " damaged",
            "get the weights as safetensors from their authors",
        ) from fault
    if not isinstance(loaded, dict) or not all(isinstance(v, Tensor) for v in loaded.values()):
        raise EnvironmentFault(
            f"{file} is not a mapping of names to tensors",
            "get the weights as safetensors from their authors",
        )
    return {str(name): tensor.contiguous() for name, tensor in loaded.items()}
