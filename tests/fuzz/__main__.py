"""`python tests/fuzz`: see `search.py`."""

from search import main

main()
