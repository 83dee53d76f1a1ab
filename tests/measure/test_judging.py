"""Tests of what a run stores with its verdicts: near-ties, likelihoods, drafts, file hashes."""

import hashlib
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from specbench_cli.engine.sequence import StopRule
from specbench_cli.judge import verdict
from specbench_cli.judge.oracle import Oracle
from specbench_cli.judge.tolerance import POSITIONS, Tolerance
from specbench_cli.measure import record_builder, warm_up
from specbench_cli.store.invariants import validate
from specbench_cli.store.run_dir import Prompt
from specbench_cli.store.schema import Verdict

pytestmark = pytest.mark.usefixtures("small_pair")

SILENT = """
from specbench_cli.api import Method

class Silent(Method):
    '''Proposes nothing.'''
    name = "silent"

    def propose(self, session, limit):
        return session.chain(())
"""


class Judge:
    """A judge that reports a near-tie at every token 7."""

    def flip_chances(self, request, ids):
        assert request.stop == StopRule(frozenset(), len(ids))
        return [0.5 if token == 7 else 0.0 for token in ids]


def near_ties(judge, *names, of):
    """Return the near-ties of vanilla's outputs `of` on prompts with two tokens each."""
    prompts = {(n, 1): Prompt(n, n, "mini", "qa", "qa", 1, "Why?", [1, 2]) for n in names}
    return record_builder.find_near_ties(
        judge, prompts, of, lambda *key: SimpleNamespace(stop=key[-1])
    )


def test_near_tie_probabilities_are_stored_for_outputs_with_ties():
    vanilla = {("a", 1, 2): [7] * 9, ("a", 1, 1): [7, 7, 3], ("b", 1, 1): [3, 3]}
    assert near_ties(Judge(), "a", "b", of=vanilla) == {
        "outputs": 2,
        "positions": 5,
        "ties": 2,
        "expected": 0.75,
        "chances": [["a", 1, 0.75]],
    }


def count_oracle_calls(monkeypatch):
    """Return a counter of the oracle's calls, by function."""
    calls = {"logits": 0, "stepwise_logits": 0}

    def count_calls(name):
        original = getattr(Oracle, name)

        def call_and_count(self, *args, **kwargs):
            calls[name] += 1
            return original(self, *args, **kwargs)

        monkeypatch.setattr(Oracle, name, call_and_count)

    for name in calls:
        count_calls(name)
    return calls


def test_a_run_without_differences_is_not_searched_for_near_ties(specbench, monkeypatch):
    calls = count_oracle_calls(monkeypatch)
    outcome = specbench("pld", limit=20, max_new_tokens=64)
    assert sum(r.n_tokens for r in outcome.by_label("vanilla")) > POSITIONS
    assert outcome.manifest["near_ties"] is None and outcome.manifest["tolerance"] is None
    sampled = [r for r in outcome.by_label("vanilla") if r.verdict.gap is not None]
    assert calls == {"logits": len(sampled), "stepwise_logits": 0}  # only the verdicts of vanilla
    assert "looking for near-ties" not in outcome.log.events


def make_all_near_ties(monkeypatch):
    """Make the judge report a near-tie for every output of a method."""
    original = verdict.OutputJudge.compare

    def report_near_tie(judge, request, reference, ids, *more):
        assert original(judge, request, reference, ids, *more).kind == "identical"
        return Verdict("near-tie", 0, 0.0, ids[0] - 1)

    monkeypatch.setattr(verdict.OutputJudge, "compare", report_near_tie)


def test_one_near_tie_starts_the_search_also_in_a_resumed_run(specbench, monkeypatch):
    make_all_near_ties(monkeypatch)
    monkeypatch.setattr(verdict, "measure_tolerance", lambda *_: Tolerance(1e-5, 5e-6, 1e-3, 8))
    outcome = specbench("pld", limit=1, category=["qa"], max_new_tokens=8)
    assert outcome.manifest["near_ties"]["outputs"] == 1
    assert "looking for near-ties" in outcome.log.events
    log = specbench.log(interrupt_after=4)
    with pytest.raises(KeyboardInterrupt):
        specbench("pld", limit=3, category=["qa"], max_new_tokens=8, log=log)
    monkeypatch.undo()
    monkeypatch.setattr(warm_up, "WARM_UP_ROUNDS", 0)
    resumed = specbench(resume=specbench.path(2))
    kinds = {record.verdict.kind for record in resumed.by_label("pld")}
    assert kinds == {"near-tie", "identical"}  # the near-ties are from before the interruption
    assert resumed.manifest["near_ties"]["outputs"] == 3


def test_sampled_outputs_have_their_likelihood(specbench):
    outcome = specbench("sps", temperature=0.8, top_p=0.9, limit=2)
    assert all(r.verdict.kind in ("reference", "unchecked") for r in outcome.records)
    assert all(math.isfinite(r.log_likelihood) and r.log_likelihood <= 0 for r in outcome.records)

    for r in outcome.records:
        assert sum(r.log_probs) == pytest.approx(r.log_likelihood, abs=1e-3 * r.n_tokens)


def test_greedy_outputs_have_log_probs_but_no_likelihood(specbench):
    outcome = specbench("sps", "hf:vanilla", limit=1)
    assert {r.log_likelihood for r in outcome.records} == {None}
    for record in outcome.records:
        assert record.log_probs == outcome.records[0].log_probs
        assert len(record.log_probs) == record.n_tokens


def test_drafts_are_stored_for_the_first_question_of_each_family(specbench):
    outcome = specbench("sps", "sps-tree", "hf:assisted", limit=7, max_new_tokens=8)
    first = {}
    for prompt in outcome.prompts:
        first.setdefault(prompt.family, prompt.prompt_id)
    assert len(first) == 6
    assert {r.prompt_id for r in outcome.records if r.drafts is not None} == set(first.values())
    trees = 0
    for record in outcome.records:
        if record.drafts is None:
            continue
        at = 1
        for drafted, committed in zip(record.drafts, record.steps.committed, strict=True):
            accepted = [drafted.tokens[node] for node in drafted.path]
            assert accepted == record.output_ids[at : at + len(accepted)]
            trees += drafted.parents is not None
            at += committed
    assert trees > 0
    validate(outcome.by_label("sps")[0])


def test_the_manifest_has_the_hash_of_every_method_file(specbench, tmp_path):
    file = tmp_path / "silent.py"
    file.write_text(SILENT)
    files = specbench("silent", plugins=[str(file)], limit=1).manifest["method_files"]
    assert files["silent"] == hashlib.sha256(file.read_bytes()).hexdigest()
    import methods.vanilla

    own = Path(methods.vanilla.__file__).read_bytes()
    assert files["vanilla"] == hashlib.sha256(own).hexdigest()


@pytest.mark.smoke
def test_half_precision_verdicts_have_the_expected_number_of_near_ties(specbench):
    """In bfloat16, blocks and single tokens round differently, which may cause near-ties."""
    outcome = specbench("sps", dtype="bfloat16", limit=3, max_new_tokens=32, category=["qa"])
    kinds = {record.verdict.kind for record in outcome.by_label("sps")}
    assert kinds <= {"identical", "near-tie"}
    if "near-tie" in kinds:
        assert outcome.manifest["near_ties"]["expected"] > 0
        assert all(
            record.verdict.rounding is not None
            for record in outcome.by_label("sps")
            if record.verdict.kind == "near-tie"
        )
