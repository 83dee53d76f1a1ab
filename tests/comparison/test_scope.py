"""Tests of `determine_scope`: which outputs are compared, by which rule, and what is left out."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench_cli.comparison.compared_output import Counters, PairKey, RowKey
from specbench_cli.comparison.scope import determine_scope
from specbench_cli.errors import UsageError
from tests.comparison.sides import make_output, make_side_of

VANILLA, SPS, PLD = (RowKey("mini", label) for label in ("vanilla", "sps", "pld"))
NO_COUNTERS = Counters(*[None] * 9)


def with_facts(side, **facts):
    return replace(side, facts={**side.facts, **facts})


def with_changed_outputs(side, **changes):
    """Return the side with these changes to every output."""
    return replace(side, outputs={key: replace(c, **changes) for key, c in side.outputs.items()})


def rule(found, row=SPS):
    return found.rules[row][0]


def test_side_compared_with_itself_pairs_every_output_exactly(make_side):
    side = make_side(passes=2)
    found = determine_scope(side, side)
    assert sum(map(len, found.pairs.values())) == len(side.outputs)
    assert all(base is new for pairs in found.pairs.values() for base, new in pairs)
    assert {name for name, _ in found.rules.values()} == {"exact"}
    assert (found.missing, found.new, found.not_compared, found.causes) == ((), (), (), {})
    assert found.timing is None and found.rounding_difference is None


keys = st.builds(
    PairKey,
    st.sampled_from(["mini/1", "mini/2", "gsm8k/1"]),
    st.integers(1, 2),
    st.sampled_from(["vanilla", "sps", "pld"]),
    st.integers(1, 2),
    st.just(0),
)


def make_side_with(found):
    return make_side_of([make_output(key, cluster="c", ids="0") for key in sorted(found)])


@settings(max_examples=40, deadline=None)
@given(st.sets(keys, min_size=1), st.sets(keys, min_size=1))
def test_every_output_is_paired_or_reported(base_keys, new_keys):
    base, new = make_side_with(base_keys), make_side_with(new_keys)
    if not base_keys & new_keys:
        with pytest.raises(UsageError, match="nothing of"):
            determine_scope(base, new)
        return
    found = determine_scope(base, new)
    paired = {base_output.key for pairs in found.pairs.values() for base_output, _ in pairs}
    assert paired == base_keys & new_keys
    assert all(
        base_output.key == new_output.key
        for pairs in found.pairs.values()
        for base_output, new_output in pairs
    )
    assert bool(base_keys ^ new_keys) == bool(found.not_compared or found.missing or found.new)
    assert not (set(found.missing) | set(found.new)) & found.pairs.keys()


@pytest.mark.parametrize(
    ("what", "where"),
    [
        ("seed", "config"),
        ("verify", "config"),
        ("temperature", "config"),
        ("max_new_tokens", "config"),
        ("grammar", "config"),
        ("contrast", "config"),
        ("target", "models"),
    ],
)
def test_runs_with_different_questions_are_rejected(make_side, what, where):
    def change(manifest):
        if where == "models":
            manifest["models"][what]["sha256"] = "ab"
        else:
            words = {"verify": "block", "grammar": "json 0123456789ab", "contrast": {"beta": 1.0}}
            manifest["config"]["effective"][what] = words.get(what, 7)

    def edit(record):
        return replace(record, seed=7) if what == "seed" else record

    with pytest.raises(UsageError, match=f"nothing of a and b can be compared:\n  {what} .* -> "):
        determine_scope(make_side("a"), make_side("b", change=change, edit=edit))


def test_task_with_another_version_is_left_out_and_the_others_are_compared(make_side):
    places = [("mini/1", 1), ("gsm8k/1", 1)]

    def add_task(manifest):
        manifest["tasks"].append({"name": "gsm8k", "version": "1", "sha256": "abc"})

    def change_version(manifest):
        add_task(manifest)
        manifest["tasks"][0] |= {"version": "3", "sha256": "def"}

    found = determine_scope(
        make_side("a", places=places, change=add_task),
        make_side("b", places=places, change=change_version),
    )
    assert {row.task for row in found.pairs} == {"gsm8k"}
    assert found.not_compared == ("task mini version 2 42ac4d64 -> version 3 def",)


def test_task_that_only_one_side_has_is_left_out(make_side):
    both = [("mini/1", 1), ("gsm8k/1", 1)]
    base = make_side("a", places=both, change=lambda m: m["tasks"].append({"name": "gsm8k"}))
    new = make_side("b", places=[("mini/1", 1)])
    found = determine_scope(base, new)
    assert found.not_compared == ("task gsm8k: only BASE has it",) and not found.missing
    assert determine_scope(new, base).not_compared == ("task gsm8k: only NEW has it",)


def test_only_common_prompts_are_compared(make_side):
    base = make_side("a")
    new = make_side("b", places=[("mini/qa-1", 1)])
    found = determine_scope(base, new)
    assert [len(pairs) for pairs in found.pairs.values()] == [1, 1]
    assert found.not_compared == ("task mini: 2 prompts only BASE has (first: mini/qa-1 turn 2)",)


def test_prompts_with_changed_text_are_not_paired(make_side):
    base, new = make_side("a"), make_side("b")
    new = replace(new, prompts={**new.prompts, ("mini/qa-1", 2): "other"})
    found = determine_scope(base, new)
    assert [len(pairs) for pairs in found.pairs.values()] == [2, 2]
    (message,) = found.not_compared
    assert message == (
        "task mini: 1 prompt whose text or context changed (first: mini/qa-1 turn 2)"
    )
    without_prompts = replace(new, prompts={})
    assert determine_scope(base, without_prompts).not_compared == ()


def test_methods_that_only_one_side_has_are_missing_or_new(make_side):
    found = determine_scope(make_side("a", ["vanilla", "sps"]), make_side("b", ["vanilla", "pld"]))
    assert (found.missing, found.new) == ((SPS,), (PLD,))
    assert found.not_compared == ()


def test_outputs_missing_from_an_unfinished_run_are_reported(make_side):
    def edit(record):
        return None if record.label == "sps" and record.turn == 2 else record

    base = make_side("a")
    new = make_side("b", edit=edit, status="interrupted")
    found = determine_scope(base, new)
    assert len(found.pairs[SPS]) == 2
    assert found.not_compared == (
        "NEW (b) is interrupted: its missing outputs are not compared",
        "mini sps: 1 output only BASE has (first: mini/qa-1 turn 2)",
    )


def test_passes_that_only_one_side_has_are_reported_once(make_side):
    found = determine_scope(make_side("a"), make_side("b", passes=3))
    assert found.not_compared == ("outputs of pass 2, 3: only NEW has them",)
    assert len(found.pairs[SPS]) == 3 and found.timing is None


@pytest.mark.parametrize("fact", ["torch", "transformers", "threads", "dtype", "device", "machine"])
def test_verdicts_are_compared_if_rounding_may_differ(make_side, fact):
    side = make_side()
    other = with_facts(side, **{fact: "another"})
    found = determine_scope(side, other)
    assert {rule(found, row) for row in found.pairs} == {"verdict"}
    assert (
        found.rounding_difference in "; ".join(found.not_compared)
        and fact in found.rounding_difference
    )


def test_run_with_an_unknown_machine_counts_as_another_machine(make_side):
    found = determine_scope(make_side(), replace(make_side("b"), machine=None))
    assert rule(found) == "verdict"
    assert found.timing == found.rounding_difference == "the machine of NEW is unknown"


@pytest.mark.parametrize("sampling", ["rejection", "block"])
def test_sampled_tokens_are_compared_only_on_the_same_machine(make_side, sampling):
    side = with_changed_outputs(make_side(), sampling=sampling)
    assert rule(determine_scope(side, side)) == "exact"
    name, why = determine_scope(side, with_facts(side, torch="another")).rules[SPS]
    assert name == "nothing" and sampling in why


def test_coupled_outputs_are_compared_by_verdict_on_another_machine(make_side):
    side = with_changed_outputs(make_side(), sampling="coupled")
    assert rule(determine_scope(side, with_facts(side, torch="another"))) == "verdict"


def test_replayed_tokens_are_compared_on_another_machine_only_if_greedy(make_side):
    side = with_changed_outputs(make_side(), sampling="replay")
    assert rule(determine_scope(side, with_facts(side, torch="another"))) == "verdict"
    drawn = with_facts(side, temperature="0.8")
    assert rule(determine_scope(drawn, with_facts(drawn, torch="another"))) == "nothing"


def test_lossy_output_is_not_compared_on_another_machine(make_side):
    side = with_changed_outputs(make_side(), guarantee="quality_only")
    assert rule(determine_scope(side, side)) == "exact"
    assert rule(determine_scope(side, with_facts(side, torch="another"))) == "nothing"


@pytest.mark.parametrize("timing_free", [False, None])
def test_methods_whose_steps_may_depend_on_timing_are_compared_by_ids(make_side, timing_free):
    def change(manifest):
        manifest["rows"][1]["timing_free"] = timing_free

    side, other = make_side("a"), make_side("b", change=change)
    found = determine_scope(side, other)
    assert (rule(found, VANILLA), rule(found)) == ("exact", "ids only")
    assert "timing" in found.rules[SPS][1]
    drawn, others = (with_changed_outputs(each, sampling="rejection") for each in (side, other))
    assert rule(determine_scope(drawn, others)) == "nothing"


def test_another_draft_model_affects_only_methods_that_use_it(make_side):
    def change(manifest):
        manifest["models"]["draft"] = {"label": "embedded-xv", "sha256": "ee"}

    labels = ["vanilla", "sps", "pld"]
    found = determine_scope(make_side("a", labels), make_side("b", labels, change=change))
    assert [rule(found, row) for row in (VANILLA, SPS, PLD)] == ["exact", "ids only", "exact"]
    assert found.not_compared == ("counters of sps: draft embedded-1m 1ff8701f -> embedded-xv ee",)
    assert found.causes == {"sps": "models differ: draft embedded-1m 1ff8701f -> embedded-xv ee"}


def test_another_head_affects_only_methods_that_use_it(make_side):
    def change(manifest):
        manifest["heads"] = {"eagle other": {"sha256": "ff"}}

    labels = ["vanilla", "sps", "eagle"]
    found = determine_scope(make_side("a", labels), make_side("b", labels, change=change))
    eagle = RowKey("mini", "eagle")
    assert [rule(found, row) for row in (VANILLA, SPS, eagle)] == ["exact", "exact", "ids only"]
    assert found.causes == {
        "eagle": "models differ: head eagle embedded-eagle aa00bb11 -> other ff"
    }


def test_method_with_unknown_models_is_assumed_to_use_the_draft_model(make_side):
    def change(manifest):
        manifest["models"]["draft"]["sha256"] = "ee"

    def without_prompts(side):
        rows = {label: replace(row, models=None) for label, row in side.rows.items()}
        return replace(side, rows=rows)

    found = determine_scope(
        without_prompts(make_side("a")), without_prompts(make_side("b", change=change))
    )
    assert rule(found) == "ids only"


def test_changed_parameters_are_reported_as_the_cause(make_side):
    def change(manifest):
        manifest["rows"][1]["params"] = {"length": 6, "threshold": 0.5}

    found = determine_scope(make_side("a"), make_side("b", change=change))
    assert rule(found) == "exact" and found.not_compared == ()
    assert found.causes == {"sps": "parameters differ: length 5 -> 6, threshold absent -> 0.5"}


def test_another_method_or_guarantee_with_the_same_label_is_reported(make_side):
    side = make_side()
    found = determine_scope(side, with_changed_outputs(side, method="pld", guarantee="bounded"))
    assert found.causes["sps"] == (
        "method differs: sps -> pld; guarantee differs: exact_tokens -> bounded"
    )


def test_versions_of_specbench_may_differ(make_side):
    side = make_side()
    found = determine_scope(side, with_facts(side, specbench="0.2.0", commit="fedcba98"))
    assert rule(found) == "exact" and found.timing is None and found.not_compared == ()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda side: replace(side, noisy=True), "NEW (run) is labelled noisy"),
        (
            lambda side: replace(with_facts(side, machine="ddd"), machine="ddd"),
            "machine some CPU, 2 cores, aaaabbbbcccc -> ddd",
        ),
        (lambda side: with_facts(side, threads="1"), "threads 2 -> 1"),
        (lambda side: with_facts(side, devices="draft=cpu:1"), None),
    ],
)
def test_times_are_compared_on_one_quiet_machine_with_equal_settings(make_side, change, why):
    side = make_side()
    assert determine_scope(side, change(side)).timing == why
