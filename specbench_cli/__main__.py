"""Entry point of `specbench` and `python -m specbench_cli`.

Ctrl-C during the imports ends the program without a traceback. Garbage collection is disabled
during the imports, because imported objects stay alive anyway. This saves a tenth of a fast
command's time.
"""

import gc
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from specbench_cli.errors import ExitCode


def main() -> NoReturn:
    """Run the command line of specbench and exit."""
    # Do not let child processes import modules from the working folder, whose files may come from
    # another person.
    os.environ["PYTHONSAFEPATH"] = "1"
    _leave_out_working_folder()
    before = signal.getsignal(signal.SIGINT)
    if (
        before is signal.default_int_handler
    ):  # otherwise the signal is ignored, or has another handler
        signal.signal(signal.SIGINT, _leave)
    gc.disable()
    from specbench_cli import app

    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, before)
    app.main()


def _leave_out_working_folder() -> None:
    """Remove the working folder from `sys.path`. `python -m` has added it.

    The folder may contain files from another person, e.g. a malicious `yaml.py`. The folder is kept
    if
    specbench itself is in it, as in a checkout of the repository.
    """
    try:
        here = os.getcwd()  # noqa: PTH109 (importing pathlib could load a file of that folder)
    except OSError:  # the folder was removed
        return
    if sys.path[:1] == [here] and here != __file__.removesuffix("/specbench_cli/__main__.py"):
        del sys.path[0]


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """Exit at once after Ctrl-C during the imports. No work has been done yet."""
    os.write(2, b"error: interrupted\n")
    os._exit(ExitCode.INTERRUPTED)


if __name__ == "__main__":
    main()
