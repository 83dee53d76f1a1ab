"""Audit checks: the cases they examine, their messages, and that every method passes them."""

from dataclasses import dataclass, replace
from typing import ClassVar, get_args

import pytest
import torch

from methods.pld import PldParams
from methods.sps import Sps, SpsParams
from methods.sps_tree import SpsTree, SpsTreeParams
from specbench_cli import registry
from specbench_cli.api import AcceptParams, Field, LengthParams, Method, MethodParams
from specbench_cli.audit.cases import (
    Case,
    deep_cases,
    enumerated_cases,
    late_level_cases,
    long_case,
    tied_logits_case,
    wide_case,
)
from specbench_cli.audit.certificate import certify
from specbench_cli.audit.checks import distribution as checks_distribution
from specbench_cli.audit.checks import tokens as checks_tokens
from specbench_cli.audit.checks.bookkeeping import check_bookkeeping
from specbench_cli.audit.checks.bounds import check_bounds
from specbench_cli.audit.checks.declarations import check_declarations
from specbench_cli.audit.enumeration import enumerate_outcomes
from specbench_cli.audit.finding import Finding, Problem
from specbench_cli.audit.models.table import CachedRow, TableState, find_wrong_rows
from specbench_cli.audit.reference import Reference
from specbench_cli.audit.runner import TABLE_CHECKS, run_checks
from specbench_cli.audit.subject import AuditSubject, format_params, max_draft_levels
from specbench_cli.engine.types import Rule
from specbench_cli.engine.verify.accept import Threshold
from specbench_cli.engine.verify.sampling import warp
from specbench_cli.errors import MethodFault
from tests.audit.faults.distributions import top_p_first

OURS = [name for name, entry in registry.built_in_methods().items() if not entry.peer]


OF_FEW_VARIANTS = {"grammar", "order", "batch", "recurrent", "generator"}
"""Checks whose result does not depend on numbers.

They run on the default parameters, and on variants that change a switch or a name.
"""


def select_variants(params, turn, n):
    """Return all variants that only this method has, and every n-th of the others.

    Others change only parameters that many methods share: a length rule or an accept rule. `turn`
    decides which of them this method gets.
    """
    common = [each for each in params if _changed(each) <= _shared(each)]
    return tuple(each for each in params if each not in common or each in common[turn % n :: n])


def changes_choice(params):
    """Return True if a parameter that is not a number differs from its default."""
    values = params.model_dump(exclude_defaults=True).values()
    return any(isinstance(value, str | bool) for value in values)


def _changed(params):
    return params.model_dump(exclude_defaults=True).keys()


def _shared(params):
    kinds = (kind for kind in (LengthParams, AcceptParams) if isinstance(params, kind))
    return {name for kind in kinds for name in kind.model_fields}


@pytest.mark.full
@pytest.mark.parametrize("name", OURS)
@pytest.mark.usefixtures("short_audit")
def test_every_registered_method_passes_on_tables(name, monkeypatch):
    """Run the audit with few cases.

    The distribution check gets one case for each variant and some deep ones, and fewer for block
    verification. tests/engine/verify/test_distribution.py examines three more tokens of each
    method.
    """
    whole, turn = AuditSubject.from_method(name, registry.load(name)), OURS.index(name)
    first, rest = whole.variants[:3], select_variants(whole.variants[3:], turn, 2)
    short, choosing = replace(whole, single_changes=()), tuple(filter(changes_choice, rest))
    few = replace(short, variants=first[:1] + choosing)
    found = run_checks(few, {c: TABLE_CHECKS[c] for c in TABLE_CHECKS if c in OF_FEW_VARIANTS})
    monkeypatch.setattr(checks_distribution, "OUTCOME_BUDGET", {"block": 40})
    found += run_checks(
        replace(short, variants=first + choosing),
        {"distribution": checks_distribution.check_distribution},
    )
    subject = replace(
        whole, variants=first + rest, single_changes=select_variants(whole.single_changes, turn, 3)
    )
    monkeypatch.setattr(checks_distribution, "OUTCOME_BUDGET", {"rejection": 40})
    found += run_checks(
        subject, {c: TABLE_CHECKS[c] for c in TABLE_CHECKS if c not in OF_FEW_VARIANTS}
    )
    assert [finding for finding in found if not finding.passed] == []
    checks = {finding.check: finding for finding in found}
    assert checks["clock"].figure["steps"] > 100
    if name == "draft-alone":  # no parameter makes it lossless
        assert "distribution" not in checks
        return
    assert checks["distribution"].figure["total_variation"] < 1e-9
    assert checks["distribution"].figure["cases"] >= 3
    assert checks["tokens"].figure["outputs"] >= 24


