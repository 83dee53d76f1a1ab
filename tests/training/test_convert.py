"""Pickles that contain other objects than tensors are refused with specbench's own message."""

import os
import pickle

import pytest

from specbench_cli.errors import EnvironmentFault
from specbench_cli.training.convert import convert


class Runs:
    """Object whose pickle runs a command when loaded."""

    def __reduce__(self):
        return os.system, ("true",)


@pytest.mark.parametrize("content", [pickle.dumps(Runs(), protocol=2), b"", b"no pickle"])
def test_no_error_suggests_running_the_code_in_a_pickle(tmp_path, content):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(EnvironmentFault, match="contains objects other than tensors") as refused:
        convert(tmp_path, tmp_path / "out")
    assert "weights_only" not in refused.value.message
    assert refused.value.hint == "get the weights as safetensors from their authors"
