"""The steps of `specbench recommend`: choose candidates, search in rounds, confirm the winners.

Each round is a run in its own folder, and can be resumed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from time import monotonic
from typing import Any

from specbench_cli import __version__, registry
from specbench_cli.config import permission
from specbench_cli.config.run import MethodChoice, RunConfig
from specbench_cli.errors import ExitCode, UsageError
from specbench_cli.files import check_no_link
from specbench_cli.measure.isolation.plugin_process import check_plugins
from specbench_cli.measure.manifest import utc_now
from specbench_cli.measure.result import RunResult, read_result
from specbench_cli.measure.run import measure_run, resume_run, start_run
from specbench_cli.measure.view import PromptProgress, RunView
from specbench_cli.plan import tune
from specbench_cli.plan.grid import list_candidates
from specbench_cli.plan.method_run import MethodRun
from specbench_cli.plan.plan import drop_unavailable, load_plugins, make_plan
from specbench_cli.predict.recommend.halving import (
    CONFIRMATION,
    SEARCH_SHARE,
    BestCandidate,
    RoundResult,
    SearchSpace,
    halve,
)
from specbench_cli.predict.recommend.journal import FILE, Journal, SearchRound
from specbench_cli.store.run_dir import RunDir
from specbench_cli.store.schema import BASELINE, LOSSLESS, Record
from specbench_cli.tasks import Question, sample_questions

MAX_SETTINGS = 6
"""Maximum number of candidates per method: its given parameters, then one parameter changed."""
MAX_CANDIDATES = 64
"""Maximum number of candidates, because each needs a warm-up and memory."""
MAX_QUESTIONS = 400
"""Maximum number of search questions, and of held-out questions. No search uses more."""
MIN_HELD_OUT = 8
"""Minimum number of prompts in the confirmation, unless its time limit ends it earlier."""
MIN_BUDGET_S = 20.0
"""Minimum time budget in seconds, because every round loads the models."""


def create_journal(config: RunConfig, sources: Mapping[str, str], minutes: float) -> Journal:
    """Return the journal of a new recommendation. The candidates are the methods of `config`.

    Raises:
        UsageError: the time is too short, a method cannot be recommended, or there are too few
            questions to hold some out; or `make_plan` fails.
    """
    if not minutes * 60 >= MIN_BUDGET_S:
        raise UsageError(
            f"--minutes {minutes:g} is too short: every round loads the models, which needs at"
            f" least {MIN_BUDGET_S:g} seconds in total",
            "--minutes 10",
        )
    config = config.model_copy(update={"repeats": 1})
    config, left_out = _drop_unsuitable(config)
    check_plugins(config)
    config, unfit = drop_unavailable(config, fetch=True)
    left_out |= unfit
    plan = make_plan(config)
    if all(method_run.label == BASELINE for method_run in plan.method_runs):
        raise UsageError(
            "there is nothing to choose from: no method but vanilla can run here",
            "; ".join(left_out.values()) or "name methods: -m sps,pld (specbench list methods)",
        )
    waves = _make_waves(
        [method_run for method_run in plan.method_runs if method_run.label != BASELINE], config
    )
    by_label = {method_run.label: method_run for wave in waves for method_run in wave}
    named = [MethodChoice(name=BASELINE, label=BASELINE)]
    named += [
        MethodChoice(name=method_run.name, label=label, params=dict(method_run.user_params))
        for label, method_run in by_label.items()
    ]
    search, held_out = tune.split(plan.questions, config.seed, 1 / 2, "recommend")
    return Journal(
        schema=1,
        version=__version__,
        created_utc=utc_now(),
        minutes=minutes,
        config=config.model_copy(update={"methods": named, "limit": None, "category": []}),
        sources=dict(sources),
        waves=[[method_run.label for method_run in wave] for wave in waves],
        left_out=left_out,
        search=_order_prompts(search, config.seed),
        held_out=_order_prompts(held_out, config.seed),
    )


def _drop_unsuitable(config: RunConfig) -> tuple[RunConfig, dict[str, str]]:
    """Return the configuration without unsuitable methods, and the reasons by method label.

    Raises:
        UsageError: a method belongs to another engine, whose settings specbench cannot recommend.
    """
    reasons: dict[str, str] = {}
    for row in config.methods:
        method = registry.build(row.name, row.params)
        if row.label == BASELINE:
            continue
        if method.peer:
            raise UsageError(
                f"{row.label} is a method of another program; recommend only chooses among"
                " specbench's own methods, and prints commands for other engines",
                f"to measure it: specbench run -m {row.name}",
            )
        if method.upper_bound or method.control:
            reasons[row.label] = f"{row.label} is only a reference for comparisons"
        elif config.batch > 1 and not method.batches:
            reasons[row.label] = f"{row.label} decodes one prompt at a time"
    kept = [row for row in config.methods if row.label not in reasons]
    return config.model_copy(update={"methods": kept}), reasons


def _make_waves(method_runs: Sequence[MethodRun], config: RunConfig) -> list[list[MethodRun]]:
    """Return groups (waves) of candidates in the order of trial.

    The first wave has each method with its own settings. The next wave has each method with one
    setting changed, and so on. The order within a wave is random, from the seed.
    """
    columns = [list_candidates(method_run, MAX_SETTINGS, config.rule) for method_run in method_runs]
    waves: list[list[MethodRun]] = []
    left = MAX_CANDIDATES
    for number, line in enumerate(zip_longest(*columns)):
        wave = [method_run for method_run in line if method_run is not None]
        random.Random(f"recommend {config.seed} {number}").shuffle(wave)
        waves.append(wave[:left])
        left -= len(waves[-1])
        if not left:
            break
    return waves


def _order_prompts(questions: Sequence[Question], seed: int) -> list[str]:
    """Return prompt ids in an order in which the first n prompts cover all task families.

    The option `--limit` uses the same order.
    """
    pool = sample_questions(questions, MAX_QUESTIONS, seed)
    order: dict[str, None] = {}
    for n in range(1, len({question.base_id for question in pool}) + 1):
        order |= dict.fromkeys(question.prompt_id for question in sample_questions(pool, n, seed))
    return list(order)


@dataclass(frozen=True)
class SearchResult:
    """Result of a search, and of the confirmation of the best candidates.

    best: result of the search.
    confirmed: labels that were measured on held-out prompts.
    run: folder of the confirmation run; None if there was nothing to confirm.
    exit_code: worst exit code among the confirmation and the search rounds with wrong outputs.
    """

    best: BestCandidate
    confirmed: Sequence[str]
    run: Path | None
    exit_code: ExitCode


def recommend(journal: Journal, folder: Path, view: RunView, force: bool = False) -> SearchResult:
    """Complete a recommendation: search, then confirm the best candidates on held-out prompts.

    Args:
        journal: the candidates and prompts, and the rounds so far.
        folder: folder of the recommendation.
        view: shows the progress.
        force: continue even if the program or the machine changed after the start of a round.

    Raises:
        UsageError, EnvironmentFault: as in `halve`, or a run of a round fails.
    """
    place = folder / FILE
    permission.check(permission.collect_requests(journal.config, place), str(place))
    view.stage("loading methods")
    check_plugins(journal.config)
    load_plugins(journal.config)  # a resumed recommendation has not loaded them yet
    candidates = _candidates(journal)
    rounds = RoundRunner(journal, folder, view, force)
    budget = journal.minutes * 60
    best = halve(candidates, journal.search, SEARCH_SHARE * budget, rounds)
    run = None
    if best.winners:
        fit, limit = best.estimates.plan_confirmation(best.winners, budget - best.spent_s)
        prompts = journal.held_out[: max(MIN_HELD_OUT, fit)]
        view.note(f"confirming {' and '.join(best.winners)} on {len(prompts)} held-out prompts")
        rounds(CONFIRMATION, best.winners, prompts, limit)
        run = folder / CONFIRMATION
    return SearchResult(best, best.winners, run, rounds.exit_code)


def _candidates(journal: Journal) -> SearchSpace:
    # Import slow modules now, so that the first round does not include their import time.
    from specbench_cli.judge.tolerance import POSITIONS
    from specbench_cli.measure.bench import Bench
    from specbench_cli.measure.repeat import Repeat
    from specbench_cli.measure.warm_up import WARM_UP_ROUNDS, WARM_UP_TOKENS

    _loaded = Bench, Repeat

    rule = journal.config.rule
    kinds = {
        row.label: registry.build(row.name, row.params).guarantee(rule) in LOSSLESS
        for row in journal.config.methods
    }
    return SearchSpace(journal.waves, kinds, WARM_UP_ROUNDS * WARM_UP_TOKENS, POSITIONS)


class RoundRunner:
    """Runner of a recommendation's rounds. Each round is a run.

    If a round is already finished, its records and its stored duration are read.

    Attributes:
        exit_code: worst exit code so far among the confirmation and the search rounds with wrong
            outputs.
    """

    def __init__(self, journal: Journal, folder: Path, view: RunView, force: bool) -> None:
        self._journal, self._folder, self._view, self._force = journal, folder, view, force
        self._clock: Callable[[], float] = monotonic
        self.exit_code = ExitCode.OK

    def __call__(
        self, name: str, rows: Sequence[str], prompts: Sequence[str], limit_s: float
    ) -> RoundResult:
        """Measure a round, as `halving.Measure` describes."""
        journal, path = self._journal, self._folder / name
        check_no_link(path)
        round_ = journal.rounds.get(name)
        if round_ is None:
            round_ = SearchRound(rows=list(rows), prompts=list(prompts), limit_s=limit_s)
            journal.rounds[name] = round_
            journal.write(self._folder)
        start, was_finished = self._clock(), _is_finished(path)
        result = self._run(name, path, round_)
        if round_.seconds is None:  # unknown if the program was stopped after the round: use limit
            round_.seconds = round_.limit_s if was_finished else self._clock() - start
            journal.write(self._folder)
        if result.exit_code is ExitCode.BAD_ANSWER or name == CONFIRMATION:
            self.exit_code = max(self.exit_code, result.exit_code, key=_ORDER.index)
        records: list[Record] = list(RunDir.open(path).records())
        return RoundResult(records, round_.seconds)

    def _run(self, name: str, path: Path, round_: SearchRound) -> RunResult:
        words = f"{name}, {len(round_.rows)} candidates" if len(round_.rows) > 1 else name
        view = RoundView(self._view, words, self._later(name), round_.limit_s, self._clock)
        if _is_finished(path):
            return read_result(RunDir.open(path))
        if RunDir.holds_run(path):
            plan, run_dir = resume_run(path, view, force=self._force)
            return measure_run(plan, run_dir, view, force=self._force)
        config = self._config(name, round_)
        fresh_plan, run_dir = start_run(config, self._journal.sources, path, view)
        return measure_run(fresh_plan, run_dir, view, fresh=True)

    def _config(self, name: str, round_: SearchRound) -> RunConfig:
        """Return the configuration of a round's run. Only the confirmation measures controls."""
        journal = self._journal
        values: dict[str, Any] = {
            "methods": [journal.choice(label) for label in (BASELINE, *round_.rows)],
            "prompts": round_.prompts,
            "stop_after": round_.limit_s,
        }
        if name != CONFIRMATION:
            values["controls"] = "none"
        return journal.config.model_copy(update=values)

    def _later(self, name: str) -> float:
        """Return the seconds of the time budget that are left for the rounds after this round."""
        whole = self._journal.minutes * 60
        if name == CONFIRMATION:
            return 0.0
        done = [r.seconds or r.limit_s for r in self._journal.rounds.values()]
        return max(0.0, whole - sum(done))


def _is_finished(path: Path) -> bool:
    return RunDir.holds_run(path) and RunDir.open(path).manifest.get("status") == "finished"


_ORDER = (ExitCode.OK, ExitCode.ENVIRONMENT, ExitCode.BAD_ANSWER)


class RoundView:
    """Progress display of a round. It shows the remaining time of the whole recommendation.

    Args:
        view: progress display of the recommendation.
        name: name of the round.
        later_s: seconds planned for later rounds.
        limit_s: time limit of the round in seconds.
        clock: returns the current time in seconds.
    """

    def __init__(
        self, view: RunView, name: str, later_s: float, limit_s: float, clock: Callable[[], float]
    ) -> None:
        self._view, self._name, self._later_s = view, name, later_s
        self._clock, self._ends = clock, clock() + limit_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)

    def prompt(self, progress: PromptProgress) -> None:
        """Show progress, with the remaining time of the recommendation."""
        left = progress.left_s
        if left is not None:
            left = min(left, max(0.0, self._ends - self._clock())) + self._later_s
        self._view.prompt(progress._replace(part=self._name, left_s=left))
