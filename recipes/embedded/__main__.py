"""Entry point of `python -m recipes.embedded`."""

from recipes.command_line import main
from recipes.embedded.commands import app

if __name__ == "__main__":
    main(app, "recipes.embedded")
