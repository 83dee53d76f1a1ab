"""Two nodes of a real Ray cluster on this machine."""

from __future__ import annotations

import pytest

from specbench_cli.store.run_dir import RunDir

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]

COUNTED = (
    "output_ids origin n_tokens finish steps drafts extra target_forwards draft_forwards"
    " target_equivalents log_probs score error"
).split()
ROWS = {"limit": 6, "max_new_tokens": 8, "executor": "ray"}


@pytest.fixture
def cluster(monkeypatch):
    """A head and a second node, with a CPU each."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "num_gpus": 0, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=head)
    made.second = made.add_node(num_cpus=1, num_gpus=0)
    monkeypatch.setenv("RAY_ADDRESS", made.address)
    yield made
    made.shutdown()


def counted(records):
    return {
        record.key: [getattr(record, name) for name in COUNTED] + [record.verdict.kind]
        for record in records
    }


def test_a_run_survives_kill_9_of_a_node_and_its_records_are_those_of_a_local_run(
    specbench, cluster
):
    log = specbench.log()
    remember = log.prompt

    def prompt(progress):
        remember(progress)
        if progress.prompt == 1:
            cluster.remove_node(cluster.second, allow_graceful=False)  # kill -9

    log.prompt = prompt
    dealt = specbench("sps", log=log, **ROWS)
    local = specbench("sps", **ROWS | {"executor": "local"})
    assert dealt.exit_code == local.exit_code == 0
    assert any("was lost" in note for note in log.notes)
    assert sum("lost" in own for own in dealt.manifest["workers"].values()) == 1
    assert counted(dealt.records) == counted(local.records)
    of = {(record.prompt_id, record.worker) for record in dealt.records}
    assert len(of) == 6  # a question is one worker's
    assert dealt.manifest["models"] == local.manifest["models"]
    assert dealt.manifest["program"].keys() >= {"machine", "the questions"}


def test_an_interrupted_run_is_resumed_to_what_it_would_have_been(specbench, cluster):
    with pytest.raises(KeyboardInterrupt):
        specbench("sps", log=specbench.log(interrupt_after=5), **ROWS)
    path = specbench.path(1)
    before = (path / "records.jsonl").read_bytes()
    assert before
    resumed = specbench(resume=path)
    whole = specbench("sps", **ROWS | {"executor": "local"})
    assert (path / "records.jsonl").read_bytes().startswith(before)
    assert counted(resumed.records) == counted(whole.records)
    assert RunDir.open(path).manifest["status"] == "finished"
