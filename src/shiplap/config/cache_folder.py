"""Where what was worked out once is kept for the next run."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """`shiplap` in `$XDG_CACHE_HOME`, or else in `~/.cache`. It need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shiplap"
