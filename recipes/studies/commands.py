"""Commands of `python -m recipes.studies`."""

from recipes.command_line import create_app
from recipes.studies.compare import compare
from recipes.studies.grid import grid
from recipes.studies.scaling import scaling

app = create_app(
    "Compare heads, and measure how acceptance grows with training and size.",
    {
        "compare": (
            compare,
            "Example: [bold]python -m recipes.studies compare medusa hydra --tokens 2000000 --out"
            " heads[/bold] (for the shipped target; minutes per head) - [bold]--smoke[/bold]"
            " (seconds, no download)",
        ),
        "grid": (
            grid,
            "Examples: [bold]python -m recipes.studies grid --out grid[/bold] (45 drafts for the"
            " shipped target: hours; it can be stopped and resumed) - [bold]python -m"
            " recipes.studies grid --tokens 0.1M,0.3M,1M --layers 1,2 --out grid[/bold] - then"
            " [bold]python -m recipes.studies scaling grid[/bold]",
        ),
        "scaling": (
            scaling,
            "Example: [bold]python -m recipes.studies scaling grid --at tokens=30M --out law"
            "[/bold]",
        ),
    },
)
