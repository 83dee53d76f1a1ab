"""Recommendations: successive halving with simulated times, what is recommended, resumption."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from specbench_cli import registry
from specbench_cli.config.load import load
from specbench_cli.config.run import RunConfig
from specbench_cli.config.sources import from_command_line
from specbench_cli.errors import EnvironmentFault, UsageError
from specbench_cli.predict.recommend import advice, journal, search
from specbench_cli.predict.recommend.halving import RoundResult, SearchSpace, TimeEstimates, halve
from specbench_cli.store.run_dir import RunDir
from specbench_cli.store.schema import Ns, Verdict
from tests.records import record_of

PROMPTS = [f"mini/{n}" for n in range(64)]
FAST = {"a": 2.0, "b": 1.5, "c": 1.2, "d": 1.1, "e": 0.9, "f": 0.8, "g": 0.7, "h": 0.5}


def record(label, prompt, seconds, **changes):
    values = {"ns": Ns(total=round(seconds * 1e9)), "output_ids": [1] * 10, "other_cpu": 0.0}
    return record_of(label, prompt, **(values | changes))


class Machine:
    """Simulated machine that runs rounds.

    Vanilla takes one second per prompt, and a method that divided by its speedup. A round takes
    `around` more seconds, and it stops at its limit as runs do.
    """

    def __init__(self, fast, around=5.0, **wrong):
        self.fast, self.around, self.wrong = fast, around, wrong
        self.rounds = {}
        self.spent = 0.0

    def __call__(self, name, rows, prompts, limit_s):
        seconds, records = 0.0, []
        for folder, prompt in enumerate(prompts):
            if folder and seconds > limit_s:
                break
            for label in ("vanilla", *rows):
                took = 1.0 / self.fast.get(label, 1.0)
                seconds += took
                records.append(record(label, prompt, took, **self.wrong.get(label, {})))
        self.rounds[name] = (list(rows), list(prompts))
        self.spent += seconds + self.around
        return RoundResult(records, seconds + self.around)


def candidates(fast=FAST, lossy=()):
    labels = list(fast)
    half = len(labels) // 2 or 1
    return SearchSpace([labels[:half], labels[half:]], {each: each not in lossy for each in labels})


def test_halving_keeps_the_faster_half_until_one_is_left():
    machine = Machine(FAST)
    found = halve(candidates(), PROMPTS, 600, machine)
    assert found.winners == ["a"]
    round_folders = [sorted(rows) for name, (rows, _) in machine.rounds.items() if name != "pilot"]
    assert round_folders == [sorted(FAST), ["a", "b", "c", "d"], ["a", "b"]]
    assert found.trials["a"].ratio == pytest.approx(2.0)
    assert found.trials["h"].rounds == 1


def test_rounds_use_different_prompts_and_each_uses_more():
    machine = Machine(FAST)
    halve(candidates(), PROMPTS, 600, machine)
    load_options = [prompts for name, (_, prompts) in machine.rounds.items() if name != "pilot"]
    assert len({prompt for each in load_options for prompt in each}) == sum(map(len, load_options))
    assert sorted(map(len, load_options)) == list(map(len, load_options))
    assert len(load_options[0]) < len(load_options[-1])


@pytest.mark.parametrize("seconds", [60, 120, 600, 3000])
def test_the_budget_is_exceeded_by_at_most_one_prompt_per_round(seconds):
    machine = Machine(FAST)
    found = halve(candidates(), PROMPTS, seconds, machine)
    assert found.spent_s == pytest.approx(machine.spent)
    assert machine.spent <= seconds + sum(1 / each for each in FAST.values()) + 1


def test_an_unexpectedly_slow_candidate_does_not_exceed_the_round_limit():
    machine = Machine(FAST | {"h": 0.01})
    halve(candidates(FAST | {"h": 0.01}), PROMPTS, 600, machine)
    assert machine.spent <= 600 + 110


def test_skipped_candidates_are_named_and_every_method_precedes_second_settings():
    fast = dict(FAST)
    found = halve(candidates(fast), PROMPTS, 40, Machine(fast))
    assert found.untried and set(found.untried) <= {"e", "f", "g", "h"}
    assert {*found.trials} >= {"a", "b"}


def test_no_method_is_skipped_if_rounds_of_one_prompt_fit():
    methods = SearchSpace([list(FAST)], dict.fromkeys(FAST, True))
    machine = Machine(FAST)  # the pilot takes 7 s; rounds of 8, 4 and 2 methods take 14, 10 and 8 s
    found = halve(methods, PROMPTS, 40, machine)
    assert (found.untried, found.winners) == ([], ["a"])
    assert len(machine.rounds["round-1"][1]) == 1
    assert halve(methods, PROMPTS, 38, Machine(FAST)).untried == ["h"]


def test_a_round_uses_at_least_one_prompt_if_the_remaining_time_allows_it():
    machine = Machine(FAST, around=20.0)  # the second round takes 23.9 s, its share is 23.7 s
    methods = SearchSpace([list(FAST)], dict.fromkeys(FAST, True))
    found = halve(methods, PROMPTS, 99, machine)
    assert (found.rounds, found.winners, found.untried) == (3, ["a"], [])


def test_a_too_short_budget_is_refused_with_a_sufficient_one():
    with pytest.raises(UsageError, match="the time is too short") as caught:
        halve(candidates(), PROMPTS, 8, Machine(FAST))
    assert "--minutes" in caught.value.hint


def test_a_candidate_with_a_wrong_or_failed_output_is_dropped():
    wrong = {
        "a": {"verdict": Verdict("mismatch", position=3)},
        "b": {"error": "MethodFault: no", "n_tokens": None, "output_ids": None},
    }
    found = halve(candidates(), PROMPTS, 600, Machine(FAST, **wrong))
    assert found.winners == ["c"]
    assert "is not vanilla's" in found.trials["a"].out
    assert found.trials["b"].out == "MethodFault: no"


def test_if_all_candidates_fail_there_is_no_best_one():
    wrong = {label: {"error": "no", "n_tokens": None, "output_ids": None} for label in FAST}
    found = halve(candidates(), PROMPTS, 600, Machine(FAST, **wrong))
    assert found.winners == []


def test_noisy_times_end_a_search_with_a_hint():
    wrong = {label: {"void": True} for label in ("vanilla", *FAST)}
    with pytest.raises(EnvironmentFault, match="other programs used the machine") as caught:
        halve(candidates(), PROMPTS, 600, Machine(FAST, **wrong))
    assert "--allow-noise" in caught.value.hint


def test_lossy_candidates_are_halved_separately():
    found = halve(candidates(lossy=("a", "b")), PROMPTS, 600, Machine(FAST))
    assert found.winners == ["c", "a"]


def test_a_search_stops_when_its_prompts_are_used_up():
    machine = Machine(FAST)
    found = halve(candidates(), PROMPTS[:3], 600, machine)
    assert found.winners == ["a"]
    assert sum(len(p) for name, (_, p) in machine.rounds.items() if name != "pilot") <= 3


def test_one_candidate_is_measured_once():
    machine = Machine({"a": 2.0})
    found = halve(candidates({"a": 2.0}), PROMPTS, 600, machine)
    assert (found.winners, found.rounds) == (["a"], 1)


def test_time_estimates_learn_the_overhead_of_a_round():
    pace = TimeEstimates.from_pilot(RoundResult([record("vanilla", "mini/1", 1.0)], 6.0), 20)
    assert (pace.round_overhead_s, pace.warm_s) == (pytest.approx(5.0), pytest.approx(2.0))
    done = [record(label, "mini/2", 1.0) for label in ("vanilla", "a")]
    pace.learn(RoundResult(done, 2.0 + 5.0 + 4.0 + 1.0), 1)
    assert pace.output_overhead_s == pytest.approx(0.5)
    assert pace.max_prompts(["a"], 9.0 + 3.1) == 1


def test_a_confirmation_leaves_time_for_the_final_checks():
    ns = Ns(total=10**9, prefill=5 * 10**8)
    pace = TimeEstimates.from_pilot(
        RoundResult([record("vanilla", "mini/1", 1.0, ns=ns)], 6.0), 0, 20
    )
    assert (pace.check_s, pace.read_s) == (pytest.approx(2.0), pytest.approx(1.0))
    prompts, limit = pace.plan_confirmation(["a"], 5.0 + 2.0 + 30.0)
    assert (prompts, limit) == (10, pytest.approx(20.0))
    assert pace.plan_confirmation(["a"], 1.0)[0] == 0


ROW = SimpleNamespace(
    label="a",
    method="pld",
    params={},
    lossless=True,
    guarantee="exact_tokens",
    speedup=1.4,
    speedup_low=1.2,
    speedup_high=1.6,
    speedup_note=None,
    broken=False,
    broken_why=None,
    mat=2.0,
    tokens_per_s=100.0,
    identical=9,
    near_tie=0,
    mismatch=0,
    unchecked=0,
    n_prompts=9,
    n_outputs=9,
    mismatch_bound=0.3,
    score_difference=None,
    score_difference_low=None,
    score_difference_high=None,
)
DECISIONS = [
    ({}, True, "above 1"),
    ({"speedup_low": 0.99}, False, "is not above 1"),
    ({"speedup": 0.9, "speedup_low": 0.8, "speedup_high": 0.99}, False, "is not above 1"),
    ({"speedup_low": None, "speedup_note": "too few questions"}, False, "too few questions"),
    ({"broken": True, "broken_why": "2 mismatches"}, False, "2 mismatches"),
]


@pytest.mark.parametrize(("changes", "chosen", "reason"), DECISIONS)
def test_a_method_is_recommended_only_if_its_held_out_interval_proves_a_gain(
    changes, chosen, reason
):
    row = SimpleNamespace(**{**vars(ROW), **changes})
    search_journal = SimpleNamespace(choice=lambda label: SimpleNamespace(name="pld", params={}))
    confirmed = advice._confirmed_result(search_journal, row)
    assert confirmed["pays"] is chosen
    outcome = SimpleNamespace(best=SimpleNamespace(trials={}))
    assert reason in advice._explain([confirmed], confirmed if chosen else None, outcome)


def load_options(*methods, **more):
    options = {"methods": list(methods) or registry.lossless_methods(), "allow_noise": True, **more}
    return load(
        from_command_line(options), None, methods=registry, env={}, folder=Path("/nonexistent")
    )


@pytest.mark.usefixtures("small_pair")
class TestRounds:
    """Rounds as runs, with a small model pair."""

    def test_the_same_seed_gives_the_same_order_of_trials_and_prompts(self):
        first, again = (
            search.create_journal(*load_options("sps", "pld", seed=3), 10) for _ in range(2)
        )
        other = search.create_journal(*load_options("sps", "pld", seed=4), 10)
        assert (first.waves, first.search, first.held_out) == (
            again.waves,
            again.search,
            again.held_out,
        )
        assert first.search != other.search
        assert set(first.waves[0]) == {"sps", "pld"}
        assert sorted(map(sorted, first.waves[:1])) == sorted(map(sorted, other.waves[:1]))

    def test_confirmation_prompts_share_no_cluster_with_search_prompts(self):
        saved_journal = search.create_journal(*load_options("pld"), 10)
        cluster = {q.prompt_id: q.cluster for q in search.make_plan(saved_journal.config).questions}
        assert not {cluster[p] for p in saved_journal.search} & {
            cluster[p] for p in saved_journal.held_out
        }

    def test_every_prefix_of_the_prompts_is_spread_over_families(self):
        saved_journal = search.create_journal(*load_options("pld"), 10)
        family = {q.prompt_id: q.family for q in search.make_plan(saved_journal.config).questions}
        assert len({family[p] for p in saved_journal.search[:6]}) == 6

    def test_all_lossless_methods_that_can_run_are_candidates(self):
        saved_journal = search.create_journal(*load_options(), 10)
        methods = {row.name for row in saved_journal.config.methods}
        assert {"sps", "pld", "staged"} <= methods
        assert "eagle3" not in methods and "head" in saved_journal.left_out["eagle3"]
        assert not methods & {"typical", "lenient", "hf:assisted", "draft-alone"}
        assert len(saved_journal.config.methods) <= search.MAX_CANDIDATES + 1

    @pytest.mark.parametrize("minutes", [0, -3, 0.1, float("nan")])
    def test_an_invalid_budget_is_refused(self, minutes):
        with pytest.raises(UsageError, match=r"--minutes .* is too short"):
            search.create_journal(*load_options("pld"), minutes)

    def test_a_method_of_another_program_is_not_a_candidate(self):
        with pytest.raises(UsageError, match="hf:assisted is a method of another program"):
            search.create_journal(*load_options("hf:assisted"), 10)

    def test_a_single_question_cannot_be_held_out(self):
        config, sources = load_options("pld", prompts=["mini/qa-000"])
        with pytest.raises(UsageError, match="recommend needs development and held-out questions"):
            search.create_journal(config, sources, 10)

    def test_an_interrupted_recommendation_resumes_with_its_stored_rounds(
        self, tmp_path, log, monkeypatch
    ):
        machine = self.limit_rounds(monkeypatch)
        saved_journal = search.create_journal(
            *load_options("sps", "pld", seed=1, max_new_tokens=6), 10
        )
        folder = tmp_path / "here"
        journal.create(folder, saved_journal)
        with pytest.raises(KeyboardInterrupt):
            search.recommend(saved_journal, folder, log(interrupt_after=9))
        done = {path.name: len(list(RunDir.open(path).records())) for path in round_folders(folder)}
        again = journal.Journal.read(folder)
        assert again.rounds["pilot"].seconds is not None
        outcome = search.recommend(again, folder, log())
        after = {
            path.name: len(list(RunDir.open(path).records())) for path in round_folders(folder)
        }
        assert all(after[name] >= n for name, n in done.items())
        assert outcome.run == folder / "confirmation" and outcome.confirmed
        records = list(RunDir.open(outcome.run).records())
        assert {r.label for r in records} == {"vanilla", *outcome.confirmed}
        assert {r.verdict.kind for r in records} <= {"identical", "reference"}
        search_prompts = {
            r.prompt_id
            for path in round_folders(folder)
            if path.name != "confirmation"
            for r in RunDir.open(path).records()
        }
        assert not search_prompts & {r.prompt_id for r in records}
        assert machine.limits and all(limit > 0 for limit in machine.limits)

    def limit_rounds(self, monkeypatch):
        """Limit each round to two prompts, and record the time limits of all rounds."""
        limits = []
        fits = TimeEstimates.max_prompts
        monkeypatch.setattr(
            TimeEstimates, "max_prompts", lambda pace, rows, s: min(2, fits(pace, rows, s))
        )
        monkeypatch.setattr(TimeEstimates, "plan_confirmation", lambda *_: (2, 60.0))
        monkeypatch.setattr(search, "MIN_HELD_OUT", 4)
        monkeypatch.setattr(search, "MAX_SETTINGS", 2)
        monkeypatch.setattr("specbench_cli.measure.warm_up.WARM_UP_ROUNDS", 1)
        config = search.RoundRunner._config

        def record_limit(self, name, round_):
            limits.append(round_.limit_s)
            return config(self, name, round_)

        monkeypatch.setattr(search.RoundRunner, "_config", record_limit)
        return SimpleNamespace(limits=limits)


def round_folders(folder):
    return [path for path in sorted(folder.iterdir()) if path.is_dir()]


def test_a_nonempty_folder_is_refused(tmp_path):
    (tmp_path / "note").write_text("mine")
    config = RunConfig.model_validate({"methods": ["vanilla"]})
    saved_journal = journal.Journal(
        schema=1,
        version="0",
        created_utc="",
        minutes=1,
        config=config,
        sources={},
        waves=[],
        left_out={},
        search=[],
        held_out=[],
    )
    with pytest.raises(UsageError, match="is not empty"):
        journal.create(tmp_path, saved_journal)
    with pytest.raises(UsageError, match="contains no recommendation"):
        journal.Journal.read(tmp_path)


def test_the_result_contains_no_local_path(tmp_path):
    journal.finish(tmp_path, {"lines": [{"text": "serve /home/me/models/big --x"}]})
    assert json.loads((tmp_path / journal.RESULT).read_text()) == {
        "lines": [{"text": "serve big --x"}]
    }
    assert journal.read_result(tmp_path) is not None


def test_trials_are_valid_json():
    found = halve(candidates(), PROMPTS, 600, Machine(FAST))
    assert json.dumps([dataclasses.asdict(trial) for trial in found.trials.values()])
