"""How every process of a run begins and ends: one form of log lines, one exit code for each kind of error."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from prl import sockets
from prl.errors import PrlError

log = logging.getLogger(__name__)


def start_logging() -> None:
    """To standard error, which the launcher keeps as the role's log."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)


def run(name: str, body: Callable[[], int]) -> NoReturn:
    """Run `body` to its end and exit with the code it returns. Threads that still compute do not hold the exit up."""
    start_logging()
    started = time.monotonic()
    code = 1
    try:
        code = body()
    except PrlError as error:
        log.error("%s", error)
        code = error.exit_code
    except Exception:
        log.exception("%s failed", name)
    log.info("%s ended with exit code %d after %.1f s", name, code, time.monotonic() - started)
    sockets.let_go()  # the last answer, to SHUTDOWN, is still on its way
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
