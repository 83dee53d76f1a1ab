"""`python tests/mutation`: see `command.py`."""

from command import main

main()
