"""Tests of OpenVINO GenAI as an engine: equal ids, counters, and its own vanilla."""

import pytest

from specbench_cli.errors import EnvironmentFault, ExitCode
from specbench_cli.store.invariants import validate
from specbench_cli.summary.summary import summarise

pytestmark = pytest.mark.usefixtures("small_pair")
ROWS = ("engine:openvino", "engine:openvino-draft", "engine:openvino-lookup")


@pytest.mark.openvino
@pytest.mark.filterwarnings("default")
def test_openvino_methods_decode_vanillas_tokens_and_have_their_own_vanilla(specbench):
    outcome = specbench(*ROWS, limit=3, max_new_tokens=16)
    assert outcome.exit_code == ExitCode.OK
    for record in outcome.records:
        validate(record)
        kinds = {"reference"} if record.label == "vanilla" else {"identical", "near-tie"}
        assert record.error is None and record.verdict.kind in kinds
    for record in outcome.by_label("engine:openvino-draft"):
        counted = record.extra
        assert 0 <= counted["accepted"] <= min(counted["drafted"], record.n_tokens)
    rows = {each.label: each for each in summarise(outcome.records, outcome.manifest).rows}
    assert {rows[label].baseline for label in ROWS} == {"engine:openvino"}
    assert rows["engine:openvino"].speedup == 1
    assert rows["engine:openvino-draft"].mat >= 1


def test_missing_openvino_is_an_error_with_a_hint(specbench, monkeypatch):
    monkeypatch.setattr("methods._engines.find_spec", lambda _: None)
    with pytest.raises(EnvironmentFault, match="OpenVINO GenAI, which is not installed") as caught:
        specbench("engine:openvino")
    assert caught.value.hint == "pip install 'specbench-cli[openvino]'"
