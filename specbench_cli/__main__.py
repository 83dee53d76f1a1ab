"""The program, by its name and as `python -m specbench_cli`.

Ctrl-C while it is still being imported ends it as quietly as later on. No garbage is looked for in
what is imported: it all stays, and a tenth of the time of a light command would go there.
"""

import gc
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from specbench_cli.errors import ExitCode


def main() -> NoReturn:
    """Run the command line, see `app.main`."""
    # Every Python that this process starts, by whichever library: no module is imported from the
    # working folder, which may be anybody's.
    os.environ["PYTHONSAFEPATH"] = "1"
    _leave_out_working_folder()
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else it is ignored, or somebody else's
        signal.signal(signal.SIGINT, _leave)
    gc.disable()
    from specbench_cli import app

    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, before)
    app.main()


def _leave_out_working_folder() -> None:
    """Remove the working folder from `sys.path`, where `python -m` puts it.

    Another person's folder could contain a `yaml.py`, or methods as entry points. A checkout that
    is run without installation keeps its folder.
    """
    try:
        here = os.getcwd()  # noqa: PTH109 (pathlib could be imported from there)
    except OSError:  # the folder was removed
        return
    if sys.path[:1] == [here] and here != __file__.removesuffix("/specbench_cli/__main__.py"):
        del sys.path[0]


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """End at once: there is nothing yet that could be lost."""
    os.write(2, b"error: interrupted\n")
    os._exit(ExitCode.INTERRUPTED)


if __name__ == "__main__":
    main()