def list_eos_places(case):
    """Return the places in a step's draft at which EOS ended the output, over all outcomes."""

    def run(random):
        session = case.open(random=random)
        steps = []
        for step in Sps(SpsParams(length=2)).generate(session):
            steps.append(step)
            if len(session.output()) >= case.length:
                break
        if session.finish != "eos" or not steps:
            return None
        last = steps[-1]
        accepted, origin = len(last.outcome.path), last.outcome.origin[-1]
        return origin if origin != "accepted" else f"draft token {accepted} of {last.draft.levels}"

    return {place for place, _ in enumerate_outcomes(run)}


def test_an_eos_at_every_place_of_a_step_is_examined():
    cases = [case for case in enumerated_cases("rejection", include_costly=False) if case.eos]
    assert set().union(*map(list_eos_places, cases)) >= {
        "draft token 1 of 2",
        "draft token 2 of 2",
        "bonus",
        "recovered",
    }


def test_a_top_k_cut_is_not_tried_where_it_cuts_nothing(monkeypatch):
    tried = []
    monkeypatch.setattr(
        checks_distribution, "_enumerate_case", lambda subject, params, case: tried.append(case)
    )
    checks_distribution.check_distribution(AuditSubject.from_method("sps", Sps))
    assert {"near", "disjoint"} <= {case.name for case in tried if case.sampling.top_k == 0}
    narrowed = {case.name for case in tried if case.sampling.top_k == 2}
    assert "near" in narrowed
    assert "disjoint" not in narrowed


def test_budgets_near_the_draft_length_are_examined():
    budgets = {case.budget for case in enumerated_cases("rejection", include_costly=False)}
    assert budgets >= {1, 2, 3, 4}  # 1, 2, g, g + 1 and g + 2 for drafts of one and two tokens


def test_a_subject_has_short_variants_and_every_choice_of_a_parameter():
    subject = AuditSubject.from_method("pld", registry.load("pld"))
    assert subject.variants[0] == PldParams()
    words = [format_params(params) for params in subject.variants]
    assert "ngram=2 length=2" in words
    assert "ngram=1 length=1" in words
    assert "ngram=2 length=2 rule=transformers" in words
    assert len(set(words)) == len(words)
    assert {
        max_draft_levels(params)
        for params in subject.lossless_params("rejection", few_outcomes=True)
    } == {1, 2}


def test_every_length_rule_is_one_variant():
    words = [format_params(params) for params in AuditSubject.from_method("sps", Sps).variants]
    assert words[:3] == ["default parameters", "length=2 max=2", "length=1 max=1"]
    rules = ("heuristic", "confidence", "entropy", "acceptance-head", "oracle")
    by_load = ("synergy", "smartspec")
    assert words[3:10] == [f"length={rule} max=2" for rule in (*rules, *by_load)]
    accepting = ("threshold", "typical", "lenient", "random")
    assert words[10:] == [f"length=2 max=2 accept={rule}" for rule in accepting]


def test_a_lossy_variant_is_audited_for_its_own_guarantee_and_for_conduct():
    subject = AuditSubject.from_method("sps", Sps)
    for rule in get_args(Rule):
        assert {params.accept for params in subject.lossless_params(rule)} == {"exact"}
    lossy = AuditSubject("sps", Sps, subject.variants[-3:])
    found = {finding.check: finding for finding in run_checks(lossy, TABLE_CHECKS)}
    conduct = {"declarations", "states", "counters", "clock"}
    assert found.keys() == conduct | {"twin draft", "useless draft"}
    assert all(finding.passed for finding in found.values())
    assert found["counters"].figure["steps"] > 50


class TreeParams(AcceptParams, SpsTreeParams):
    """Parameters of a tree method with an accept rule."""


@pytest.mark.parametrize("accept", ["threshold", "typical", "random"])
def test_a_tree_with_an_accept_rule_has_correct_states_and_counters(accept):
    tree = type("Relaxed", (SpsTree,), {"Params": TreeParams})
    variants = tuple(
        TreeParams(widths=(2, 2), draw_mode=distribution, accept=accept, epsilon=0.2, rate=0.5)
        for distribution in ("deterministic", "independent", "without_replacement")
    )
    found = run_checks(AuditSubject("tree", tree, variants), {"states": TABLE_CHECKS["states"]})
    assert [finding.passed for finding in found] == [True] * 3, found


def test_numbers_are_varied_in_both_directions_and_switched_off():
    single_changes = {
        name: words(name) for name in ("sps", "specdec++", "mirror", "staged", "sps-tree")
    }
    assert {"length=2", "length=10", "length=1"} <= single_changes["sps"]
    assert {"length=confidence threshold=0.0", "accept=typical delta=0.0"} <= single_changes["sps"]
    assert {f"threshold={n}" for n in (0.15, 0.6, 1.0, 0.0)} <= single_changes["specdec++"]
    assert {"candidates=0", "candidates=4", "layer=1", "layer=2"} <= single_changes["mirror"]
    assert {
        "stages=('draft',)",
        "threshold=0.0",
        "depth=24",
        "draw_mode=without_replacement",
    } <= single_changes["staged"]
    assert {"widths=(2, 2, 1, 1, 1)", "draw_mode=independent", "depth=16"} <= single_changes[
        "sps-tree"
    ]


