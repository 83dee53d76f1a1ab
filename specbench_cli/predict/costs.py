"""Cost functions over a cost table, which a probe measured or a roofline made."""

from __future__ import annotations

from collections.abc import Sequence

from specbench_cli.engine.forward_cost import ForwardWork, SequenceRows
from specbench_cli.measure.costs import Costs


class TableCosts:
    """The time of a forward alone, without the host's work.

    A forward over several sequences costs what one over as many rows does, after the mean context
    of its rows. Prompts that are prefilled together by themselves cost what each does. A forward
    through part of a model costs its share.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs

    def __call__(self, work: ForwardWork) -> float:
        """Return nanoseconds."""
        curve = self.costs.curves[work.model]
        if all(each.prompt for each in work.rows):
            return work.share * sum(curve.prefill_ns(each.new) for each in work.rows)
        new, context = _totals(work.rows)
        return work.share * curve.ns(new, context, tree=work.tree, lone=work.warm)

    def covers(self, work: ForwardWork) -> bool:
        """Return True if the time is interpolated between the table's points, and not extrapolated
        beyond them."""
        new, context = _totals(work.rows)
        return self.costs.curves[work.model].covers(new, context, tree=work.tree)


class BatchCosts:
    """The time of a forward in a batch, with the host's work for it.

    The probe of batches (`BatchCost`) says what each further sequence adds and what the host does.
    Where none were probed, further sequences add nothing, and the host's work is a sequence's own.

    Attributes:
        forwards, extrapolated: How many forwards there were, prefills aside, and how many of them
            lie beyond the table's points.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.forwards = self.extrapolated = 0
        self._table = TableCosts(costs)

    def __call__(self, work: ForwardWork) -> float:
        """Return nanoseconds."""
        if all(each.prompt for each in work.rows):
            return self._table(work)
        self.forwards += 1
        self.extrapolated += not self._table.covers(work)
        return self._host_ns(work) + self._table(work)

    @property
    def batches_probed(self) -> bool:
        """Return True if the table says what sequences cost that are decoded together."""
        return self.costs.batch is not None

    def _host_ns(self, work: ForwardWork) -> float:
        """Return the host's work, and what further sequences add to the forward."""
        decoding = [each for each in work.rows if not each.prompt]
        nodes, batch = sum(each.new for each in decoding) - len(decoding), self.costs.batch
        if batch is None and work.model == "target":
            return self.costs.host_ns(nodes=nodes, steps=len(decoding))
        if batch is None:
            return self.costs.host_ns(drafts=len(decoding), steps=0)
        ns = batch.beside.get(work.model, 0.0) * (len(work.rows) - 1)
        if work.model == "target":
            return ns + (batch.step + batch.sequence * len(decoding) + batch.node * nodes)
        return ns + batch.draft * len(decoding)


def _totals(rows: Sequence[SequenceRows]) -> tuple[int, float]:
    """Return how many rows are new, and the mean of the rows before each of them."""
    if len(rows) == 1:
        return rows[0].new, rows[0].before
    new = sum(each.new for each in rows)
    return new, sum(each.new * each.before for each in rows) / new
