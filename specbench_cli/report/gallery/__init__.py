"""A gallery of finished runs as static pages: a leaderboard, and a page a run."""
