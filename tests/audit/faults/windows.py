"""Prepared windows with one thing wrong: what the audit must catch."""

from specbench_cli.engine.workers.rollouts import Rollouts

_settle, _take = Rollouts.settle, Rollouts._take


def for_another_token(self, stand, token, limit):
    """Takes the window of whatever token was thought to follow as many that stand."""
    likeliest = next((at for (place, _), at in self._branches.items() if place == stand), None)
    if likeliest is not None:
        self._branches.setdefault((stand, token), likeliest)
    return _settle(self, stand, token, limit)


def likeliest_last(self, stand, branch):
    """Ends a prepared window with the likeliest token, as if it had been drawn."""
    _take(self, stand, branch)
    _, q = self._picks[-1]
    if q is not None:
        self._picks[-1] = (q.argmax(-1), q)
