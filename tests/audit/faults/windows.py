"""Faulty versions of `Rollouts`, which prepares draft windows. The audit must catch them."""

from specbench_cli.engine.workers.rollouts import Rollouts

_settle, _take = Rollouts.settle, Rollouts._take


def for_another_token(self, accepted, token, limit):
    """Use the window prepared for another token after the same number of accepted tokens."""
    likeliest = next((at for (place, _), at in self._branches.items() if place == accepted), None)
    if likeliest is not None:
        self._branches.setdefault((accepted, token), likeliest)
    return _settle(self, accepted, token, limit)


def likeliest_last(self, accepted, branch):
    """End a prepared window with the most likely token, but report it as drawn."""
    _take(self, accepted, branch)
    _, q = self._picks[-1]
    if q is not None:
        self._picks[-1] = (q.argmax(-1), q)
