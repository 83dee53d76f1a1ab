"""Creation of the draft length rule that a method's parameters select."""

from __future__ import annotations

from functools import partial

from specbench_cli.engine.drafting.length_params import LengthParams
from specbench_cli.engine.drafting.lengths import (
    AcceptanceHeadLength,
    ConfidenceLength,
    EntropyLength,
    FixedLength,
    HeuristicLength,
    Length,
    OracleLength,
    Predictor,
)
from specbench_cli.engine.drafting.smartspec import SmartSpecLength
from specbench_cli.engine.drafting.synergy import SynergyLength
from specbench_cli.engine.models.meter import Metered
from specbench_cli.engine.session import Session
from specbench_cli.errors import MethodFault


def create_length_rule(
    params: LengthParams,
    session: Session,
    predict: Predictor | None = None,
    *,
    model: Metered | None = None,
) -> Length:
    """Return the draft length rule that a method's parameters select.

    Args:
        predict: A trained head that predicts acceptance, for the rule "acceptance-head".
        model: The draft model, for rules that use the time of its forwards.
    """
    most, threshold = params.max, params.threshold
    match params.length:
        case "heuristic":
            return HeuristicLength(most)
        case "confidence":
            return ConfidenceLength(session, most, threshold)
        case "entropy":
            return EntropyLength(session, most, threshold)
        case "oracle":
            return OracleLength(session, most)
        case "acceptance-head":
            if predict is None:
                raise MethodFault("length 'acceptance-head' needs a trained head")
            return AcceptanceHeadLength(session, most, threshold, predict)
        case "synergy" | "smartspec":
            if model is None:
                raise MethodFault(f"length {params.length!r} needs the draft model (`model`)")
            rule = SynergyLength if params.length == "synergy" else SmartSpecLength
            draft = partial(session.harness.drafting_cost, model)
            return rule(session, most, params.acceptance, session.harness.step_cost, draft)
        case length:
            return FixedLength(length)
