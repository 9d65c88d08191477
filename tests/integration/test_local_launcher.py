"""The local launcher with tiny real processes: how a run ends, what it says, and that nothing survives."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from prl.errors import UsageError
from prl.plan import LaunchState, Plan, Role
from prl.rundir import RunDir
from prl_launchers import local
from prl_launchers.config import LocalConfig
from prl_launchers.local import LocalLauncher

CONFIG = LocalConfig(grace_s=5, role_grace_s=2, backoff_s=0.01)
SLEEP = "import time; time.sleep(60)"
ONCE_UP = """\
import pathlib, sys, time
while not (pathlib.Path(sys.argv[1]) / "control/socket").exists(): time.sleep(0.02)
"""


@pytest.fixture(autouse=True)
def _settle_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "SETTLE_S", 0.3)


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", textwrap.dedent(code), "{run_dir}", "{replica}")


def controller(code: str) -> Role:
    return Role("controller", python(code), purpose="main")


def service(name: str, code: str, *, max_restarts: int = -1, replicas: int = 1) -> Role:
    restart = "on_failure" if max_restarts >= 0 else "never"
    return Role(name, python(code), replicas=replicas, restart=restart, max_restarts=max(0, max_restarts))


def serving_controller(after: str, needed: str = "True") -> Role:
    """A controller that answers ROLE_EXITED, writes each as a line to run_dir/exits, then does `after` on the first."""
    return controller(f"""
        import asyncio, pathlib, sys
        from prl.launching import ROLE_EXITED, StillNeeded
        from prl.wire import Server
        run = pathlib.Path(sys.argv[1])
        async def main():
            done = asyncio.Event()
            def exited(peer, e):
                with (run / "exits").open("a") as f:
                    f.write(f"{{e.role}} {{e.replica}} {{e.code}} {{e.will_restart}}\\n")
                done.set()
                return StillNeeded({needed})
            (run / "control/token").write_text("t")
            server = Server("t", {{ROLE_EXITED: exited}})
            (run / "control/socket").write_text(server.start())
            await done.wait()
            {after}
        asyncio.run(main())
    """)


def launch(tmp_path: Path, *roles: Role, on_tick: Callable[[LaunchState], None] | None = None) -> tuple[int, RunDir]:
    run_dir = RunDir(tmp_path / "run")
    return LocalLauncher(CONFIG).run(Plan("run", str(run_dir.path), roles), run_dir, on_tick), run_dir


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)


# --- how a run ends ---------------------------------------------------------------------------------------


def test_a_run_is_over_when_its_main_role_is_and_services_are_stopped(tmp_path: Path) -> None:
    states: list[LaunchState] = []
    code, run_dir = launch(
        tmp_path,
        controller("import time; time.sleep(0.3)"),
        service("engine", SLEEP, replicas=2),
        on_tick=states.append,
    )
    assert code == 0
    assert [p.state for p in states[-1].processes] == ["ended"] * 3
    assert states[-1].phase == "ended"
    assert states[0].phase == "running"
    pids = {p.pid for s in states for p in s.processes if p.pid}
    assert len(pids) == 3
    assert not any(alive(pid) for pid in pids)
    assert list((run_dir.control / "pids").iterdir()) == []
    assert "=== " in run_dir.log("engine", 1).read_text()


def test_a_failing_main_role_gives_its_code_and_names_the_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, _ = launch(
        tmp_path,
        controller("import sys; print('ERROR loop: no progress', file=sys.stderr); sys.exit(3)"),
        service("engine", SLEEP),
    )
    assert code == 3
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "controller-0 ended with code 3: loop: no progress; see " in said
    assert "controller-0.log" in said


@pytest.mark.parametrize(
    ("script", "what"),
    [
        ("raise ValueError('bad weights')", "engine-0 ended with code 1: ValueError: bad weights; see "),
        ("pass", "engine-0 ended with code 0 although the run still needed it; see "),
        ("import os; os.kill(os.getpid(), 9)", "engine-0 was killed by SIGKILL"),
    ],
)
def test_a_service_that_ends_early_ends_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], script: str, what: str
) -> None:
    code, run_dir = launch(tmp_path, controller(SLEEP), service("engine", script))
    assert code == 1
    assert what in capfd.readouterr().err
    assert "controller-0 was killed by SIGTERM" in run_dir.log("launcher", 0).read_text()


def test_a_program_that_does_not_exist(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, _ = launch(tmp_path, controller(SLEEP), Role("engine", ("/no/such/program",)))
    assert code == 1
    assert "cannot start /no/such/program: No such file or directory" in capfd.readouterr().err


def test_a_service_is_restarted_within_its_budget(tmp_path: Path) -> None:
    crash_twice = """
        import pathlib, sys, time
        count = pathlib.Path(sys.argv[1]) / "count"
        n = int(count.read_text()) if count.exists() else 0
        count.write_text(str(n + 1))
        if n < 2: sys.exit(7)
        (pathlib.Path(sys.argv[1]) / "up").touch()
        time.sleep(60)
    """
    until_up = "import pathlib, sys, time\nwhile not (pathlib.Path(sys.argv[1]) / 'up').exists(): time.sleep(0.02)"
    code, run_dir = launch(tmp_path, controller(until_up), service("env-a", crash_twice, max_restarts=2))
    assert code == 0
    assert run_dir.log("env-a", 0).read_text().count("=== ") == 3


def test_a_service_that_keeps_crashing_uses_its_budget_up(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, run_dir = launch(tmp_path, controller(SLEEP), service("env-a", "raise KeyError('x')", max_restarts=2))
    assert code == 1
    assert "env-a-0 ended with code 1 (after 2 restarts): KeyError: 'x'" in capfd.readouterr().err
    assert run_dir.log("env-a", 0).read_text().count("=== ") == 3


@pytest.mark.parametrize(("given", "code"), [(2, 1), (3, 3)])
def test_a_service_that_would_end_the_same_way_again_is_not_tried_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], given: int, code: int
) -> None:
    script = f"import sys; print('ERROR prl: no such GPU', file=sys.stderr); sys.exit({given})"
    ended, run_dir = launch(tmp_path, controller(SLEEP), service("engine", script, max_restarts=2))
    assert ended == code
    assert f"engine-0 ended with code {given}: prl: no such GPU; see" in capfd.readouterr().err
    assert run_dir.log("engine", 0).read_text().count("=== ") == 1


def test_a_machine_that_is_not_fit_right_after_a_crash_may_be_so_later(tmp_path: Path) -> None:
    script = """
        import pathlib, sys
        count = pathlib.Path(sys.argv[1]) / "count"
        n = int(count.read_text()) if count.exists() else 0
        count.write_text(str(n + 1))
        sys.exit((1, 3, 3)[n])
    """
    code, run_dir = launch(tmp_path, controller(SLEEP), service("engine", script, max_restarts=2))
    assert code == 3
    assert run_dir.log("engine", 0).read_text().count("=== ") == 3


def test_the_controller_is_told_at_once_and_decides_whether_a_role_was_needed(tmp_path: Path) -> None:
    code, run_dir = launch(
        tmp_path,
        serving_controller("await asyncio.sleep(0.3)", needed="False"),
        service("engine", ONCE_UP + "sys.exit(4)"),
    )
    assert code == 0
    assert (run_dir.path / "exits").read_text() == "engine 0 4 False\n"


def test_the_controller_that_fails_because_a_service_died_does_not_take_the_blame(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, _ = launch(
        tmp_path, serving_controller("raise SystemExit(5)"), service("trainer", ONCE_UP + "raise OSError('disk')")
    )
    assert code in (1, 5)
    said = capfd.readouterr().err
    assert "trainer-0 ended with code 1: OSError: disk" in said
    assert said.count("\n") == 1


def test_a_controller_that_ignores_sigterm_is_killed_after_its_grace(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stubborn = controller("import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)")
    run_dir = RunDir(tmp_path / "run")
    config = LocalConfig(grace_s=0.3, role_grace_s=0.3)
    plan = Plan("run", str(run_dir.path), (stubborn, service("engine", "import time; time.sleep(0.3)")))
    began = time.monotonic()
    assert LocalLauncher(config).run(plan, run_dir) == 1
    assert time.monotonic() - began < 5
    assert "engine-0 ended with code 0" in capfd.readouterr().err


ON_TERM = """
    import pathlib, signal, sys, time
    def stop(*_):
        time.sleep({pause})
        (pathlib.Path(sys.argv[1]) / "{name}").write_text(str(time.monotonic()))
        sys.exit({code})
    signal.signal(signal.SIGTERM, stop)
    (pathlib.Path(sys.argv[1]) / "{name}-up").touch()
    while True: time.sleep(0.02)
