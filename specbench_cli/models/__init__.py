"""Models: functions that find the checkpoint on disk for a name, hub id or folder."""

from specbench_cli.models.resolve import Checkpoint, describe, model_names, resolve

__all__ = ["Checkpoint", "describe", "model_names", "resolve"]
