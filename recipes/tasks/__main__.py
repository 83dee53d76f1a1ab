"""Write a generated task, `mini` if none is named, to standard output as JSON lines."""

import argparse
import sys

from recipes.tasks.rows import TASKS, lines

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", nargs="?", choices=TASKS, default="mini")
    sys.stdout.writelines(f"{line}\n" for line in lines(parser.parse_args().task))
