"""The runs of a matrix, one after another: several targets and drafts, one table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from specbench_cli.commands.running import one
from specbench_cli.config import permission
from specbench_cli.errors import SpecbenchError

if TYPE_CHECKING:
    from specbench_cli.config.run import RunConfig
    from specbench_cli.measure.result import Result
    from specbench_cli.measure.view import RunView
    from specbench_cli.plan.plan import Plan
    from specbench_cli.report.reading import Reading


def begin(asked: RunConfig, sources: Mapping[str, str], out: Path | None) -> Path:
    """The folder of a matrix that is begun; each of its runs can be planned."""
    from specbench_cli.measure.planning import dry
    from specbench_cli.plan.matrix import pairs
    from specbench_cli.store import matrix
    from specbench_cli.store.run_dir import new_path

    runs = pairs(asked)
    for each in runs.values():
        dry(each)  # what one of them lacks is said before another is measured
    path = out or new_path("matrix", asked.model_dump(mode="json"))
    order = {name: each.model_dump_json() for name, each in runs.items()}
    matrix.create(path, matrix.Order(order, sources))
    for each in runs.values():
        permission.permit(permission.requests(each, matrix.order_file(path)))
    return path


def carry_out(
    whole: Path, view: RunView, force: bool, in_turn: Path | None
) -> tuple[list[Result], Reading]:
    """Do what a matrix's runs lack, one run after another, and read them as one."""
    from specbench_cli.config.run import RunConfig
    from specbench_cli.measure import run as execute
    from specbench_cli.report import outputs
    from specbench_cli.report.reading import read_matrix
    from specbench_cli.store import matrix
    from specbench_cli.store.run_dir import RunDir

    order = matrix.ordered(whole)
    results: list[Result] = []
    try:
        for path in matrix.members(whole):
            plan: Plan | None
            fresh = not RunDir.holds_run(path)
            if fresh and order is not None:
                config = RunConfig.model_validate_json(order.runs[path.name])
                place = matrix.order_file(whole)
                permission.check(permission.requests(config, place), str(place))
                plan, run_dir = execute.start(config, order.sources, path, view)
            else:
                plan, run_dir = execute.reopen(path, view, force=force)
            made = one.measured(plan, run_dir, view, whole, force, in_turn, fresh=fresh)
            results.append(made)
            if plan is not None:
                one.written(path, view)
    except SpecbenchError:
        matrix.discard(whole)
        raise
    matrix.done(whole)
    reading = read_matrix(whole)
    outputs.write_into_run(reading, whole, ("csv", "md"))
    return results, reading
