"""Entry point of `specbench` and `python -m specbench_cli`.

Ctrl-C during the imports ends the program without a traceback. The garbage collector is off during
the imports: all imported objects stay alive, and collecting would take a tenth of a light command's
time.
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
    # Child processes must not import modules from the working folder, which may be another
    # person's.
    os.environ["PYTHONSAFEPATH"] = "1"
    _leave_out_working_folder()
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else it is ignored, or another program set it
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
    """Exit immediately. Nothing can be lost yet."""
    os.write(2, b"error: interrupted\n")
    os._exit(ExitCode.INTERRUPTED)


if __name__ == "__main__":
    main()
