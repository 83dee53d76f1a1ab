"""Controls: methods that a run adds to interpret a lossy method, unless `--controls none` is given.

- The draft model alone shows the quality without the target.
- The lossless method with the same drafts shows the speed without a loss of quality.
- A random control accepts tokens (or whole reasoning steps) at random, as often as the lossy
  method. It shows whether the method's rule selects them better than chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from specbench_cli import registry
from specbench_cli.config.run import MethodChoice, RunConfig
from specbench_cli.plan.method_run import get_acceptance_source
from specbench_cli.store.schema import BASELINE, LOSSLESS

if TYPE_CHECKING:
    from specbench_cli.engine.method import Method

DRAFT_ALONE, RANDOM, PLAIN = "draft-alone", "random-accept", "sps"


def is_control(method: Method) -> bool:
    """Return True if a method is a control (see the description of this module)."""
    from specbench_cli.engine.segments.rules import SegmentParams
    from specbench_cli.engine.verify.accept import RandomAccept

    coin = isinstance(method.params, SegmentParams) and method.params.random_rule is not None
    return method.control or coin or isinstance(method.accept, RandomAccept)


def add_controls(config: RunConfig) -> RunConfig:
    """Return the settings of a run with controls added for each lossy method.

    A tuned run gets no controls, because the final parameters of its methods are not known yet.
    """
    if config.controls == "none" or config.tune is not None:
        return config
    rows = list(config.methods)
    built = {row.label: registry.declare(row.name, row.params) for row in rows}
    for row in config.methods:
        method = built[row.label]
        if method.peer or is_control(method) or method.guarantee(config.rule) in LOSSLESS:
            continue
        for name, control_label, params in _controls_for(row, method, config):
            control = registry.declare(name, params)
            if any(_is_control_row(control, name, other, built[other.label]) for other in rows):
                continue
            label = control_label
            while label in built:
                label += " (control)"
            rows.append(MethodChoice(name=name, label=label, params=dict(params)))
            built[label] = control
    return config.model_copy(update={"methods": rows})


def _controls_for(
    row: MethodChoice, method: Method, config: RunConfig
) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield the method name, label and parameters of each control of a lossy method."""
    from specbench_cli.engine.segments.rules import SegmentParams
    from specbench_cli.engine.verify.accept import AcceptParams

    if "draft" in method.requirements:
        yield DRAFT_ALONE, DRAFT_ALONE, {}
    foreign = row.name not in registry.built_in_methods() and config.isolation == "process"
    rated = method.accept is not None and config.executor == "local" and not foreign
    random = f"random for {row.label}"
    if isinstance(method.params, AcceptParams):
        rest = {k: v for k, v in row.params.items() if k not in AcceptParams.model_fields}
        yield row.name, f"{row.name} exact", rest
        if rated:
            yield row.name, random, {**rest, "accept": "random", "like": row.label}
    elif isinstance(method.params, SegmentParams):
        yield PLAIN, PLAIN, {}
        if rated:
            yield row.name, random, {**row.params, "like": row.label}
    elif method.lossless_counterpart is not None:
        yield (
            method.lossless_counterpart,
            method.lossless_counterpart,
            _shared_params(method, method.lossless_counterpart),
        )
        if rated:
            yield RANDOM, random, {**_shared_params(method, RANDOM), "like": row.label}


def _shared_params(method: Method, other: str) -> dict[str, Any]:
    """Return the parameters for drafting that two methods have in common.

    Args:
        method: The method whose values are returned.
        other: Name of the other method.
    """
    from specbench_cli.engine.verify.accept import AcceptParams

    known = type(registry.declare(other, {}).params).model_fields.keys()
    shared = known - method.exact_params.keys() - AcceptParams.model_fields.keys()
    return {name: value for name, value in dict(method.params).items() if name in shared}


def _is_control_row(control: Method, name: str, other: MethodChoice, method: Method) -> bool:
    """Return True if a method that the user chose already serves as this control.

    A random control with a fixed acceptance rate serves as the random control too.
    """
    if other.name != name or other.label == BASELINE:
        return False
    if get_acceptance_source(control) is not None:
        return is_control(method) and get_acceptance_source(method) in (
            None,
            get_acceptance_source(control),
        )
    return bool(method.params == control.params)
