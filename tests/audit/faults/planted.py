"""List of known faults: methods and engine functions with one thing wrong.

They show that the audit can fail. Most of them occurred in published code. Those of the second half
leave every output exact, but cost speed or falsify counters.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from methods.eagle.method import Eagle, EagleParams
from methods.medusa.method import MedusaParams
from methods.mirror import Mirror, MirrorParams
from methods.mtp.method import Mtp, MtpParams
from methods.pearl import PearlParams
from methods.pld import PldParams
from methods.sps import Sps, SpsParams
from methods.sps_tree import SpsTree, SpsTreeParams
from methods.stand import StandParams
from specbench_cli.audit.subject import AuditSubject
from specbench_cli.engine import scoring
from specbench_cli.engine.batch import Batch
from specbench_cli.engine.drafting.levels import Levels
from specbench_cli.engine.method import Method
from specbench_cli.engine.models.head import FeatureCache
from specbench_cli.engine.models.state import RecurrentState
from specbench_cli.engine.scoring import Scoring
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Harness, Session
from specbench_cli.engine.verify import chain as verify
from specbench_cli.engine.verify import decide, sampling, verifier
from specbench_cli.engine.verify import siblings as verify_tree
from specbench_cli.engine.verify.choosing import Chooser
from specbench_cli.engine.verify.grammar import RequestGrammarMask
from specbench_cli.engine.verify.random import SeededRandom
from specbench_cli.engine.workers.rollouts import Rollouts
from tests.audit.faults import (
    clock,
    distributions,
    engine,
    late,
    learning,
    methods,
    parallel,
    trees,
    windows,
)


@dataclass(frozen=True)
class Fault:
    """Fault and the check that must catch it.

    Attributes:
        name: What is wrong.
        by: The name of the check.
        subject: The method to audit.
        planted: Context manager that replaces a function of the engine. Does nothing by default.
    """

    name: str
    by: str
    subject: AuditSubject
    planted: Callable[[], AbstractContextManager[Any]] = nullcontext


def _sps(method: type[Method] = Sps, length: int = 2) -> AuditSubject:
    return AuditSubject("sps", method, (SpsParams(length=length),))


def _lossy(method: type[Method] = Sps) -> AuditSubject:
    return AuditSubject("sps", method, (SpsParams(length=3, accept="threshold", epsilon=0.2),))


def _pld(method: type[Method], **params: Any) -> AuditSubject:
    return AuditSubject("pld", method, (PldParams(ngram=2, length=2, **params),))


def _tree(method: type[Method] = SpsTree, depth: int = 2, **params: Any) -> AuditSubject:
    """Return a tree method with two children per node."""
    shape = {"widths": (2,) * depth, "width": 2, "depth": depth}
    return AuditSubject("sps-tree", method, (SpsTreeParams(**shape, **params),))


def _mtp(method: type[Method] = Mtp) -> AuditSubject:
    return AuditSubject("mtp", method, (MtpParams(length=3),))


def _pearl(method: type[Method], window: int = 2) -> AuditSubject:
    return AuditSubject("pearl", method, (PearlParams(window=window),))


def _mirror(length: int) -> AuditSubject:
    return AuditSubject("mirror", Mirror, (MirrorParams(length=length, candidates=1),))


def _instead(owner: object, name: str, wrong: object) -> Callable[[], Any]:
    return lambda: patch.object(owner, name, wrong)


def _engine_fault(
    name: str,
    check: str,
    owner: object,
    function: str,
    wrong: object,
    subject: AuditSubject | None = None,
) -> Fault:
    """Return a fault that replaces a function of the engine, by default for `sps`."""
    return Fault(name, check, subject or _sps(), _instead(owner, function, wrong))


FAULTS: tuple[Fault, ...] = (
    _engine_fault("residual from p", "distribution", verify, "residual", engine.residual_from_p),
    Fault("softmax q with a greedy draft", "distribution", _sps(methods.GreedyDraft)),
    Fault("q without the temperature", "distribution", _sps(methods.UnwarpedDistribution)),
    Fault("unlikely draft tokens taken back", "distribution", _sps(methods.DropsTheUnlikely)),
    _engine_fault(
        "bonus from the unwarped distribution",
        "distribution",
        Chooser,
        "warp",
        engine.unwarped_bonus,
    ),
    _engine_fault(
        "bonus from a residual", "distribution", verify, "rejection", engine.residual_bonus
    ),
    _engine_fault(
        "one uniform for two tests", "distribution", verify, "rejection", engine.one_uniform
    ),
    _engine_fault(
        "accepted where p exceeds q", "distribution", verify, "rejection", engine.accept_more_likely
    ),
    _engine_fault("rows off by one", "distribution", verify, "rejection", engine.next_rows),
    _engine_fault(
        "one random number for all trials",
        "generator",
        SeededRandom,
        "bernoulli",
        engine.one_number,
        _sps(length=3),
    ),
    Fault("one generator for all prompts", "order", _sps(), engine.one_generator),
    _engine_fault(
        "EOS inside an accepted block missed", "tokens", StopRule, "truncate", engine.eos_last_only
    ),
    Fault("draft tokens emitted unverified at the end", "tokens", _sps(methods.EmitsUnverified)),
    Fault("output one token short", "tokens", _sps(methods.StopsShort)),
    Fault("padding that matches by luck", "tokens", _pld(methods.PadsItsDraft)),
    _engine_fault(
        "target state kept for a rejected token",
        "states",
        Session,
        "commit",
        engine.keeps_the_rejected,
    ),
    Fault("draft state kept for a rejected token", "states", _sps(methods.ForgetsNothing)),
    _engine_fault(
        "recurrent state not rolled back",
        "recurrent",
        RecurrentState,
        "_restore",
        engine.skips_rollback,
    ),
    _engine_fault(
        "tokens that a recurrent state lacks not fed again",
        "recurrent",
        Scoring,
        "_input_after_root",
        engine.reads_the_root_alone,
    ),
    Fault("draft positions off by one", "states", _sps(methods.OffByOne)),
    Fault("stale draft state", "states", _sps(methods.SkipsAToken)),
    Fault("bonus lost at full acceptance", "twin draft", _sps(methods.LosesTheBonus)),
    Fault(
        "noise of one position for all draft tokens",
        "twin draft",
        _sps(methods.DrawsForOnePosition),
    ),
    Fault("lookup one token late", "repeating text", _pld(methods.OneTokenLate)),
    Fault("index kept from the prompt before", "order", _pld(methods.KeepsItsIndex)),
    _engine_fault("q ignored", "acceptance", verify, "rejection", engine.ignores_q),
    Fault("untested levels counted as tested", "counters", _sps(methods.CountsAllAsTested)),
    Fault("draft not clipped to the budget", "tokens", _sps(methods.ExceedsTheBudget)),
    Fault(
        "p/q on the likeliest children",
        "distribution",
        _tree(trees.RatioOfTopK, 1, draw_mode="independent"),
    ),
    _engine_fault(
        "without replacement and no renormalising",
        "distribution",
        verify_tree,
        "remaining_distribution",
        trees.unnormalised,
        _tree(depth=1),
    ),
    _engine_fault(
        "several draws at one tree node",
        "distribution",
        verify_tree,
        "point_mass",
        trees.several_draws,
        _tree(depth=1, draw_mode="deterministic"),
    ),
    _engine_fault(
        "siblings tested against one distribution",
        "distribution",
        verify_tree,
        "multi_round",
        trees.against_one_distribution,
        _tree(depth=1, draw_mode="independent"),
    ),
    Fault(
        "wrong child order without replacement", "distribution", _tree(trees.OrderedBackwards, 1)
    ),
    _engine_fault(
        "tree positions by number, not by depth",
        "tokens",
        scoring,
        "build_tree_mask",
        trees.by_number,
        _tree(),
    ),
    _engine_fault(
        "tree rows kept from the front", "states", Session, "commit", trees.first_rows, _tree()
    ),
    Fault("children below the wrong parents", "twin draft", _tree(trees.WrongParents)),
    Fault("wrong child order: the worst first", "twin draft", _tree(trees.WorstFirst)),
    _engine_fault(
        "draft tree at positions one too high",
        "twin draft",
        Levels,
        "_reset",
        trees.one_too_high,
        _tree(),
    ),
    Fault("drafted rows of a head kept", "states", _mtp(trees.KeepsItsDraft)),
    Fault("rows of a head made of predicted features", "states", _mtp(trees.KeepsPredicted)),
    _engine_fault(
        "features one token late", "twin draft", FeatureCache, "read", trees.one_late, _mtp()
    ),
    _engine_fault(
        "features of rejected nodes",
        "states",
        FeatureCache,
        "keep",
        trees.first_features,
        AuditSubject("eagle", Eagle, (EagleParams(depth=2, nodes=6),)),
    ),
    Fault("pending drafts returned at the end", "tokens", _pearl(parallel.ReturnsUnverified, 4)),
    Fault(
        "one number for a window's first two",
        "distribution",
        _pearl(parallel.TestsTwoWithOneNumber),
    ),
    Fault("rows of rejected tokens in the drafter", "states", _pearl(parallel.DraftsFromStaleRows)),
    Fault("a drafter told of rejected tokens", "states", _pearl(parallel.SendsRejectedTokens)),
    Fault("a grammar passed over", "grammar", _sps(methods.DecidesForItself)),
    _engine_fault(
        "all nodes masked as the root",
        "grammar",
        RequestGrammarMask,
        "__call__",
        engine.masks_of_the_root,
    ),
    Fault("a lossy rule that calls itself exact", "tokens", _lossy(methods.CallsItselfExact)),
    _engine_fault(
        "relaxed tokens told as accepted",
        "counters",
        decide,
        "_list_origins",
        engine.all_accepted,
        _lossy(),
    ),
    _engine_fault(
        "an accept rule asked at the token's own row",
        "counters",
        verifier,
        "relaxed_mask",
        engine.accept_rule_one_row_late,
        _lossy(),
    ),
    _engine_fault(
        "a window prepared for another token",
        "states",
        Rollouts,
        "settle",
        windows.for_another_token,
        _mirror(length=2),
    ),
    _engine_fault(
        "rows of another sequence", "batch", Batch, "score", engine.logits_of_next_sequence
    ),
    Fault("one draft for all sequences", "batch", _sps(methods.DraftsForTheFirst)),
    _engine_fault(
        "noise of the first sequence for all of a batch",
        "batch",
        Batch,
        "prefill",
        engine.noise_of_the_first,
    ),
    _engine_fault(
        "a seat taken with the noise of who left it",
        "batch",
        Harness,
        "set_states",
        engine.noise_of_previous_sequence,
    ),
    Fault("states by place among those still decoded", "batch", _sps(methods.DraftsByPlace)),
    Fault("one state for all of a batch, kept for a run", "batch", _sps(methods.KeepsItsState)),
    Fault("outputs known from the pass before", "order", _sps(methods.UsesThePreviousPass)),
    _engine_fault("pass 2 drawn as pass 1", "generator", SeededRandom, "__init__", engine.one_pass),
    _engine_fault(
        "a prepared window that ends with the likeliest token",
        "generator",
        Rollouts,
        "_take",
        windows.likeliest_last,
        _mirror(length=1),
    ),
    Fault(
        "distributions of the version before", "distribution", _sps(learning.LearnsInTheMiddle, 1)
    ),
    Fault("learning while decoding", "order", _sps(learning.LearnsWhileDecoding)),
    Fault("learning writes to the target", "tokens", _sps(learning.TeachesTheTarget)),
    Fault("learning writes to the draft of all rows", "order", _sps(learning.TeachesAll)),
    # Wrong reports about a step.
    Fault(
        "a rejected tail left out of draft and levels",
        "counters",
        _sps(methods.ReportsOnlyAccepted),
    ),
    Fault("only what stands verified", "counters", _sps(methods.VerifiesOnlyMatchingTokens)),
    Fault("a bonus told as drafted", "counters", _sps(methods.DraftsTheBonusToo)),
    Fault("a tree told without its rejected nodes", "counters", _tree(methods.PrunesItsTree)),
    # Work that the clock does not see.
    Fault("clock begun again by the method", "states", _sps(clock.RestartsTheHarness)),
    Fault("clock restarted once all is drafted", "clock", _sps(clock.RestartsTheClock)),
    Fault("clock set back", "clock", _sps(clock.SetsTheClockBack)),
    Fault("all of the output foreseen in `start`", "clock", _sps(clock.KnowsTheOutput)),
    Fault("forwards behind the meter", "clock", _sps(clock.DraftsPastTheMeter)),
    Fault("a batch's forwards behind the meter", "clock", _sps(clock.DraftsInABatchPastTheMeter)),
    Fault("a head's forwards behind the meter", "clock", _mtp(clock.RunsItsHeadTwice)),
    Fault("a trained copy's module called while decoding", "clock", _sps(clock.CallsTheModule)),
    Fault("forwards struck out of the trace", "clock", _sps(clock.HidesForwards)),
    Fault("work in a background thread", "clock", _sps(clock.WorksInTheBackground)),
    Fault("two drafts at once in two threads", "clock", _sps(clock.DraftsInAThread)),
    Fault("work in a background process", "clock", _sps(clock.WorksInAProcess)),
    # Faults that small vocabularies, short drafts, first prompts and short texts do not show.
    Fault(
        "drawn from the top 10, q reported whole",
        "distribution",
        _sps(distributions.DrawsFromTen, 5),
    ),
    Fault(
        "drawn from the whole distribution, q of the top 50",
        "distribution",
        _sps(distributions.ReportsFifty, 5),
    ),
    Fault(
        "draft temperature 0.5, q at 1", "distribution", _sps(distributions.ColderThanReported, 5)
    ),
    _engine_fault(
        "top-p before top-k",
        "distribution",
        sampling,
        "warp_logits",
        distributions.top_p_first,
        _sps(length=1),
    ),
    _engine_fault(
        "top-p before top-k, coupled", "tokens", sampling, "warp_logits", distributions.top_p_first
    ),
    Fault(
        "q 10% wrong from the fifth level on",
        "distribution",
        _sps(distributions.WrongFromTheFifth, 5),
    ),
    Fault("q in half precision", "distribution", _sps(distributions.ReportsHalfPrecision, 5)),
    Fault("q cut and the draw not", "distribution", _sps(distributions.CutsOnlyWhatItReports)),
    Fault(
        "q of a tree's last level mixed up",
        "distribution",
        AuditSubject(
            "sps-tree",
            distributions.MixesUpTheLast,
            (SpsTreeParams(width=2, depth=5, draw_mode="independent"),),
        ),
    ),
    _engine_fault(
        "residual of the first 1,024 tokens",
        "distribution",
        verify,
        "residual",
        distributions.residual_of_the_first,
    ),
    Fault(
        "no tail in the draws where the threshold is off",
        "distribution",
        AuditSubject(
            "sps", distributions.SureIfUnlimited, (SpsParams(length="confidence", threshold=0.0),)
        ),
    ),
    Fault("bonus of the draft after 60 tokens", "tokens", _sps(clock.BonusOfTheDraft)),
    Fault("unverified in long texts", "tokens", _sps(clock.UnverifiedWhenLong)),
    Fault("a draft that loses long prompts", "states", _sps(clock.LosesAWindow)),
    Fault("other steps from the sixth prompt on", "order", _sps(clock.ForgetsFromTheSixth)),
    Fault("no drafts from the sixteenth prompt on", "order", _sps(clock.ForgetsFromTheSixteenth)),
    # Faults that act late, after a rejection, on ties, or on several nodes of one level.
    _engine_fault(
        "the third token tested with the first random number",
        "distribution",
        verify,
        "rejection",
        late.third_with_the_first_number,
        _sps(length=5),
    ),
    Fault(
        "q 10% wrong from the third token on, drawn twice",
        "distribution",
        _sps(late.DrawsOnceMore, 5),
    ),
    Fault("q 10% wrong for the fourth token alone", "distribution", _sps(late.WrongAtTheFourth, 5)),
    Fault("q 10% wrong after 40 tokens", "distribution", _sps(late.WrongWhenLong)),
    Fault(
        "q 10% wrong after an accepted and a rejected draft",
        "distribution",
        _sps(late.WrongAfterMixedSteps),
    ),
    Fault("q of another node of the level", "distribution", _tree(late.ReportsAnotherNodesQ)),
    Fault(
        "q of another node of the level, from n-grams",
        "distribution",
        AuditSubject("stand", late.StandReportsAnotherNodesQ, (StandParams(),)),
    ),
    Fault("a runner-up accepted after 40 tokens", "tokens", _sps(late.AcceptsRunnersUpLate)),
    Fault("ties accepted in greedy decoding", "tokens", _sps(late.AcceptsTies)),
    _engine_fault("ties cut off by top-k", "distribution", sampling, "warp_logits", late.no_ties),
    Fault(
        "features of the step before after a rejection",
        "mixed draft",
        AuditSubject("medusa", late.KeepsFeatures, (MedusaParams(nodes=4),)),
    ),
    Fault("a rejected token drafted again", "mixed draft", _sps(late.DraftsTheSameAgain)),
)
"""All known faults."""
