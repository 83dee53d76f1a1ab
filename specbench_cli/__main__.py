"""The program, by its name and as `python -m specbench_cli`.

Ctrl-C while it is still being imported ends it as quietly as later on. No garbage is looked for in
what is imported: it all stays, and a tenth of the time of a light command would go there.
"""

import gc
import os
import signal
from types import FrameType
from typing import NoReturn

from specbench_cli.errors import ExitCode


def main() -> NoReturn:
    """Run the command line, see `app.main`."""
    # Every Python that this process starts, by whichever library: no module is imported from the
    # working folder, which may be anybody's.
    os.environ["PYTHONSAFEPATH"] = "1"
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else it is ignored, or somebody else's
        signal.signal(signal.SIGINT, _leave)
    gc.disable()
    from specbench_cli import app

    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, before)
    app.main()


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """End at once: there is nothing yet that could be lost."""
    os.write(2, b"error: interrupted\n")
    os._exit(ExitCode.INTERRUPTED)


if __name__ == "__main__":
    main()
