"""`local`: a plan as supervised processes of this machine.

Life of a run: all roles are started; a service that ends while the controller still needs it is a failure, repaired
by its restart policy or else the end of the run; when every main role has ended well the services are stopped.

Stopping: the controller gets SIGTERM and `grace_s` (it checkpoints and shuts the roles down), then the others get
SIGTERM and `role_grace_s`, then SIGKILL to their groups, and at last whatever still carries this launch's mark.
Ctrl-C or SIGTERM stops; a second Ctrl-C kills at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Literal

from prl.errors import EnvironmentNotFit, Preempted, UsageError
from prl.launching import RoleExited, Scaled, ScaleRole
from prl.plan import CONTROLLER, LaunchState, Plan
from prl.rundir import RunDir
from prl_launchers import variables, warden
from prl_launchers.causes import cause, how_it_ended, shown, stays_so, told_by_controller
from prl_launchers.config import LocalConfig
from prl_launchers.link import ControllerLink
from prl_launchers.process import Child
from prl_launchers.slots import NoGpuError, Slot, missing

TICK_S = 0.25
SETTLE_S = 1.0
"""How long a service's death waits for the controller's own, which would explain it."""
LONGEST_BACKOFF_S = 30.0
INTERRUPTED = 130

OnTick = Callable[[LaunchState], None]


class LocalLauncher:
    def __init__(self, config: LocalConfig) -> None:
        self.config = config

    def check(self, plan: Plan) -> None:
        """Raises:
        EnvironmentNotFit: this machine lacks GPUs that the plan needs.
        """
        variables.assign_gpus(plan, variables.visible_gpus(os.environ))

    def run(self, plan: Plan, run_dir: RunDir, on_tick: OnTick | None = None) -> int:
        """See `prl.protocols.Launcher`. Must be called from the main thread, which receives the signals.

        Raises:
            UsageError: another launcher works in this run directory.
        """
        with _lock(run_dir):
            run_dir.socket.unlink(missing_ok=True)  # of a former controller
            supervision = Supervision(plan, run_dir, self.config, on_tick)
            code = asyncio.run(supervision.run())
        if supervision.cause:
            print(f"prl: {supervision.cause}", file=sys.stderr, flush=True)
        return code


@contextlib.contextmanager
def _lock(run_dir: RunDir) -> Iterator[None]:
    """Held by this process and released by its death, whatever kills it."""
    run_dir.control.mkdir(parents=True, exist_ok=True)
    with (run_dir.control / "launcher.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"{run_dir.path} is being run by another process; `prl stop` ends it") from None
        yield


class Supervision:
    """One execution of a plan."""

    def __init__(self, plan: Plan, run_dir: RunDir, config: LocalConfig, on_tick: OnTick | None) -> None:
        self.cause = ""
        self._run_dir = run_dir
        self._config = config
        self._on_tick = on_tick
        self._plan = plan
        self._inherited = dict(os.environ)
        self._available = variables.visible_gpus(self._inherited)
        gpus = variables.assign_gpus(plan, self._available)
        self._slots = [
            Slot(role, replica, gpus[role.name, replica]) for role in plan.roles for replica in range(role.replicas)
        ]
        self._wanted = {role.name: role.replicas for role in plan.roles}
        main = [slot for slot in self._slots if slot.role.purpose == "main"]
        self._leading = [slot for slot in main if slot.role.name == CONTROLLER] or main
        """Who is asked first to stop, with time for a checkpoint: the controller, or what there is in its place."""
        self._mark = secrets.token_hex(16)
        self._pids = run_dir.control / "pids"
        self._link = ControllerLink(run_dir, [role.name for role in plan.roles if role.elastic], self.scale)
        self._wake = asyncio.Event()
        self._reports: set[asyncio.Task[None]] = set()
        self._phase: Literal["running", "stopping", "ended"] = "running"
        self._stop_asked = False
        self._kill_asked = False
        self._suspect: tuple[Slot, str] | None = None
        self._code: int | None = None
        for line in variables.shared_gpus(gpus):
            self._note(line)

    # --- the run's life -----------------------------------------------------------------------------------

    async def run(self) -> int:
        guard = self._start_warden()
        self._watch_signals(True)
        try:
            for slot in self._slots:
                self._start(slot)
            while self._code is None and not self._stop_asked:
                await self._next()
            await self._stop()
        finally:
            self._kill_everything()
            warden.finish(guard, self._mark)
            for report in self._reports:
                report.cancel()
            self._link.close()
            self._phase = "ended"
            self._show()
            self._watch_signals(False)
        return INTERRUPTED if self._kill_asked else self._code or 0

    async def _next(self) -> None:
        """Wait for something to happen, a quarter of a second at most, and deal with it."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), TICK_S)
        self._wake.clear()
        # Main roles first: the death of the controller explains that of the others.
        for slot in sorted(self._slots, key=lambda slot: slot.role.purpose != "main"):
            code = slot.child.exit_code() if slot.child is not None else None
            if code is not None:
                self._ended(slot, code)
        now = time.monotonic()
        for slot in list(self._slots):
            if slot.state == "restarting" and now >= slot.restart_at and self._phase == "running":
                self._start(slot)
            elif slot.leaving and slot.child is not None and now >= slot.kill_at:
                slot.child.signal(signal.SIGKILL)
        if self._phase == "running":
            self._link.keep()
        self._show()

    def _ended(self, slot: Slot, code: int) -> None:
        assert slot.child is not None
        lived = time.monotonic() - slot.child.started
        slot.child.reap()
        slot.child = None
        slot.state, slot.code = "ended", code
        (self._pids / slot.name).unlink(missing_ok=True)
        self._note(f"{slot.name} {how_it_ended(code)} after {lived:.1f} s")
        if slot.role.purpose == "main":
            self._main_ended(slot, code)
            return
        if slot.leaving:
            self._left(slot)
        elif lived >= self._config.healthy_after_s:
            slot.restarts = 0
        report = asyncio.get_running_loop().create_task(self._service_ended(slot, code))
        self._reports.add(report)
        report.add_done_callback(self._reports.discard)

    def _main_ended(self, slot: Slot, code: int) -> None:
        if self._phase == "stopping" and slot not in self._leading:
            return  # it was told to end
        if self._stop_asked and code == -signal.SIGTERM:
            code = Preempted.exit_code  # it had not come so far that it could have said so itself
        if code != 0 and self._code in (None, 0):
            self._code = code if code > 0 else 1
            if self._phase == "running" and code != Preempted.exit_code:
                guilty, what = self._suspect or (slot, how_it_ended(code))
                self._blame(guilty, what)
        elif self._code is None and all(s.state == "ended" for s in self._slots if s.role.purpose == "main"):
            self._code = 0
        self._wake.set()

    async def _service_ended(self, slot: Slot, code: int) -> None:
        """Report it to the controller; if it was needed, start it again or end the run."""
        if slot.leaving:
            await self._link.still_needed(RoleExited(slot.role.name, slot.replica, code, False))
            return
        can_restart = slot.role.restart == "on_failure" and slot.restarts < slot.role.max_restarts
        can_restart = can_restart and not stays_so(code, slot.restarts)
        what = how_it_ended(code) + (" although the run still needed it" if code == 0 else "")
        # One that ended well was most likely told to by a controller that failed, and whose answer is on its way.
        if code != 0 and not can_restart and self._phase == "running" and self._code is None:
            self._suspect = self._suspect or (slot, what)
        event = RoleExited(slot.role.name, slot.replica, code, can_restart and self._phase == "running")
        answer = await self._link.still_needed(event)
        needed = None if answer is None else answer.needed
        if answer is None:
            await self._wait_for_main()
        elif answer.why:
            what = f"was ended by the controller: {answer.why}"
            self._note(f"{slot.name} {what}")
        if self._suspect is not None and self._suspect[0] is slot and needed is False:
            self._suspect = None
        if needed is False or self._phase != "running" or self._code is not None or slot not in self._slots:
            return
        if can_restart:
            self._schedule_restart(slot)
            return
        times = f" (after {slot.restarts} restarts)" if slot.restarts else ""
        self._code = code if code == EnvironmentNotFit.exit_code else 1
        self._blame(slot, what + times)
        self._wake.set()

    async def _wait_for_main(self) -> None:
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline and self._code is None and self._phase == "running":
            await asyncio.sleep(0.02)

    def _schedule_restart(self, slot: Slot) -> None:
        pause = min(self._config.backoff_s * 2**slot.restarts, LONGEST_BACKOFF_S)
        slot.restarts += 1
        slot.state, slot.restart_at = "restarting", time.monotonic() + pause
        self._note(f"{slot.name}: restart {slot.restarts} of {slot.role.max_restarts} in {pause:g} s")
        asyncio.get_running_loop().call_later(pause, self._wake.set)

    # --- more or fewer ------------------------------------------------------------------------------------

    def scale(self, request: ScaleRole) -> Scaled:
        """See `prl.launching.ScaleRole`. Answers at once: what starts or ends is seen to by `_next`."""
        role = next((role for role in self._plan.roles if role.name == request.role and role.elastic), None)
        if role is None or self._phase != "running":
            return Scaled(
                f"{request.role!r} is no role whose number can be changed" if role is None else "it is ending"
            )
        try:
            added = missing(role, request.replicas, self._slots, self._available)
        except NoGpuError as error:
            return Scaled(f"{role.name} x {request.replicas}: {error}")
        self._wanted[role.name] = request.replicas
        for slot in [slot for slot in self._slots if slot.role is role and slot.replica >= request.replicas]:
            self._retire(slot)
        for slot in added:
            self._slots = [other for other in self._slots if other.name != slot.name]
            self._slots.append(slot)
            self._start(slot)
        return Scaled()

    def _retire(self, slot: Slot) -> None:
        if slot.child is None:
            self._slots.remove(slot)
        elif not slot.leaving:
            slot.leaving, slot.kill_at = True, time.monotonic() + self._config.role_grace_s
            slot.child.signal(signal.SIGTERM)
            self._note(f"{slot.name} is no longer wanted")

    def _left(self, slot: Slot) -> None:
        self._slots.remove(slot)
        if slot.replica < self._wanted[slot.role.name] and self._phase == "running":
            again = Slot(slot.role, slot.replica, slot.gpus)
            self._slots.append(again)
            self._start(again)

    # --- the end ------------------------------------------------------------------------------------------

    async def _stop(self) -> None:
        self._phase = "stopping"
        for slot in self._slots:
            if slot.state == "restarting":
                slot.state = "ended"
        late = await self._terminate(self._leading, self._config.grace_s)
        if late and not self._kill_asked:
            self._code = self._code or 1
            self._blame(late[0], f"did not stop within {self._config.grace_s:g} s and was killed")
        await self._terminate([slot for slot in self._slots if slot not in self._leading], self._config.role_grace_s)

    async def _terminate(self, slots: list[Slot], grace: float) -> list[Slot]:
        """SIGTERM, `grace` seconds, SIGKILL. Returns those that had to be killed."""
        for slot in slots:
            if slot.child is not None:
                slot.child.signal(signal.SIGTERM)
        deadline = time.monotonic() + grace
        while any(slot.child for slot in slots) and time.monotonic() < deadline and not self._kill_asked:
            await self._next()
        late = [slot for slot in slots if slot.child is not None]
        for slot in late:
            if slot.child is not None:
                slot.child.signal(signal.SIGKILL)
        while any(slot.child for slot in slots):
            await self._next()
        return late

    def _kill_everything(self) -> None:
        """What an orderly stop left; all of it when the launcher itself failed."""
        for slot in self._slots:
            if slot.child is not None:
                slot.child.reap()
                slot.child, slot.state = None, "ended"
            (self._pids / slot.name).unlink(missing_ok=True)
        (self._pids / "launcher").unlink(missing_ok=True)

    # --- signals ------------------------------------------------------------------------------------------

    def _watch_signals(self, on: bool) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup
            with contextlib.suppress(ValueError, RuntimeError):  # not the main thread: no signals to be had
                if on:
                    loop.add_signal_handler(number, self._on_signal, number)
                else:
                    loop.remove_signal_handler(number)

    def _on_signal(self, number: int) -> None:
        again = self._stop_asked or self._phase != "running"
        self._note(f"{signal.Signals(number).name} received" + (" again" if again else ""))
        self._stop_asked = True
        if again and number == signal.SIGINT:
            self._kill_asked = True
        self._wake.set()

    # --- processes ----------------------------------------------------------------------------------------

    def _start(self, slot: Slot) -> None:
        role = slot.role
        names = {"{run_dir}": str(self._run_dir.path.absolute()), "{replica}": str(slot.replica)}
        argv = [_replace(argument, names) for argument in role.command]
        environment = variables.environment(role, slot.gpus, self._inherited)
        environment[warden.VARIABLE] = self._mark
        slot.child = Child(slot.name, argv, environment, self._run_dir.log(role.name, slot.replica))
        slot.state, slot.code = "running", None
        self._write_pid(slot.name, slot.child.pid)
        self._note(f"{slot.name} started as pid {slot.child.pid}")
        self._wake_when_it_ends(slot.child)

    def _wake_when_it_ends(self, child: Child) -> None:
        descriptor = child.pidfd()
        if descriptor is None:
            return
        loop = asyncio.get_running_loop()

        def ended() -> None:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            self._wake.set()

        loop.add_reader(descriptor, ended)

    def _start_warden(self) -> subprocess.Popen[bytes]:
        self._pids.mkdir(parents=True, exist_ok=True)
        for stale in self._pids.iterdir():
            stale.unlink()
        self._write_pid("launcher", os.getpid())
        return warden.start(self._mark)

    def _write_pid(self, name: str, pid: int) -> None:
        (self._pids / name).write_text(f"{pid}\n")

    # --- what people see ----------------------------------------------------------------------------------

    def _blame(self, slot: Slot, what: str) -> None:
        if self.cause:
            return
        reason, log = told_by_controller(self._run_dir.status) if slot.role.name == CONTROLLER else ("", "")
        if reason and log:
            self.cause = f"the run failed: {reason}; see {shown(self._run_dir.path / log)}"
        else:
            self.cause = cause(slot.name, what, slot.code, shown(self._run_dir.log(slot.role.name, slot.replica)))
        self._note(self.cause)

    def _note(self, line: str) -> None:
        log = self._run_dir.log("launcher", 0)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")

    def _show(self) -> None:
        if self._on_tick is None:
            return
        try:
            self._on_tick(LaunchState(self._phase, [slot.view() for slot in self._slots], self.cause))
        except Exception as error:
            self._on_tick = None
            self._note(f"the live display failed and is off: {type(error).__name__}: {error}")


def _replace(argument: str, names: dict[str, str]) -> str:
    for name, value in names.items():
        argument = argument.replace(name, value)
    return argument