"""


def stop_when_up(run: Path, *names: str) -> Callable[[LaunchState], None]:
    sent: list[bool] = []

    def on_tick(state: LaunchState) -> None:
        if not sent and all((run / f"{name}-up").exists() for name in names):
            sent.append(True)
            os.kill(os.getpid(), signal.SIGTERM)

    return on_tick


def test_the_controller_is_stopped_first_and_the_others_when_it_has_ended(tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, _ = launch(
        tmp_path,
        controller(ON_TERM.format(pause=0.3, name="controller", code=75)),
        service("engine", ON_TERM.format(pause=0, name="engine", code=0)),
        on_tick=stop_when_up(run, "controller", "engine"),
    )
    assert code == 75
    assert float((run / "controller").read_text()) < float((run / "engine").read_text())


def test_a_plan_without_a_controller_is_stopped_through_its_main_role(tmp_path: Path) -> None:
    trainer = Role("trainer", python(ON_TERM.format(pause=0.3, name="trainer", code=75)), purpose="main")
    code, run_dir = launch(tmp_path, trainer, on_tick=stop_when_up(tmp_path / "run", "trainer"))
    assert code == 75
    assert (run_dir.path / "trainer").exists()


def test_children_of_children_do_not_survive_even_in_a_session_of_their_own(tmp_path: Path) -> None:
    nested = """
        import pathlib, subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
        (pathlib.Path(sys.argv[1]) / "nested").write_text(str(child.pid))
        time.sleep(60)
    """
    wait = "import pathlib, sys, time\nwhile not (pathlib.Path(sys.argv[1]) / 'nested').exists(): time.sleep(0.02)"
    code, run_dir = launch(tmp_path, controller(wait), service("env-a", nested))
    assert code == 0
    pid = int((run_dir.path / "nested").read_text())
    wait_until(lambda: not alive(pid), "the nested process is gone", 2)


def test_a_second_launcher_is_refused(tmp_path: Path) -> None:
    refused: list[str] = []

    def second(state: LaunchState) -> None:
        if not refused:
            with pytest.raises(UsageError) as error:
                LocalLauncher(CONFIG).run(Plan("run", str(tmp_path / "run"), ()), RunDir(tmp_path / "run"))
            refused.append(str(error.value))

    launch(tmp_path, controller("import time; time.sleep(0.3)"), on_tick=second)
    assert "is being run by another process" in refused[0]


def test_a_display_that_fails_does_not_end_the_run(tmp_path: Path) -> None:
    def broken(state: LaunchState) -> None:
        raise RuntimeError("no terminal")

    code, run_dir = launch(tmp_path, controller("import time; time.sleep(0.3)"), on_tick=broken)
    assert code == 0
    assert run_dir.log("launcher", 0).read_text().count("no terminal") == 1


# --- signals to the launcher ------------------------------------------------------------------------------

LAUNCH = """
import sys, msgspec
from prl.plan import Plan
from prl.rundir import RunDir
from prl_launchers import local
from prl_launchers.config import LocalConfig
from prl_launchers.local import LocalLauncher
plan = msgspec.json.decode(sys.argv[1], type=Plan)
sys.exit(LocalLauncher(LocalConfig(grace_s=5, role_grace_s=2)).run(plan, RunDir(plan.run_dir)))
"""

CHECKPOINTING = controller("""
    import pathlib, signal, sys, time
    run = pathlib.Path(sys.argv[1])
    def stop(*_):
        time.sleep(0.2)
        (run / "checkpoint").touch()
        sys.exit(75)
    signal.signal(signal.SIGTERM, stop)
    (run / "ready").write_text(" ")
    while True: time.sleep(0.05)
