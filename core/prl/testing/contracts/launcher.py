"""The contract of a launcher: it executes a plan to its end and tells, by its exit code, how that was.

The plans are a few Python one-liners. A launcher that hands the plan to somebody else (a cluster) raises
`prl.errors.EnvironmentNotFit` where that is not to be had, and its checks are skipped.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from prl.plan import Plan, Role
from prl.protocols import Launcher
from prl.rundir import RunDir

Make = Callable[[], Launcher]
LIMIT_S = 60

SLEEP = "import time; time.sleep(120)"


def it_runs_every_role_to_the_end_of_the_main_ones(make: Make) -> None:
    """Arguments and environment are filled in, output is logged, and the services do not outlive the run."""
    with run_directory() as run_dir:
        note = "import os, sys; from pathlib import Path; Path(sys.argv[1], sys.argv[2]).write_text"
        waits = "import time\nwhile len(list(Path(sys.argv[1]).glob('service-*'))) < 2: time.sleep(0.02)\n"
        main = f"{note}(os.environ['COLOUR'])\n{waits}print('main is done')"
        service = f"{note}(str(os.getpid())); {SLEEP}"
        code = _execute(
            make,
            run_dir,
            _role("controller", main, "{run_dir}", "main-{replica}", purpose="main", env={"COLOUR": "green"}),
            _role("helper", service, "{run_dir}", "service-{replica}", replicas=2),
        )
        assert code == 0, f"every main role ended well, the exit code is {code}"
        assert (run_dir.path / "main-0").read_text() == "green", "a role did not get its environment"
        assert "main is done" in run_dir.log("controller", 0).read_text(), "a role's output is not in its log"
        for path in (run_dir.path / "service-0", run_dir.path / "service-1"):
            assert _gone(int(path.read_text())), f"{path.name} still runs after the end of the run"


def a_failing_main_role_fails_the_run(make: Make) -> None:
    for expected in (3, 75):
        with run_directory() as run_dir:
            code = _execute(
                make,
                run_dir,
                _role("controller", f"raise SystemExit({expected})", purpose="main"),
                _role("helper", SLEEP),
            )
            assert code == expected, f"the main role ended with {expected}, the run with {code}"


def a_service_that_ends_too_early_fails_the_run(make: Make) -> None:
    """Even with exit code 0: somebody still needs it."""
    with run_directory() as run_dir:
        started = time.monotonic()
        code = _execute(make, run_dir, _role("controller", SLEEP, purpose="main"), _role("helper", "pass"))
        assert code not in (0, None), f"a service ended while it was needed, and the run ended with {code}"
        assert time.monotonic() - started < LIMIT_S / 2, "it took long to notice that a service had ended"


def a_service_is_started_again_as_often_as_it_may(make: Make) -> None:
    with run_directory() as run_dir:
        count = "import sys, time; from pathlib import Path; marks = Path(sys.argv[1])\n"
        tries = f"{count}n = len(list(marks.glob('try-*'))); (marks / f'try-{{n}}').touch()\n"
        service = f"{tries}if n == 0: raise SystemExit(1)\n"
        main = f"{count}while not (marks / 'try-1').exists(): time.sleep(0.02)\n"
        code = _execute(
            make,
            run_dir,
            _role("controller", main, "{run_dir}", purpose="main"),
            _role("helper", f"{service}time.sleep(120)", "{run_dir}", restart="on_failure"),
        )
        assert code == 0, f"a service failed once and may be restarted, the run ended with {code}"


# --- helpers ----------------------------------------------------------------------------------------------


@contextmanager
def run_directory() -> Iterator[RunDir]:
    with tempfile.TemporaryDirectory(prefix="prl-launcher-") as folder:
        path = Path(folder) / "run"
        path.mkdir()
        yield RunDir(path)


def _role(name: str, code: str, *arguments: str, **fields: object) -> Role:
    return Role(name, (sys.executable, "-c", code, *arguments), **fields)  # type: ignore[arg-type]


def _execute(make: Make, run_dir: RunDir, *roles: Role) -> int:
    plan = Plan(run_id=run_dir.name, run_dir=str(run_dir.path), roles=roles)
    with _limit():
        return make().run(plan, run_dir)


@contextmanager
def _limit() -> Iterator[None]:
    """A launcher that never returns fails its check. Signals reach the main thread only: elsewhere it is unlimited."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expired(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"the run did not end within {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return True  # the number is somebody else's by now
    return False


CHECKS = [
    it_runs_every_role_to_the_end_of_the_main_ones,
    a_failing_main_role_fails_the_run,
    a_service_that_ends_too_early_fails_the_run,
    a_service_is_started_again_as_often_as_it_may,
]
