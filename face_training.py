"""Start of `face`: the executable of the clone, and the console script of an installation, which works from any folder."""

import os
import sys
from pathlib import Path
from typing import NoReturn


def main() -> NoReturn:
    """Start the program that the command line names, and end with its status."""
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        # names of files, which become those of people, are UTF-8 here, whatever the locale, such as LANG=en_US, says
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    # `data`, `eval` and `utils` are general names: without this, a folder of the user's with such a name could win
    root = str(Path(__file__).resolve().parent)
    sys.path[:] = [root, *(path for path in sys.path if path != root)]
    from scripts.face import main as start
    from utils.machine import begin_imports, leave

    begin_imports()
    leave(start)


if __name__ == "__main__":
    main()
