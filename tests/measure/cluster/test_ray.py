"""Tests of a run on two nodes of a real Ray cluster on this machine."""

from __future__ import annotations

import pytest

from specbench_cli.store.run_dir import RunDir

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]

COMPARED = (
    "output_ids origin n_tokens finish steps drafts extra target_forwards draft_forwards"
    " target_equivalents log_probs score error"
).split()
ROWS = {"limit": 6, "max_new_tokens": 8, "executor": "ray"}


@pytest.fixture
def cluster(monkeypatch):
    """A Ray cluster of two nodes with one CPU each."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "num_gpus": 0, "include_dashboard": False}
    ray_cluster = Cluster(initialize_head=True, head_node_args=head)
    ray_cluster.second = ray_cluster.add_node(num_cpus=1, num_gpus=0)
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster.address)
    yield ray_cluster
    ray_cluster.shutdown()


def compared_fields(records):
    return {
        record.key: [getattr(record, name) for name in COMPARED] + [record.verdict.kind]
        for record in records
    }


def test_a_run_with_a_killed_node_has_the_records_of_a_local_run(specbench, cluster):
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
    assert compared_fields(dealt.records) == compared_fields(local.records)
    of = {(record.prompt_id, record.worker) for record in dealt.records}
    assert len(of) == 6  # one worker measures all outputs of a question
    assert dealt.manifest["models"] == local.manifest["models"]
    assert dealt.manifest["program"].keys() >= {"machine", "the questions"}


def test_a_resumed_cluster_run_equals_an_uninterrupted_one(specbench, cluster):
    with pytest.raises(KeyboardInterrupt):
        specbench("sps", log=specbench.log(interrupt_after=5), **ROWS)
    path = specbench.path(1)
    before = (path / "records.jsonl").read_bytes()
    assert before
    resumed = specbench(resume=path)
    whole = specbench("sps", **ROWS | {"executor": "local"})
    assert (path / "records.jsonl").read_bytes().startswith(before)
    assert compared_fields(resumed.records) == compared_fields(whole.records)
    assert RunDir.open(path).manifest["status"] == "finished"
