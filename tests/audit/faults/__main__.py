"""Self-test of the audit: plants every known fault and prints which check caught it, and by how
much.

    python -m tests.audit.faults

Exit code 1 if a fault is not caught.
"""

from specbench_cli import output
from tests.audit.faults.selftest import self_test

if __name__ == "__main__":
    found = list(self_test())
    output.rows([caught.facts() for caught in found])
    output.note(f"{sum(caught.caught for caught in found)} of {len(found)} faults caught")
    raise SystemExit(not all(caught.caught for caught in found))
