"""Tests of `read_run`, which reduces the records of a run to what a comparison needs."""

from dataclasses import replace

import pytest

from specbench_cli.comparison.baselines.from_run import output_from_record, read_run
from specbench_cli.comparison.compared_output import Counters, PairKey, Times
from specbench_cli.comparison.scope import determine_scope
from specbench_cli.errors import UsageError
from specbench_cli.store.manifest import RESUME_FILE
from specbench_cli.store.run_dir import RunDir
from specbench_cli.store.schema import Ns, Trace


def test_counters_are_sums_over_steps(make_side):
    output = make_side().outputs[PairKey("mini/qa-1", 1, "sps", 1, 0)]
    assert output.counters == Counters(4, 3, 2, 4, 6, 3, 2, 3, 2)
    assert output.counters.mat == 1.5


def test_forward_time_is_the_weighted_mean_of_the_median_of_each_kind(make_side):
    side = make_side()
    vanilla, sps = (
        side.outputs[PairKey("mini/qa-1", 1, label, 1, 0)] for label in ("vanilla", "sps")
    )
    assert (vanilla.times.draft_forward, vanilla.times.verify_forward) == (None, 10)
    assert (sps.times.draft_forward, sps.times.verify_forward) == (2, 6)  # (3 + 2) / 2; of 5, 8
    assert (vanilla.times.draft_fastest, sps.times.draft_fastest) == (None, 2)


def test_cancelled_forward_is_not_counted_in_the_forward_time(make_run):
    def edit(record):
        trace = record.forwards
        longer = Trace(trace.kinds, [0, *trace.kind], [2, *trace.n_tokens], [0, *trace.t0_ns])
        longer.t1_ns, longer.unused = [9000, *trace.t1_ns], [0]
        return replace(record, forwards=longer)

    (first, *_) = read_run(make_run(labels=["vanilla"], edit=edit)).outputs.values()
    assert first.times.verify_forward == 10


def test_noisy_and_failed_outputs_have_no_times_but_noisy_ones_keep_the_rest(make_run):
    def edit(record):
        if record.label == "sps" and record.turn == 2:
            return replace(record, void=True, ns=Ns())
        if record.label == "sps" and record.prompt_id == "mini/rag-2":
            removed = dict.fromkeys(("output_ids", "n_tokens", "steps", "verdict", "forwards"))
            return replace(record, error="ValueError: no", finish="error", ns=Ns(), **removed)
        return record

    outputs = read_run(make_run(edit=edit)).outputs
    void, failed = (
        outputs[PairKey(*place, "sps", 1, 0)] for place in (("mini/qa-1", 2), ("mini/rag-2", 1))
    )
    assert void.times is None and void.counters.steps == 2 and void.ids is not None
    assert failed.times is failed.ids is failed.verdict is failed.counters.n_tokens is None
    assert failed.error == "ValueError: no"


def test_outputs_of_other_engines_have_only_the_total_time(make_run):
    def edit(record):
        return replace(record, peer=True, forwards=None, target_forwards=None, ns=Ns(total=7))

    (first, *_) = read_run(make_run(labels=["sps"], edit=edit)).outputs.values()
    assert first.times == Times(None, None, None, None, None, None, 7)


def test_digest_of_ids_depends_on_every_token(make_run):
    def edit(record):
        return replace(record, output_ids=[51, 1, record.turn, 2])

    one, other = (read_run(make_run(n, edit=e)) for n, e in (("a", lambda r: r), ("b", edit)))
    assert all(len(output.ids) == 16 for output in one.outputs.values())
    assert all(output.ids != other.outputs[key].ids for key, output in one.outputs.items())


def test_each_pass_is_a_process(make_side):
    side = make_side(passes=3)
    assert [{output.key.pass_ for output in process} for process in side.processes] == [
        {1},
        {2},
        {3},
    ]
    assert len(side.outputs) == sum(map(len, side.processes)) == 18


def test_facts_of_methods_come_from_the_manifest(make_side):
    def change(manifest):
        manifest["rows"][1] |= {"timing_free": False, "uses": ["draft", "acceptance"]}

    vanilla, sps = make_side(change=change).rows.values()
    assert (vanilla.timing_free, vanilla.models) == (True, ())
    assert (sps.timing_free, sps.models) == (False, ("draft", "acceptance"))


def test_models_come_from_the_traces_if_the_manifest_lacks_them(make_side):
    def change(manifest):
        for row in manifest["rows"]:
            del row["timing_free"], row["uses"]

    def remove_rows(manifest):
        del manifest["rows"]

    for name, edit in (("older", change), ("oldest", remove_rows)):
        rows = make_side(name, change=edit).rows
        assert [row.timing_free for row in rows.values()] == [None, None]
        assert [rows[label].models for label in ("vanilla", "sps")] == [(), ("draft",)]
        assert rows["sps"].params == {"length": 5}


def test_devices_of_workers_are_in_the_facts(make_side):
    def change(manifest):
        devices = {"target": "cpu:0", "draft": "cpu:1"}
        manifest["config"]["effective"]["devices"] = devices

    assert make_side(change=change).facts["devices"] == "target=cpu:0,draft=cpu:1"


def test_batch_prefill_chunk_and_load_are_in_the_facts(make_side):
    def change(manifest):
        manifest["config"]["effective"].update(batch=8, prefill_chunk=64, load="poisson:2")

    side = make_side(change=change)
    assert [side.facts[name] for name in ("batch", "prefill_chunk", "load")] == [
        "8",
        "64",
        "poisson:2",
    ]
    assert (
        "batch 1 -> 8"
        in determine_scope(replace(side, facts={**side.facts, "batch": "1"}), side).timing
    )


def test_prompts_are_stored_as_checksums(make_side):
    side = make_side()
    assert set(side.prompts) == {("mini/qa-1", 1), ("mini/qa-1", 2), ("mini/rag-2", 1)}
    assert all(len(digest) == 16 for digest in side.prompts.values())


def test_run_without_output_and_damaged_manifest_are_errors(make_run):
    empty = make_run("empty", edit=lambda record: None)
    with pytest.raises(UsageError, match="contains no output: it has no") as caught:
        read_run(empty)
    assert "--resume" not in caught.value.hint  # without RESUME_FILE, the run cannot be resumed
    (empty / RESUME_FILE).write_text("{}")
    with pytest.raises(UsageError, match="contains no output yet") as caught:
        read_run(empty)
    assert caught.value.hint == f"specbench run --resume {empty}"
    with pytest.raises(UsageError, match="is damaged"):
        read_run(make_run("odd", change=lambda manifest: manifest.update(models=[1])))


def test_output_from_a_record_has_its_row(make_run):
    (record, *_) = RunDir.open(make_run()).records()
    assert output_from_record(record).row == ("mini", "vanilla")
