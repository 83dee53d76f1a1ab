"""Self-test of the audit: plant each known fault and print the check that caught it.

python -m tests.audit.faults

The exit code is 1 if a fault is not caught.
"""

from specbench_cli import output
from tests.audit.faults.selftest import self_test

if __name__ == "__main__":
    found = list(self_test())
    output.rows([caught.facts() for caught in found])
    output.note(f"{sum(caught.caught for caught in found)} of {len(found)} faults caught")
    raise SystemExit(not all(caught.caught for caught in found))
