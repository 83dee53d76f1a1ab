"""Tests of baseline files: saving, loading, and which runs may be saved together."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench_cli.comparison.baselines import baseline
from specbench_cli.comparison.baselines.baseline import dump, parse
from specbench_cli.comparison.baselines.from_run import read_run
from specbench_cli.comparison.compared_output import ComparedOutput, Counters, PairKey, Times
from specbench_cli.comparison.scope import determine_scope
from specbench_cli.comparison.side import RowFacts, Side
from specbench_cli.errors import UsageError
from specbench_cli.store.schema import FAMILIES, FINISHES, VERDICTS, Ns, Steps

LABELS = ("vanilla", "sps", "hf:assisted")
PLACES = (("mini/1", 1), ("mini/1", 2), ("gsm8k/7", 1))

count = st.none() | st.integers(0, 10**12)
text = st.text(max_size=8)
name = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=8)


def drop_contradicting_steps(counters):
    """Return the counters, without their steps if these contradict the other counters."""
    return counters if counters.contradiction is None else replace(counters, steps=None)


@st.composite
def sides(draw):
    """Draw a side of one to three runs, in the order in which they are read."""
    keys = draw(
        st.sets(
            st.tuples(st.sampled_from(PLACES), st.sampled_from(LABELS), st.integers(0, 1)),
            min_size=1,
        )
    )
    row_values = {
        label: {
            "method": draw(name),
            "sampling": draw(name),
            "guarantee": draw(name),
            "peer": draw(st.booleans()),
        }
        for label in LABELS
    }
    place_values = {
        place: {
            "task": draw(name),
            "family": draw(st.sampled_from(FAMILIES)),
            "cluster": draw(text),
        }
        for place in PLACES
    }

    def run():
        return [
            ComparedOutput(
                key=PairKey(*place, label, pass_, 3),
                **place_values[place],
                **row_values[label],
                ids=draw(st.none() | text),
                finish=draw(st.sampled_from(FINISHES)),
                verdict=draw(st.none() | st.sampled_from(VERDICTS)),
                error=draw(st.none() | text),
                counters=drop_contradicting_steps(Counters(*(draw(count) for _ in range(9)))),
                times=draw(st.none() | st.builds(Times, *[count] * 8)),
            )
            for place, label, pass_ in sorted(keys)
        ]

    def repeat_outputs(outputs):
        """Return the outputs of a repeat: each has other times, or differs in everything."""
        return [draw(st.sampled_from([replace(a, times=b.times), b])) for a, b in outputs]

    first = run()
    runs = [
        first,
        *(repeat_outputs(zip(first, run(), strict=True)) for _ in range(draw(st.integers(0, 2)))),
    ]
    processes = [
        tuple(sorted((c for c in own if c.key.pass_ == pass_), key=lambda output: output.key))
        for own in runs
        for pass_ in sorted({output.key.pass_ for output in own})
    ]
    rows = {
        label: RowFacts(
            label=label,
            method=row_values[label]["method"],
            params=draw(st.dictionaries(text, st.none() | st.integers() | st.floats(0, 1))),
            timing_free=draw(st.none() | st.booleans()),
            models=draw(st.none() | st.lists(name).map(tuple)),
        )
        for label in LABELS
        if any(output.key.label == label for output in first)
    }
    return Side(
        name=draw(name),
        created_utc=draw(text),
        facts=draw(st.dictionaries(text, text)),
        machine=draw(name),
        noisy=draw(st.booleans()),
        rows=rows,
        outputs={output.key: output for output in first},
        processes=tuple(processes),
        prompts={
            (output.key.prompt_id, output.key.turn): "0" for output in first if output.key.turn == 1
        },
    )


@settings(max_examples=25, deadline=None)
@given(sides())
def test_a_written_side_is_read_back_unchanged(side):
    assert parse(dump(side)) == side


def test_a_loaded_baseline_equals_its_run(make_run, tmp_path):
    run = make_run(passes=2)
    side, saved = read_run(run), baseline.load(baseline.save("ci", [run], root=tmp_path))
    assert replace(saved, name=side.name, start_times=side.start_times) == side
    assert determine_scope(saved, side) == determine_scope(side, side)


def test_file_is_named_after_the_baseline_and_the_machine(make_run, tmp_path):
    path = baseline.save("ci", [make_run()], root=tmp_path / "b")
    assert path == tmp_path / "b" / "ci" / "aaaabbbbcccc.json"
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert baseline.find_file("ci", tmp_path / "b") == path
    assert baseline.list_names(tmp_path / "b") == ["ci"]


def test_every_output_has_a_line_of_its_own(make_run, tmp_path):
    def edit(record):
        return replace(record, draft_forwards=record.draft_forwards + (record.turn == 2))

    one, other = (
        baseline.save(n, [make_run(n, ["sps"], edit=e)], root=tmp_path).read_text().splitlines()
        for n, e in (("a", lambda record: record), ("b", edit))
    )
    changed = [old for old, now in zip(one, other, strict=True) if old != now]
    assert len(changed) == 2 and changed[1].startswith('["mini/qa-1",2,"sps",')  # and its name


def test_several_runs_are_several_processes(make_run, tmp_path):
    def slower(record):
        return replace(
            record, ns=Ns(total=190, prefill=20, decode=170, draft=10, verify=65, host=95)
        )

    runs = [make_run("a", passes=2), make_run("b", passes=2, edit=slower)]
    saved = baseline.load(baseline.save("ci", runs, root=tmp_path))
    times = [{output.times.decode for output in process} for process in saved.processes]
    assert times == [{80}, {80}, {170}, {170}]
    assert saved.outputs == read_run(runs[0]).outputs


def test_times_of_noisy_runs_are_left_out(make_run, tmp_path):
    def noisy(manifest):
        manifest.update(noisy=True)

    runs = [make_run("a", change=noisy), make_run("b"), make_run("c", change=noisy)]
    warnings = []
    one = baseline.load(baseline.save("ci", runs, root=tmp_path, warn=warnings.append))
    assert warnings == [f"times of {name} are left out: it is labelled noisy" for name in "ac"]
    warnings.clear()
    saved = baseline.save("ci", [runs[0], runs[2]], root=tmp_path, warn=warnings.append)
    none = baseline.load(saved)
    assert warnings == [
        "times are not stored, because the runs are labelled noisy; ids and counters are"
    ]
    assert (one.noisy, len(one.processes)) == (False, 1)
    assert (none.noisy, len(none.processes)) == (True, 2)
    assert all(output.times for output in one.outputs.values())
    assert not any(output.times for process in none.processes for output in process)
    assert [output.counters for output in none.outputs.values()] == [
        output.counters for output in one.outputs.values()
    ]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"edit": lambda r: replace(r, draft_forwards=3) if r.label == "sps" else r},
            "sps: 3 of 3 outputs; the first, mini/qa-1 turn 1 pass 1: draft_forwards 2 -> 3",
        ),
        (
            {"edit": lambda r: replace(r, output_ids=[1, 2, 3, 4])},
            "vanilla: 3 of 3 outputs; the first, mini/qa-1 turn 1 pass 1: ids [0-9a-f]{16} -> ",
        ),
        ({"labels": ["vanilla"]}, "sps: b does not have it"),
        ({"passes": 2}, "outputs in one run only; the first, mini/qa-1 turn 1 pass 2, in b"),
        (
            {"change": lambda m: m["rows"][1].update(params={"length": 6})},
            "sps: its method or parameters",
        ),
        (
            {"change": lambda m: m["machine"]["git"].update(commit="ffffffffffff")},
            r"commit: 01234567 \(a\) against ffffffff \(b\)",
        ),
        ({"text": "Where is {}?"}, "prompts: "),
    ],
)
def test_runs_that_differ_are_rejected_with_the_difference(make_run, tmp_path, more, message):
    runs = [make_run("a"), make_run("b", **more)]
    with pytest.raises(UsageError, match=f"they differ in(?s:.*){message}") as caught:
        baseline.save("ci", runs, root=tmp_path / "to")
    assert "specbench compare" in caught.value.hint
    assert not (tmp_path / "to").exists()


def test_steps_that_depend_on_timing_may_differ_between_runs(make_run, tmp_path):
    def change(manifest):
        manifest["rows"][1]["timing_free"] = False

    def edit(record):
        steps = Steps([2, 0], [3, 0], [2, 0], [2, 0], [2, 1])
        return replace(record, steps=steps, draft_forwards=1) if record.label == "sps" else record

    runs = [make_run("a", change=change), make_run("b", change=change, edit=edit)]
    saved = baseline.load(baseline.save("ci", runs, root=tmp_path))
    one, other = (next(c for c in own if c.key.label == "sps") for own in saved.processes)
    assert (one.counters.nodes, other.counters.nodes) == (6, 3)
    assert saved.outputs[one.key] == one


def test_same_run_twice_is_not_two_processes(make_run, tmp_path):
    run = make_run()
    with pytest.raises(UsageError, match="named twice"):
        baseline.save("ci", [run, run / ".." / run.name], root=tmp_path)


@pytest.mark.parametrize("status", ["running", "interrupted"])
def test_unfinished_run_is_rejected_as_a_baseline(make_run, tmp_path, status):
    with pytest.raises(UsageError, match=f"is {status}") as caught:
        baseline.save("ci", [make_run(status=status)], root=tmp_path)
    assert "--resume" in caught.value.hint


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "two words"])
def test_name_with_path_characters_is_rejected(make_run, tmp_path, name):
    with pytest.raises(UsageError, match="not a valid name of a baseline"):
        baseline.save(name, [make_run()], root=tmp_path)


def test_run_without_a_machine_id_is_rejected_as_a_baseline(make_run, tmp_path):
    run = make_run(change=lambda manifest: manifest.pop("machine"))
    with pytest.raises(UsageError, match="has no machine id"):
        baseline.save("ci", [run], root=tmp_path)


def test_saving_without_a_run_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="a baseline needs a run"):
        baseline.save("ci", [], root=tmp_path)
    with pytest.raises(UsageError, match="contains no run"):
        baseline.save("ci", [tmp_path / "nowhere"], root=tmp_path)


def test_folder_that_cannot_be_written_is_an_error(make_run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        baseline.save("ci", [make_run()], root=tmp_path / "file")


def test_baseline_contains_no_texts_tokens_paths_or_error_messages(make_run, tmp_path):
    def edit(record):
        if record.turn == 1:
            return record
        lost = dict.fromkeys(("output_ids", "n_tokens", "steps", "verdict", "forwards"))
        error = "OSError: /home/somebody/weights is gone"
        return replace(record, error=error, finish="error", **lost)

    written = baseline.save("ci", [make_run(edit=edit)], root=tmp_path).read_text()
    assert "/home" not in written and "OSError" in written
    assert str(tmp_path) not in written and "sells tea" not in written
    assert "[5,6," not in written


def test_file_of_fourteen_methods_on_eight_prompts_is_small(make_run, tmp_path):
    labels = ["vanilla", *(f"sps {n}" for n in range(13))]
    places = [(f"mini/translation-{n:03}", 1) for n in range(8)]
    path = baseline.save("ci", [make_run(labels=labels, places=places)], root=tmp_path)
    assert path.stat().st_size < 20_000


def edit_json(edit):
    """Return a function that applies `edit` to the data of a baseline's text."""

    def apply(text):
        data = json.loads(text)
        edit(data)
        return json.dumps(data)

    return apply


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "<<<<<<< ours\n" + text,
        lambda text: "[]",
        lambda text: "{}",
        lambda text: '"words"',
        edit_json(lambda data: data.pop("machine")),
        edit_json(lambda data: data["outputs"][0].pop()),
        edit_json(lambda data: data["outputs"][0][9].pop()),
        edit_json(lambda data: data["outputs"][0][9].__setitem__(0, "4")),
        edit_json(lambda data: data["outputs"][0].__setitem__(0, "mini/never asked")),
        edit_json(lambda data: data["outputs"][0].__setitem__(2, "nobody")),
        edit_json(lambda data: data["outputs"].append(data["outputs"][0])),
        edit_json(lambda data: data["outputs"].append(7)),
        edit_json(lambda data: data["prompts"][0].pop()),
        edit_json(lambda data: data["rows"].append({"label": "sps"})),
        edit_json(lambda data: data.update(facts=[1])),
        edit_json(lambda data: data["facts"].update(seed=0)),
        edit_json(lambda data: data.update(schema="1")),
        edit_json(lambda data: data.update(outputs=[])),
    ],
)
def test_damaged_file_is_a_usage_error(make_run, tmp_path, damage):
    path = baseline.save("ci", [make_run()], root=tmp_path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(UsageError, match="is not a baseline, or is damaged"):
        baseline.load(path)


def test_file_of_a_newer_version_is_rejected(make_run, tmp_path):
    path = baseline.save("ci", [make_run()], root=tmp_path)
    path.write_text(edit_json(lambda data: data.update(schema=3))(path.read_text()))
    with pytest.raises(UsageError, match="reads up to 2") as caught:
        baseline.load(path)
    assert "upgrade" in caught.value.hint


def test_file_of_an_older_version_has_no_fastest_forward(make_run, tmp_path):
    def older(data):
        data.update(schema=1)
        for line in data["outputs"]:
            line[-1].pop()

    path = baseline.save("ci", [make_run()], root=tmp_path)
    new = baseline.load(path)
    path.write_text(edit_json(older)(path.read_text()))
    old = baseline.load(path)
    assert {output.times.draft_fastest for output in old.outputs.values()} == {None}
    assert old.outputs.keys() == new.outputs.keys() and old.machine == new.machine


def test_binary_and_missing_files_are_errors(tmp_path):
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    for name, message in (("binary.json", "not a baseline"), ("absent.json", "cannot read")):
        with pytest.raises(UsageError, match=message):
            baseline.load(tmp_path / name)


def test_counters_that_contradict_each_other_are_rejected(make_run, tmp_path):
    file = baseline.save("ci", [make_run(labels=["sps"])], root=tmp_path)
    text = file.read_text()
    assert "[4,3,2,4,6,3,2,3,2]" in text  # accepted 2 of 3 tested
    file.write_text(text.replace("[4,3,2,4,6,3,2,3,2]", "[4,3,2,4,6,3,4,3,2]"))
    with pytest.raises(UsageError, match="not accepted <= tested <= levels <= nodes"):
        baseline.load(file)
