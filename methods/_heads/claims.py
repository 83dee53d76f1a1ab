"""What the authors of EAGLE report in the figures of their repository."""

from specbench_cli.api import Claim


def reported(*figures: tuple[str, str]) -> tuple[Claim, ...]:
    """Claims of (target, speedup as printed): on MT-bench, greedy."""
    return tuple(
        Claim(
            speedup=speedup,
            models=target,
            task="MT-bench",
            temperature=0,
            source="figure in github.com/SafeAILab/EAGLE",
        )
        for target, speedup in figures
    )
