"""Entry point of `python -m recipes.studies`."""

from recipes.command_line import main
from recipes.studies.commands import app

if __name__ == "__main__":
    main(app, "recipes.studies")
