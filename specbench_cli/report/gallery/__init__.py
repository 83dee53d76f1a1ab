"""A gallery of finished runs as static pages: a leaderboard and one page per run."""
