"""Cost functions: the time of a forward, from a table that was measured or computed.

`specbench predict --probe` measures a table. A roofline model computes one (`accelerators`).
"""

from __future__ import annotations

from collections.abc import Sequence

from specbench_cli.engine.forward_cost import ForwardWork, SequenceRows
from specbench_cli.measure.costs import Costs


class TableCosts:
    """Cost function: returns the time of a forward, without the host's work, from a table.

    A forward over several sequences costs as much as one over the same number of rows (tokens) of
    one sequence, after the mean context of the sequences. A joint prefill of several prompts costs
    the sum of the single prefills. A forward through some layers of a model costs their share of
    the whole forward.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs

    def __call__(self, work: ForwardWork) -> float:
        """Return the time of a forward in ns."""
        curve = self.costs.curves[work.model]
        if all(each.prompt for each in work.rows):
            return work.share * sum(curve.prefill_ns(each.new) for each in work.rows)
        new, context = _totals(work.rows)
        return work.share * curve.ns(new, context, tree=work.tree, lone=work.warm)

    def covers(self, work: ForwardWork) -> bool:
        """Return True if the time is interpolated between the table's points, not extrapolated."""
        new, context = _totals(work.rows)
        return self.costs.curves[work.model].covers(new, context, tree=work.tree)


class BatchCosts:
    """Cost function: returns the time of a forward in a batch, including the host's work.

    The probe of batches (`BatchCost`) measures the cost of each further sequence and of the host.
    If no batches were probed, further sequences add nothing, and the host's work is that of single
    sequences.

    Attributes:
        forwards: number of calls so far, without prefills.
        extrapolated: number of these calls whose forward is outside the range of the table.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.forwards = self.extrapolated = 0
        self._table = TableCosts(costs)

    def __call__(self, work: ForwardWork) -> float:
        """Return the time of a forward in ns, the host's work included."""
        if all(each.prompt for each in work.rows):
            return self._table(work)
        self.forwards += 1
        self.extrapolated += not self._table.covers(work)
        return self._host_ns(work) + self._table(work)

    @property
    def batches_probed(self) -> bool:
        """True if the table has measured costs of batches."""
        return self.costs.batch is not None

    def _host_ns(self, work: ForwardWork) -> float:
        """Return the time in ns of the host's work and of further sequences in the forward."""
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
    """Return the number of new rows of all sequences, and the mean context before a new row."""
    if len(rows) == 1:
        return rows[0].new, rows[0].before
    new = sum(each.new for each in rows)
    return new, sum(each.new * each.before for each in rows) / new