def words(name):
    return {
        format_params(params)
        for params in AuditSubject.from_method(name, registry.load(name)).single_changes
    }


class Thresholds(Sps):
    """Method that changes its behaviour at several thresholds."""

    limit = 60

    def propose(self, session, limit):
        return super().propose(session, limit if len(session.tokens()) < 700 else FAR_OFF)


FAR_OFF = 12


def test_prompts_outputs_and_passes_go_beyond_the_numbers_in_a_methods_code():
    subject = AuditSubject("thresholds", Thresholds, (SpsParams(length=2),))
    assert {FAR_OFF, 700} <= set(subject.code_constants)
    longest_one, most = subject.exceed_constants(300, 2_000), subject.exceed_constants(9, 40)
    assert 700 < longest_one <= 2_000 and FAR_OFF < most <= 40
    assert len(checks_tokens.long_case_for(subject, "greedy").prompt) == longest_one


@pytest.mark.parametrize("case", [wide_case("rejection", 64), wide_case("rejection")], ids=str)
def test_wide_cases_reveal_the_order_of_the_cuts(case):
    before, last = case.prompt[-2:]
    row, sampling = case.tables[0][before, last], case.sampling
    distributions = [warp(row, sampling), top_p_first(row, sampling).softmax(-1)]
    assert distributions[0].tolist() == pytest.approx(
        Reference(case.tables[0], sampling).distribution(before, last)
    )
    assert (distributions[0] - distributions[1]).abs().sum() / 2 > 0.1


def test_the_last_level_of_a_deep_case_has_all_probability():
    case, _ = deep_cases("rejection", 5)
    found = {tuple(session.output()) for session in (decode_case(case, seed) for seed in range(20))}
    assert {output[:5] for output in found} == {(1, 2, 3, 4, 5)}
    assert 1 < len({output[5] for output in found}) <= 3


class DrawsFromMany(Sps):
    """Method that draws many unused random numbers at the third level."""

    def propose(self, session, limit):
        draft = super().propose(session, limit)
        if session.sampling.draws and draft.nodes > 2:
            session.random.categorical(torch.full((1, 600), 1 / 600))
        return draft


@pytest.mark.usefixtures("short_audit")
def test_a_method_whose_late_levels_have_too_many_outcomes_is_not_verified(monkeypatch):
    monkeypatch.setattr(checks_distribution, "LATE_BUDGET", {"rejection": 1_000})
    subject = AuditSubject("sps", DrawsFromMany, (SpsParams(length=5), SpsParams(length=2)))
    (distribution, _) = checks_distribution.check_distribution(subject)
    assert not distribution.passed and not distribution.shown
    assert "not shown under rejection, level 3 of a draft and " in distribution.problem.what
    assert certify(subject, [distribution], 1.0).verdict == "NOT SHOWN"


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_a_long_output_has_accepted_and_rejected_drafts_to_its_end(rule):
    case = long_case(rule)
    session = case.open()
    late = [
        (len(step.outcome.path), step.draft.nodes)
        for step in Sps(SpsParams(length=2)).generate(session)
        if len(session.output()) > 40 and step.draft.nodes
    ]
    assert sum(accepted == nodes for accepted, nodes in late) >= 3
    assert sum(accepted < nodes for accepted, nodes in late) >= 3


def test_a_track_reaches_each_uncertain_place_with_every_outcome():
    for name, case in late_level_cases("rejection", 5):
        late = case.length - 1
        joint = Reference(case.tables[0], case.sampling).joint_distribution(
            case.prompt, (), case.length
        )
        assert len(joint) == 8, name
        assert len({output[late] for output in joint}) == 2
    tied = make_case_with_ties().tables[0].sort(-1, descending=True).values
    assert tied[..., 0].equal(tied[..., 1])


def make_case_with_ties():
    return tied_logits_case("greedy")


def decode_case(case, seed):
    session = replace(case, sampling=replace(case.sampling, seed=seed)).open()
    list(Sps(SpsParams(length=5)).generate(session))
    return session


def test_an_oracle_is_not_audited_where_there_is_no_vanilla_output():
    subject = AuditSubject.from_method("sps", Sps)
    promising = {rule: [p.length for p in subject.lossless_params(rule)] for rule in get_args(Rule)}
    known = {rule for rule, lengths in promising.items() if "oracle" in lengths}
    assert known == {"greedy", "coupled"}


