"""Write the task `mini` to standard output as JSON lines."""

import sys

from specbench_cli.tasks.generate import mini_lines

if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in mini_lines())
