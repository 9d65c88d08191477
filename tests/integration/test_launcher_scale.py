"""`local` and the number of replicas: what the controller asks for while the run goes on."""

from __future__ import annotations

from pathlib import Path

from prl.plan import Role

from .test_local_launcher import SLEEP, controller, launch, python, service

SCALING = """
    import asyncio, pathlib, sys
    from prl.launching import LAUNCHER, ROLE_EXITED, SCALE, ScaleRole, StillNeeded
    from prl.messages import NOTHING
    from prl.wire import Server
    run = pathlib.Path(sys.argv[1])
    said = []
    async def until(condition):
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.02)
    def there():
        return sorted(path.name for path in (run / "control/pids").iterdir() if path.name.startswith("engine-"))
    async def main():
        launcher = asyncio.get_running_loop().create_future()
        def hello(peer, message):
            assert message.roles == ["engine"], message
            launcher.set_result(peer)
            return NOTHING
        def exited(peer, event):
            said.append((event.role, event.replica, event.code, event.will_restart))
            return StillNeeded(event.replica == 0, "it hung")
        (run / "control/token").write_text("t")
        server = Server("t", {{LAUNCHER: hello, ROLE_EXITED: exited}})
        (run / "control/socket").write_text(server.start())
        peer = await launcher
        async def scale(replicas, role="engine"):
            return (await peer.call(SCALE, ScaleRole(role, replicas), timeout=10)).refused
        {body}
    asyncio.run(main())
"""


def staying(on_term: str) -> Role:
    """Engines that write ready-N, and do `on_term` when they are asked to end."""
    code = f"""
        import signal, sys, time
        from pathlib import Path
        signal.signal(signal.SIGTERM, {on_term})
        (Path(sys.argv[1]) / f"ready-{{sys.argv[2]}}").touch()
        time.sleep(60)
    """
    return Role("engine", python(code), elastic=True, restart="on_failure")


def test_replicas_are_added_and_ended_as_the_controller_asks(tmp_path: Path) -> None:
    """One that is ended is no failure; one that ends by itself is told, and is started again when it is asked for."""
    body = """
        assert await scale(3) == ""
        await until(lambda: len(list(run.glob("ready-*"))) == 3)
        assert await scale(3) == ""
        assert await scale(1) == ""
        await until(lambda: there() == ["engine-0"])
        await until(lambda: len(said) == 2)
        assert sorted(said) == [("engine", 1, 0, False), ("engine", 2, 0, False)], said
        assert await scale(2) == ""
        await until(lambda: there() == ["engine-0", "engine-1"])
        assert "no role whose number" in await scale(2, "helper")
    """
    code, run_dir = launch(
        tmp_path, controller(SCALING.format(body=body)), staying("lambda *_: exit(0)"), service("helper", SLEEP)
    )
    assert code == 0, run_dir.log("controller", 0).read_text()
    log = run_dir.log("launcher", 0).read_text()
    assert log.count("engine-0 started") == 1 and log.count("engine-1 started") == 2
    assert "engine-1 is no longer wanted" in log and "restart" not in log


def test_one_that_does_not_want_to_end_is_killed_and_comes_back_if_it_is_wanted_again(tmp_path: Path) -> None:
    body = """
        assert await scale(2) == ""
        await until(lambda: (run / "ready-1").exists())
        assert await scale(1) == ""
        assert await scale(2) == ""
        await until(lambda: said)
        assert said == [("engine", 1, -9, False)], said
        await until(lambda: there() == ["engine-0", "engine-1"])
    """
    code, run_dir = launch(tmp_path, controller(SCALING.format(body=body)), staying("signal.SIG_IGN"))
    assert code == 0, run_dir.log("controller", 0).read_text()