def test_the_tree_size_is_limited_so_that_all_outcomes_can_be_enumerated():
    subject = AuditSubject.from_method("eagle2", registry.load("eagle2"))
    walked = [
        format_params(params) for params in subject.lossless_params("rejection", few_outcomes=True)
    ]
    assert "nodes=4 depth=2 width=2" in walked


def test_variants_respect_the_bounds_of_a_parameter():
    class Params(MethodParams):
        length: int = Field(8, ge=4)
        often: bool = False

    class Bounded(Method):
        name = "bounded"

    Bounded.Params = Params
    variants = AuditSubject.from_method("bounded", Bounded).variants
    assert {params.length for params in variants} == {8}
    assert {params.often for params in variants} == {True, False}


class Lossy(registry.load("sps")):
    """Method without a guarantee."""

    name = "lossy"

    def guarantee(self, sampling):
        return "quality_only"


def test_a_method_without_a_guarantee_is_checked_for_conduct_only():
    subject = AuditSubject("lossy", Lossy, (SpsParams(length=2),))
    found = run_checks(subject, TABLE_CHECKS)
    assert {finding.check for finding in found} == {
        "declarations",
        "states",
        "counters",
        "clock",
        "twin draft",
        "useless draft",
    }
    assert certify(subject, found, 0.0).verdict == "NO CLAIM"


@dataclass(frozen=True)
class Upside(Threshold):
    """Accept rule whose stricter version accepts more tokens."""

    @property
    def stricter(self):
        return replace(self, epsilon=self.epsilon / 8)


class UpsideDown(registry.load("sps")):
    """Method with that accept rule."""

    accept = Upside(0.4)


def test_a_stricter_threshold_that_accepts_more_is_found():
    subject = AuditSubject("upside", UpsideDown, (SpsParams(length=3),))
    (found,) = (each for each in check_bookkeeping(subject) if each.check == "counters")
    assert not found.passed and "though it must accept every token" in found.problem.what


def test_an_off_position_that_is_not_exact_is_misdeclared():
    class NotOff(registry.load("lenient")):
        exact_params: ClassVar = {"factor": 0.9}

    (found,) = check_declarations(AuditSubject.from_method("lenient", NotOff))
    assert not found.passed and "the declaration `off`" in found.problem.what
    assert "the method promises quality_only" in found.problem.what


@pytest.mark.parametrize(
    ("check", "verdict"),
    [
        ("distribution", "BROKEN"),
        ("tokens", "BROKEN"),
        ("states", "FAULTY"),
        ("twin draft", "FAULTY"),
    ],
)
def test_the_verdict_is_broken_if_the_output_can_be_wrong(check, verdict):
    subject = AuditSubject.from_method("sps", registry.load("sps"))
    finding = Finding(check, False, {}, Problem("what", "where", "look"))
    certificate = certify(subject, [finding], 1.0)
    assert (certificate.verdict, certificate.passed) == (verdict, False)


def test_an_engine_error_is_reported_in_its_own_words():
    class Malformed(Sps):
        def propose(self, session, limit):
            raise MethodFault("a draft of nonsense", hint="propose sense")

    subject = AuditSubject("sps", Malformed, (SpsParams(length=2),))
    (found,) = run_checks(subject, {"tokens": TABLE_CHECKS["tokens"]})
    assert not found.crashed
    assert "a draft of nonsense" in found.problem.what
    assert found.problem.look == "propose sense"


def test_a_draft_that_does_not_use_the_coupled_noise_is_no_fault():
    class Alone(Sps):
        def propose(self, session, limit):
            if session.sampling.rule != "coupled" or not limit:
                return super().propose(session, limit)
            out = self.model.forward(session.pending_tokens(self.state.length()), self.state)
            return session.chain([int(out.logits[0, -1].argmax())])

    subject = AuditSubject("sps", Alone, (SpsParams(length=2),))
    twin, mixed, useless = check_bounds(subject)
    assert twin.passed
    assert mixed.passed
    assert useless.passed


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(1, 0, -1), (2, 1, 0)], None),
        ([(1, 0, -1), (9, 1, 0)], "row 1 has token 9 where the text has 2"),
        ([(1, 0, -1), (2, 2, 0)], "row 1 was computed at position 2"),
        ([(1, 0, -1)] * 4, "4 rows for 3 committed tokens"),
    ],
)
def test_state_rows_at_wrong_positions_are_named(rows, message):
    state = TableState(8)
    state.append([CachedRow(*row) for row in rows])
    assert find_wrong_rows(state, (1, 2, 3)) == message


def test_a_case_describes_itself():
    (case, *_) = enumerated_cases("rejection", include_costly=False)
    assert isinstance(case, Case)
    text = "near tables of 3 tokens, rejection T=2 top-k 2, budget 6, after 1 0 2 1 0"
    assert str(case) == text