""")

HANGING = controller("""
    import pathlib, signal, sys, time
    signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path(sys.argv[1]) / "asked").touch())
    (pathlib.Path(sys.argv[1]) / "ready").write_text(" ")
    while True: time.sleep(0.05)
""")

WITH_PORT_AND_CHILD = """
    import pathlib, signal, socket, subprocess, sys, time
    run = pathlib.Path(sys.argv[1])
    listener = socket.create_server(("127.0.0.1", 0))
    quiet = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", quiet], start_new_session=True)
    (run / "port").write_text(f"{listener.getsockname()[1]} {child.pid} ")
    time.sleep(60)
"""


class Launched:
    """A launcher in a process of its own, with a controller and a service that has a port and a grandchild."""

    def __init__(self, tmp_path: Path, main: Role) -> None:
        self.run = tmp_path / "run"
        plan = Plan("run", str(self.run), (main, service("engine", WITH_PORT_AND_CHILD)))
        argv = [sys.executable, "-c", LAUNCH, msgspec.json.encode(plan).decode()]
        self.process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
        self.ready = (self.run / "ready", self.run / "port")
        wait_until(
            lambda: all(p.exists() and (p.name == "ready" or p.read_text().endswith(" ")) for p in self.ready), "up"
        )
        self.pids = [int(path.read_text()) for path in (self.run / "control/pids").iterdir()]
        self.port, nested = map(int, (self.run / "port").read_text().split())
        self.pids.append(nested)
        assert len(self.pids) == 4
        assert all(map(alive, self.pids))

    def end(self) -> int:
        _, self.said = self.process.communicate(timeout=15)
        return self.process.returncode

    def assert_nothing_survives(self) -> None:
        wait_until(lambda: not any(map(alive, self.pids)), f"all of {self.pids} are gone", 5)
        with socket.create_server(("127.0.0.1", self.port)):
            pass


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_with_a_checkpoint_and_the_controllers_code(tmp_path: Path, number: signal.Signals) -> None:
    launched = Launched(tmp_path, CHECKPOINTING)
    launched.process.send_signal(number)
    assert launched.end() == 75
    assert launched.said == ""
    assert (launched.run / "checkpoint").exists()
    launched.assert_nothing_survives()


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    launched = Launched(tmp_path, HANGING)
    launched.process.send_signal(signal.SIGINT)
    wait_until((launched.run / "asked").exists, "the controller was asked to stop")
    began = time.monotonic()
    launched.process.send_signal(signal.SIGINT)
    assert launched.end() == 130
    assert time.monotonic() - began < 3
    launched.assert_nothing_survives()


def test_kill_9_of_the_launcher_leaves_nothing(tmp_path: Path) -> None:
    launched = Launched(tmp_path, HANGING)
    os.kill(launched.process.pid, signal.SIGKILL)
    launched.end()
    launched.assert_nothing_survives()


def test_a_run_directory_can_be_launched_again_after_kill_9(tmp_path: Path) -> None:
    launched = Launched(tmp_path, HANGING)
    os.kill(launched.process.pid, signal.SIGKILL)
    launched.end()
    launched.assert_nothing_survives()
    for path in launched.ready:
        path.unlink()
    again = Launched(tmp_path, CHECKPOINTING)
    again.process.send_signal(signal.SIGTERM)
    assert again.end() == 75
