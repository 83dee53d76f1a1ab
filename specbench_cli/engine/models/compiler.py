"""Safe import of numba, without the configuration file of the working folder.

numba reads `.numba_config.yaml` in the working folder. That file can name a cache of compiled
functions, and numba unpickles this cache. So starting specbench in a folder from an untrusted
source could run arbitrary code.
"""

from __future__ import annotations

from pathlib import Path

from specbench_cli.errors import UsageError

_CONFIG = Path(".numba_config.yaml")

if _CONFIG.exists() or _CONFIG.is_symlink():
    raise UsageError(
        f"{_CONFIG} in this folder configures numba and could make it run code from this folder",
        "run specbench from another folder, or remove the file and use NUMBA_* variables instead",
    )

import numba  # noqa: E402
import numba.core.config  # noqa: E402

numba.core.config._config_fname = ""  # numba reads the file again at each compilation

__all__ = ["numba"]
