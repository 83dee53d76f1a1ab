"""Models: resolution of names, hub ids and folders to checkpoints on disk."""

from specbench_cli.models.resolve import Checkpoint, describe, model_names, resolve

__all__ = ["Checkpoint", "describe", "model_names", "resolve"]
