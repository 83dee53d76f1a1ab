"""Tests of every figure of a summary against hand-made records."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from specbench_cli.errors import UsageError
from specbench_cli.store.schema import Ns, Steps, Verdict
from specbench_cli.summary import metrics, text
from specbench_cli.summary.summary import Summary, summarise


def _row(summary: Summary, label: str):
    return next(row for row in summary.rows if row.label == label)


def _timed(record, total: int, prefill: int = 0, n: int | None = None):
    decode = total - prefill
    return replace(
        record,
        ns=Ns(total, prefill, decode, 0, decode, 0),
        n_tokens=record.n_tokens if n is None else n,
    )


@pytest.fixture
def pair(synthetic):
    """Records of vanilla and sps on four prompts, which a test may change."""
    return synthetic.records([synthetic.vanilla, synthetic.sps], prompts=4, tokens=11)


def _with_times(records, times: dict[str, list[int]], **options):
    left = {label: iter(values) for label, values in times.items()}
    return [_timed(record, next(left[record.label]), **options) for record in records]


def test_speedup_is_the_ratio_of_summed_times(pair, manifest):
    times = {"vanilla": [10, 20, 30, 60], "sps": [10, 10, 10, 30]}
    assert _row(summarise(_with_times(pair, times), manifest), "sps").speedup == pytest.approx(2.0)


def test_outputs_of_different_workers_are_not_paired(pair, manifest):
    times = {"vanilla": [10, 20, 30, 60], "sps": [10, 10, 10, 30]}
    timed = _with_times(pair, times)
    for record in timed:
        record.worker = "1"
    timed[-1].worker = "2"  # another worker measured sps on the last prompt
    assert timed[-1].label == "sps"
    assert _row(summarise(timed, manifest), "sps").speedup == pytest.approx(60 / 30)


def test_decode_speedup_excludes_prefill(pair, manifest):
    times = {"vanilla": [44, 44, 44, 44], "sps": [24, 24, 24, 24]}
    row = _row(summarise(_with_times(pair, times, prefill=4), manifest), "sps")
    assert row.speedup == pytest.approx(44 / 24)
    assert row.decode_speedup == pytest.approx(2.0)


def test_decode_speedup_has_interval_and_groups_of_times_without_prefill(synthetic, manifest):
    records = synthetic.records()
    summary = summarise(records, manifest)
    bare = [_timed(r, r.ns.decode, n=r.n_tokens - 1) for r in records]
    for row in summarise(bare, manifest).rows:
        own = _row(summary, row.label)
        assert own.decode_letters == row.letters
        for end in ("", "_low", "_high"):
            decode, wall = getattr(own, f"decode_speedup{end}"), getattr(row, f"speedup{end}")
            assert decode == pytest.approx(wall)
            if wall not in (None, 1.0):
                assert decode != getattr(own, f"speedup{end}")


def test_outputs_of_different_lengths_are_compared_by_time_per_token(pair, manifest):
    records = _with_times(pair, {"vanilla": [100] * 4, "sps": [100] * 4})
    records = [replace(r, n_tokens=22) if r.label == "sps" else r for r in records]
    assert _row(summarise(records, manifest), "sps").speedup == pytest.approx(2.0)


def test_outputs_are_paired_by_prompt_turn_and_pass_in_any_order(synthetic, manifest):
    records = synthetic.records(prompts=12, passes=2)
    shuffled = random.Random(0).sample(records, len(records))
    one, other = summarise(records, manifest), summarise(shuffled, manifest)
    for row in one.rows:
        other_row = _row(other, row.label)
        assert other_row.letters == row.letters
        for figure in ("speedup", "speedup_low", "speedup_high", "mat_macro"):
            assert getattr(other_row, figure) == pytest.approx(getattr(row, figure))
    assert one.passes == 2


def test_methods_are_sorted_and_have_group_letters(synthetic, manifest):
    summary = summarise(synthetic.records(), manifest)
    assert [row.label for row in summary.rows][2:] == [
        "pld",
        "vanilla",
        "hf:assisted",
        "hf:vanilla",
    ]
    assert [row.letters for row in summary.rows] == ["A", "A", "B", "C", "D", "E"]
    assert all(row.speedup_low < row.speedup < row.speedup_high for row in summary.rows[:3])


def test_vanilla_is_1_without_interval(synthetic, manifest):
    row = _row(summarise(synthetic.records(prompts=6), manifest), "vanilla")
    assert (row.speedup, row.speedup_low, row.speedup_note, row.decode_speedup) == (
        1.0,
        None,
        None,
        1.0,
    )


def test_noisy_outputs_have_no_times_but_keep_their_counters(pair, manifest):
    records = _with_times(pair * 5, {"vanilla": [20] * 20, "sps": [10] * 20})
    records = [replace(r, prompt_id=f"mini/{i // 2}") for i, r in enumerate(records)]
    whole = _row(summarise(records, manifest), "sps")
    records[1] = replace(records[1], void=True, ns=Ns())
    row = _row(summarise(records, manifest), "sps")
    assert row.speedup == pytest.approx(2.0)
    assert (row.n_void, row.n_cells) == (1, 20)
    assert row.mat == whole.mat
    assert row.identical == whole.identical


def test_method_without_a_tenth_of_its_outputs_has_no_speedup(synthetic, manifest):
    records = synthetic.records([synthetic.vanilla, synthetic.sps, synthetic.pld], prompts=10)
    lossy = [
        replace(r, void=True) if r.label == "sps" and r.prompt_id in ("mini/1", "mini/2") else r
        for r in records
    ]
    summary = summarise(lossy, manifest)
    assert _row(summary, "sps").speedup is None
    assert _row(summary, "sps").speedup_note == "sps lost 2 of 10 outputs (2 noisy)"
    assert _row(summary, "sps").tokens_per_s is not None
    assert _row(summary, "pld").speedup is not None


def test_no_method_has_a_speedup_without_a_tenth_of_vanillas_outputs(synthetic, manifest):
    records = [
        replace(r, void=r.label == "vanilla" and r.prompt_id in ("mini/0", "mini/5"))
        for r in synthetic.records([synthetic.vanilla, synthetic.sps], prompts=10)
    ]
    summary = summarise(records, manifest)
    assert [row.speedup for row in summary.rows] == [None, None]
    assert {row.speedup_note for row in summary.rows} == {"vanilla lost 2 of 10 outputs (2 noisy)"}


def test_run_without_vanilla_has_no_speedups(synthetic, manifest):
    summary = summarise(synthetic.records([synthetic.sps], prompts=4), manifest)
    assert summary.rows[0].speedup_note == "no output is paired with one of vanilla"


def test_one_mismatch_breaks_a_method_in_every_table(synthetic, manifest):
    records = synthetic.records(prompts=12)
    mismatched = next(r for r in records if r.label == "sps" and r.family == "qa")
    records[records.index(mismatched)] = replace(mismatched, verdict=Verdict("mismatch", 3, 1.5, 7))
    summary = summarise(records, manifest)
    row = _row(summary, "sps")
    assert row.broken
    assert (row.speedup, row.speedup_low, row.letters) == (None, None, "")
    assert (row.decode_speedup, row.decode_speedup_low, row.decode_letters) == (None, None, "")
    assert (row.mismatch, row.identical) == (1, 11)
    assert all(r.broken for rows in summary.families.values() for r in rows if r.label == "sps")
    assert summary.rows[-1].label == "sps"


def test_lossy_methods_are_ranked_separately(synthetic, manifest):
    lossy = synthetic.Fake("relaxed", length=5, alpha=0.95, guarantee="quality_only")
    summary = summarise(synthetic.records([synthetic.vanilla, synthetic.sps, lossy]), manifest)
    assert [row.label for row in summary.lossless] == ["sps", "vanilla"]
    assert [(row.label, row.letters) for row in summary.lossy] == [("relaxed", "A")]


def test_mat_counts_the_last_step_and_mat_full_does_not(pair, manifest):
    steps = {
        "mini/0": Steps([5, 5, 1], [5, 5, 1], [5, 3, 1], [5, 2, 0], [6, 3, 1]),
        "mini/1": Steps([5, 5], [5, 5], [5, 5], [5, 4], [6, 4]),
    }
    records = [
        replace(r, steps=steps[r.prompt_id])
        for r in pair
        if r.label == "sps" and r.prompt_id in steps
    ]
    row = _row(summarise(records, manifest), "sps")
    assert row.mat == pytest.approx(20 / 5)
    assert row.mat_macro == pytest.approx((10 / 3 + 5) / 2)
    assert row.mat_full == pytest.approx((9 + 6) / 3)


def test_acceptance_is_counted_by_level(pair, manifest):
    steps = Steps([3, 3, 1], [6, 3, 1], [3, 2, 1], [3, 1, 0], [4, 2, 1])
    record = replace(next(r for r in pair if r.label == "sps"), steps=steps)
    row = _row(summarise([record], manifest), "sps")
    assert row.acceptance_rate == pytest.approx(4 / 7)
    assert row.alpha == pytest.approx(4 / 6)
    assert row.acceptance_by_position == pytest.approx((2 / 3, 1 / 2, 1 / 2))
    assert row.node_yield == pytest.approx(4 / 10)


def test_method_that_drafts_nothing_has_no_acceptance(synthetic, manifest):
    row = _row(summarise(synthetic.records([synthetic.vanilla], prompts=2), manifest), "vanilla")
    assert (row.mat, row.acceptance_rate, row.alpha) == (1.0, None, None)
    assert row.acceptance_by_position == ()


def test_engine_that_does_not_report_steps_has_no_mat_but_a_note(synthetic, manifest):
    engine = synthetic.Fake("engine", cost=0.9, peer=True, sees_steps=False)
    records = synthetic.records([synthetic.vanilla, engine], prompts=6)
    without_steps = [
        replace(r, ns=Ns(total=r.ns.total), target_forwards=None, forwards=None) if r.peer else r
        for r in records
    ]
    row = _row(summarise(without_steps, manifest), "engine")
    assert (row.mat, row.mat_note) == (None, "steps not reported")
    assert (row.decode_speedup, row.share_target, row.ttft_p50_ms, row.target_forwards) == (
        None,
        None,
        None,
        None,
    )
    assert row.speedup is not None


def test_time_shares_rates_and_percentiles(pair, manifest):
    ns = Ns(total=2_000_000, prefill=1_000_000, decode=1_000_000, draft=200_000, verify=700_000,
            host=100_000)  # fmt: skip
    row = _row(summarise([replace(r, ns=ns) for r in pair], manifest), "sps")
    assert (row.share_target, row.share_draft, row.share_host) == pytest.approx((0.7, 0.2, 0.1))
    assert row.tokens_per_s == pytest.approx(11 / 2e-3)
    assert row.ttft_p50_ms == pytest.approx(1.0)
    assert row.ms_per_token_p50 == row.ms_per_token_p95 == pytest.approx(0.1)


def test_learning_is_in_the_speedup_and_not_in_the_decode_speedup(pair, manifest):
    def add_learning(r):
        learn = 0 if r.label == "vanilla" else r.ns.total
        return replace(r, ns=replace(r.ns, learn=learn, total=r.ns.total + learn))

    before, with_learning = (
        _row(summarise(found, manifest), "sps") for found in (pair, [add_learning(r) for r in pair])
    )
    assert with_learning.speedup == pytest.approx(before.speedup / 2)
    assert with_learning.tokens_per_s == pytest.approx(before.tokens_per_s / 2)
    assert with_learning.decode_speedup == before.decode_speedup
    shares = [(r.share_target, r.share_draft, r.share_host) for r in (before, with_learning)]
    assert shares[0] == shares[1]
    assert (before.learn_share, with_learning.learn_share) == (None, pytest.approx(0.5))
    lines = text.learning(summarise([add_learning(r) for r in pair], manifest))
    assert "learning: sps 50.0% of its time, between requests" in lines[-1]


def test_output_counts_by_its_worst_pass_and_turn_by_turn(pair, manifest):
    sps = [r for r in pair if r.label == "sps"]
    second = [replace(r, pass_=2, verdict=Verdict("near-tie", 4, 1e-6, 3)) for r in sps[:1]]
    turns = [replace(r, turn=2) for r in sps]
    row = _row(summarise([*sps, *second, *turns], manifest), "sps")
    assert (row.identical, row.near_tie) == (7, 1)
    assert (row.n_prompts, row.n_outputs, row.n_cells) == (4, 8, 9)
    assert (row.questions_checked, row.questions_mismatched) == (4, 0)


def test_failed_output_is_counted_but_not_used(pair, manifest):
    failed = replace(
        pair[1], error="boom", finish="error", verdict=None, n_tokens=None, steps=None, ns=Ns()
    )
    row = _row(summarise([pair[0], failed, *pair[2:]], manifest), "sps")
    assert (row.failed, row.identical) == (1, 3)
    assert row.speedup_note == "sps lost 1 of 4 outputs (1 failed)"


def test_noise_floor_comes_from_the_interval_of_a_second_vanilla(synthetic, manifest):
    again = synthetic.Fake("vanilla#2", method="vanilla", cost=1.01)
    summary = summarise(synthetic.records([synthetic.vanilla, again]), manifest)
    row = _row(summary, "vanilla#2")
    assert summary.noise_floor == pytest.approx(1 - row.speedup_low)


def test_noise_floor_may_come_from_the_manifest_or_be_unknown(synthetic, manifest):
    records = synthetic.records([synthetic.vanilla], prompts=2)
    assert summarise(records, manifest).noise_floor is None
    assert summarise(records, manifest | {"aa_noise": 0.02}).noise_floor == 0.02


def test_summary_has_the_speed_of_vanilla_relative_to_hf_vanilla(synthetic, manifest):
    summary = summarise(synthetic.records(), manifest)
    assert summary.vanilla_ratio == pytest.approx(1 / _row(summary, "hf:vanilla").speedup)
    alone = summarise(synthetic.records([synthetic.vanilla], prompts=2), manifest)
    assert alone.vanilla_ratio is None


def test_proof_is_of_the_method_with_the_weakest_bound(synthetic, manifest):
    records = synthetic.records(prompts=48)
    short = [r for r in records if r.label != "pld" or int(r.prompt_id[5:]) < 40]
    row, bound = summarise(short, manifest).proof()
    assert row.label == "pld"
    assert bound == pytest.approx(1 - 0.05 ** (1 / 40))


def test_unchecked_outputs_prove_nothing(synthetic, manifest):
    sampled = synthetic.Fake("sps", length=5, alpha=0.7, verdict="unchecked", guarantee="exact_law")
    records = synthetic.records([synthetic.vanilla, sampled, synthetic.hf_vanilla], prompts=4)
    assert summarise(records, manifest).proof() is None


def test_families_have_their_own_rows_in_the_overall_order(synthetic, manifest):
    summary = summarise(synthetic.records(), manifest)
    order = [row.label for row in summary.rows]
    assert list(summary.families) == sorted(summary.families)
    for rows in summary.families.values():
        assert [row.label for row in rows] == order
        assert rows[0].n_prompts == 8


def test_run_without_records_has_no_rows(manifest):
    summary = summarise([], manifest)
    assert summary.rows == ()
    assert summary.proof() is None


def test_speedup_per_device_is_divided_by_the_devices_of_the_workers(pair, manifest):
    times = {"vanilla": [10, 20, 30, 60], "sps": [10, 10, 10, 30]}
    records = _with_times(pair, times)
    manifest["rows"] = [{"label": "vanilla", "workers": 1}, {"label": "sps", "workers": 2}]
    effective = manifest["config"]["effective"]
    for placed, devices in (
        ({"target": "cuda:0", "draft": "cuda:1"}, 2),
        ({"target": "cpu:0-3", "draft": "cpu:4-7"}, 1),
        (None, 1),
    ):
        effective["devices"] = placed
        summary = summarise(records, manifest)
        row = _row(summary, "sps")
        assert (row.devices, row.per_device) == (devices, pytest.approx(row.speedup / devices))
        assert _row(summary, "vanilla").devices == 1
        assert metrics.PER_DEVICE.when(summary.rows) == (devices == 2)


def test_tokens_per_joule_need_the_energy_of_every_output(pair, manifest):
    whole = [replace(record, energy_j=0.5) for record in pair]
    row = _row(summarise(whole, manifest), "sps")
    own = [record for record in whole if record.label == "sps"]
    assert row.tokens_per_joule == pytest.approx(sum(r.n_tokens for r in own) / (0.5 * len(own)))
    part = [replace(record, energy_j=None) if not at else record for at, record in enumerate(own)]
    summary = summarise([*part, *(r for r in whole if r.label != "sps")], manifest)
    assert _row(summary, "sps").tokens_per_joule is None


def test_more_methods_than_can_be_compared_are_rejected(pair, manifest):
    record = next(iter(pair))
    many = [replace(record, label=f"row {n}") for n in range(129)]
    with pytest.raises(UsageError, match="there are 129 methods, and a table compares 128 at most"):
        summarise(many, manifest)
