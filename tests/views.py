"""A view of runs for tests that look at their records alone."""


class Silent:
    """A view that shows nothing."""

    def flags(self):
        return []

    def __getattr__(self, name):
        return lambda *_: None
