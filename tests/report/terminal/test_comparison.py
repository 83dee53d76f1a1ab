"""Tests of the page that compares two outputs: first difference, near-tie, and steps before it."""

import pytest

from specbench_cli.errors import UsageError
from specbench_cli.report.terminal.side_by_side import page
from specbench_cli.report.terminal.table import WIDTH
from specbench_cli.store.run_dir import Prompt, RunDir
from specbench_cli.store.schema import ForwardKind, Steps, Trace, Verdict
from specbench_cli.summary.comparison import compare_outputs, first_difference

WORDS = "zero one two three four five six seven eight nine".split()
VANILLA = [1, 2, 3, 4, 5]


def decode(ids):
    return " ".join(WORDS[token] for token in ids)


@pytest.fixture
def run(tmp_path, synthetic, manifest):
    """Return a function that makes a run of vanilla and sps on two prompts.

    `ids` and `verdict` are the output of sps on the first prompt and its verdict.
    """

    def make(ids=VANILLA, verdict=None, passes=1, **changes):
        fakes = (synthetic.vanilla, synthetic.sps)
        records = synthetic.records(fakes, prompts=2, passes=passes, tokens=5)
        forwards = [ForwardKind("target", "verify", 0, 1, (0, 8))]
        for record in records:
            record.output_ids = list(VANILLA)
            if record.label == "sps" and record.prompt_id == "mini/0":
                record.output_ids = list(ids)
                record.verdict = verdict or Verdict("identical")
                record.n_tokens, record.origin = len(ids), ["prefill", "accepted", "accepted"]
                record.origin += ["recovered"] * (len(ids) - 3)
                record.steps = Steps([3, 1], [3, 1], [3, 1], [2, 0], [3, len(ids) - 4])
                record.forwards = Trace(forwards, [0] * 3, [4] * 3, [0, 1, 2], [1, 2, 3])
                record.target_forwards, record.draft_forwards = 3, 0
                for name, value in changes.items():
                    setattr(record, name, value)
            if record.label == "sps" and "peer" in changes:
                record.peer = changes["peer"]
        folder = RunDir.create(tmp_path / "run", manifest | {"tolerance": {"value": 2e-4}})
        folder.append(records)
        first = {each.prompt_id: each for each in reversed(records)}
        folder.append_prompts(
            Prompt(id_, r.cluster, r.task, r.family, r.category, 1, f"Question {id_[5:]}?", [1, 2])
            for id_, r in first.items()
        )
        return folder

    return make


def test_first_difference_is_an_index_or_none():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 9, 3], [1, 2, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], [4]) == 0


def test_a_near_tie_shows_position_tokens_gap_tolerance_and_width(run):
    folder = run([1, 2, 7, 4, 5], Verdict("near-tie", 2, 1e-5, 3, rounding=True))
    (found,) = compare_outputs(folder, "mini/0", [], decode)
    assert (found.position, found.vanilla.token, found.own.token) == (2, 3, 7)
    assert (found.own.before, found.own.token_text, found.own.after) == (
        *("one two", "seven", "four five"),
    )
    page_text = page(found)
    assert (
        "verdict: near-tie (the score of the worst token is 1e-05 below the best one" in page_text
    )
    assert ", rounding explains up to 0.0002)" in " ".join(page_text.split())
    assert "the width of verification explains it" in " ".join(page_text.split())
    assert "first difference at token 2: vanilla 3 'three', sps 7 'seven'" in page_text
    assert ">>three<<" in page_text and ">>seven<<" in page_text
    assert "Question 0?" in page_text


def test_steps_show_drafted_accepted_and_rejected_tokens(run):
    (found,) = compare_outputs(run([1, 2, 7, 4, 5]), "mini/0", ["sps"], decode)
    assert [lane.at for lane in found.lanes] == [1, 4]
    assert [lane.text for lane in found.lanes] == ["two seven four", "five"]
    lines = page(found).splitlines()
    assert any("==x+" in line and line.endswith("<- first difference") for line in lines)
    assert any("x+" in line and "'five'" in line for line in lines)


def test_identical_outputs_are_shown(run):
    (found,) = compare_outputs(run(), "mini/0", ["sps"], decode)
    assert found.position is None
    assert "the same 5 tokens" in page(found)
    assert ">>" not in page(found)


def test_a_mismatch_is_marked_broken_and_a_wrong_end_is_explained(run):
    folder = run([1, 2, 3, 4], Verdict("mismatch", 4, None, 5), steps=None, peer=True)
    (found,) = compare_outputs(folder, "mini/0", ["sps"], decode)
    assert found.broken == "1 output is neither vanilla's nor tied with it, first mini/0"
    page_text = page(found)
    assert f"BROKEN: sps: {found.broken}" in page_text
    assert "mismatch (wrong end: 4 tokens, finish reason length)" in page_text
    assert "vanilla 5 'five', sps had ended (length)" in page_text
    assert "steps: not reported" in page_text


def test_a_failed_output_shows_its_error(run):
    nulls = dict.fromkeys(("output_ids", "n_tokens", "origin", "steps", "verdict"))
    folder = run(**nulls, finish="error", error="ValueError: no")
    (found,) = compare_outputs(folder, "mini/0", ["sps"], decode)
    assert "failed: ValueError: no" in page(found)
    assert "(no output)" in page(found)


def test_without_a_tokenizer_ids_are_shown(run):
    (found,) = compare_outputs(run([1, 2, 7, 4, 5]), "mini/0", ["sps"], None)
    assert "1 2 >>7<< 4 5" in page(found)


def test_lines_fit_the_width(run):
    (found,) = compare_outputs(
        run([1, 2, 7, 4, 5]), "mini/0", ["sps"], lambda ids: "word " * 8 * len(ids)
    )
    assert max(map(len, page(found).splitlines())) <= WIDTH


def test_vanilla_can_be_selected_alone(run):
    (found,) = compare_outputs(run(), "mini/1", ["vanilla"], decode)
    assert (found.label, found.position) == ("vanilla", None)


def test_the_worst_pass_is_shown(run):
    folder = run(passes=3)
    records = list(folder.records())
    worst = next(r for r in records if (r.label, r.prompt_id, r.pass_) == ("sps", "mini/0", 1))
    worst.output_ids, worst.verdict = [1, 2, 7, 4, 5], Verdict("near-tie", 2, 1e-5, 3)
    (folder.path / "records.jsonl").unlink()
    folder.append(records)
    (found,) = compare_outputs(folder, "mini/0", ["sps"], decode)
    assert (found.pass_, found.position) == (1, 2)


def test_unknown_prompt_and_method_are_rejected_with_the_known_ones(run):
    folder = run()
    with pytest.raises(UsageError, match=r"no prompt 'mini/00'; did you mean 'mini/0'") as caught:
        compare_outputs(folder, "mini/00", [], decode)
    assert caught.value.hint == "one of mini/0, mini/1"
    with pytest.raises(
        UsageError, match=r"no method 'spd' on mini/0; did you mean 'sps'"
    ) as caught:
        compare_outputs(folder, "mini/0", ["spd"], decode)
    assert caught.value.hint == "--method vanilla or sps"
