"""Models: from a name, hub id or folder to a checkpoint on disk."""

from specbench_cli.models.resolve import Checkpoint, describe, model_names, resolve

__all__ = ["Checkpoint", "describe", "model_names", "resolve"]
