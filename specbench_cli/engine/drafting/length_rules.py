"""The rule for a chain's length that a method's parameters select."""

from __future__ import annotations

from functools import partial

from specbench_cli.engine.drafting.length_params import LengthParams
from specbench_cli.engine.drafting.lengths import (
    AcceptanceHead,
    Confidence,
    Entropy,
    Fixed,
    Heuristic,
    Length,
    Oracle,
    Predictor,
)
from specbench_cli.engine.drafting.smartspec import SmartSpec
from specbench_cli.engine.drafting.synergy import Synergy
from specbench_cli.engine.models.meter import Metered
from specbench_cli.engine.session import Session
from specbench_cli.errors import MethodFault


def rule_of(
    params: LengthParams,
    session: Session,
    predict: Predictor | None = None,
    *,
    model: Metered | None = None,
) -> Length:
    """The length that a method's parameters ask for.

    Args:
        predict: a trained head, for "acceptance-head".
        model: what drafts, for rules that ask what its forwards cost.
    """
    most, threshold = params.max, params.threshold
    match params.length:
        case "heuristic":
            return Heuristic(most)
        case "confidence":
            return Confidence(session, most, threshold)
        case "entropy":
            return Entropy(session, most, threshold)
        case "oracle":
            return Oracle(session, most)
        case "acceptance-head":
            if predict is None:
                raise MethodFault("length 'acceptance-head' needs a trained head")
            return AcceptanceHead(session, most, threshold, predict)
        case "synergy" | "smartspec":
            if model is None:
                raise MethodFault(f"length {params.length!r} needs to know which model drafts")
            rule = Synergy if params.length == "synergy" else SmartSpec
            draft = partial(session.harness.drafting_cost, model)
            return rule(session, most, params.acceptance, session.harness.step_cost, draft)
        case length:
            return Fixed(length)
