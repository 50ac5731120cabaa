"""Command line of Perturn. It parses arguments, prints results and sets exit codes, which `perturn --help` lists."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from io import TextIOWrapper
from typing import NoReturn

from perturn.cli import (  # noqa: F401  each registers its commands
    credit_commands,
    export_commands,
    judge_commands,
    log_commands,
    loop_commands,
    measure_commands,
    score_commands,
    serve_commands,
    setup_commands,
    study_commands,
    view_commands,
)
from perturn.cli._base import STOPPED, app
from perturn.display.progress_bars import console as notices
from perturn.errors import PerturnError
from perturn.io.atomic_write import is_storage_error, storage_error
from perturn.io.plain_data import named_error, visible
from perturn.io.user_code import own_line
from perturn.train_processes import is_joined, leave

if os.name != "nt":
    import resource

ORDER = (
    *("run", "collect", "pair", "credit", "train", "evaluate", "serve", "report", "study", "import-expert"),
    *("init", "check-env", "check-credit", "check-judge", "convert", "import-logs"),
    *("measure", "inspect", "watch", "verify", "list", "export", "compare", "play"),
)
"""Order of the commands in `perturn --help`. The commands of the loop come first, in the order of its stages."""

_RESUMING = ("run", "collect", "pair", "credit", "train", "evaluate", "study", "measure")
"""Commands that resume what they were doing when they were stopped."""
_OPEN_FILES = 10240
"""Number of files that a command may open, if the system allows. macOS allows no more without an administrator."""

app.registered_commands.sort(key=lambda each: ORDER.index(str(each.name)))

__all__ = ["ORDER", "app", "main"]


def main() -> None:
    """Run the command line. Errors of Perturn and of the user's classes are printed in one line; the exit code is 2."""
    if os.name == "nt":
        _say("Windows is not supported; use WSL2, with the clone and runs/ in its Linux file system.")
        _fail()
    _allow_open_files()
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a Latin-1 terminal has no arrow
    try:
        app()
    except (PerturnError, OSError) as error:
        if isinstance(error, OSError) and is_storage_error(error):
            error = storage_error(error.filename or "a file", error)
        notices.quiet = False  # of several processes, this may be the only one that failed
        _say(str(error))
        _fail()
    except (KeyboardInterrupt, SystemExit) as ended:
        if getattr(ended, "code", STOPPED) != STOPPED:
            raise
        name = "".join(sys.argv[1:2])
        if name not in ("play", "serve"):  # they print their own last line
            notices.print("stopped" + "; the same command goes on from here" * (name in _RESUMING))
        raise SystemExit(STOPPED) from None
    except Exception as error:
        if not (line := own_line(error)):
            if is_joined():
                traceback.print_exc()
                leave(1)
            raise
        notices.quiet = False
        _say(f"{named_error(error)}{line}; correct this line.")
        _fail()


def _allow_open_files() -> None:
    """Raise the soft limit on open files, which is 256 on macOS. Each agent and each world opens several."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _fail() -> NoReturn:
    """Exit with code 2; one of several training processes does not wait for the others."""
    if is_joined():
        leave(2)
    raise SystemExit(2) from None


def _say(text: str) -> None:
    """Print the text of an error."""
    said = f"error: {visible(text)}".encode("utf-8", "backslashreplace").decode()
    notices.print(said, style="red", markup=False, soft_wrap=True)
