"""What a child finds in its environment, and the line that names a failure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prl.errors import EnvironmentNotFit
from prl.plan import Plan, Resources, Role
from prl_launchers.causes import HEADER, cause, how_it_ended, last_error
from prl_launchers.slots import NoGpuError, Slot, missing
from prl_launchers.variables import assign_gpus, environment, shared_gpus, visible_gpus

SECRETS = {"HF_TOKEN": "x", "WANDB_API_KEY": "y", "AWS_SECRET_ACCESS_KEY": "z", "PATH": "/bin", "LANG": "C"}


def test_a_clean_environment_has_no_secret_and_the_rest_of_a_plan_has_all() -> None:
    clean = environment(Role("env-a", ("x",), clean_env=True, env={"MINE": "1"}), None, SECRETS)
    assert set(clean) == {"PATH", "LANG", "PYTHONUNBUFFERED", "MINE"}
    assert environment(Role("engine", ("x",)), None, SECRETS)["HF_TOKEN"] == "x"


def test_threads_reach_every_numeric_library() -> None:
    variables = environment(Role("engine", ("x",), resources=Resources(threads=3)), None, {"OMP_NUM_THREADS": "64"})
    assert {variables["OMP_NUM_THREADS"], variables["MKL_NUM_THREADS"], variables["RAYON_NUM_THREADS"]} == {"3"}
    assert "OMP_NUM_THREADS" not in environment(Role("engine", ("x",)), None, {})


def gpus(available: list[str], *wanted: tuple[str, int, int]) -> dict[tuple[str, int], list[str] | None]:
    roles = tuple(Role(name, ("x",), replicas=n, resources=Resources(gpus=k)) for name, n, k in wanted)
    return assign_gpus(Plan("r", "/r", roles), available)


def test_gpus_are_given_out_in_order() -> None:
    given = gpus(["0", "1", "2", "3"], ("controller", 1, 0), ("engine", 2, 1), ("trainer", 1, 2))
    assert given == {
        ("controller", 0): None,
        ("engine", 0): ["0"],
        ("engine", 1): ["1"],
        ("trainer", 0): ["2", "3"],
    }


def test_too_few_gpus_are_shared_and_none_leaves_roles_alone() -> None:
    assert gpus(["5"], ("engine", 1, 1), ("trainer", 1, 1)) == {("engine", 0): ["5"], ("trainer", 0): ["5"]}
    assert gpus([], ("engine", 1, 1)) == {("engine", 0): None}


def test_a_replica_that_takes_more_gpus_than_there_are_is_refused_before_anything_starts() -> None:
    with pytest.raises(EnvironmentNotFit, match="engine takes 4 GPUs for each replica, and this machine has 2"):
        gpus(["0", "1"], ("engine", 1, 4), ("trainer", 1, 1))


def test_visible_gpus(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ["0", "1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2, GPU-ab"}, tmp_path) == ["2", "GPU-ab"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == []


ENGINES = Role("engine", (), replicas=2, resources=Resources(gpus=1))
TRAINER = Role("trainer", (), resources=Resources(gpus=1))


@pytest.mark.parametrize(
    ("need", "available", "lacks"),
    [
        ("required", "", "none for engine-0 and engine-1 and trainer-0: use channel"),
        ("required", "0", ""),
        ("apart", "", "none for engine-0"),
        ("apart", "0", "GPU 0 would be the trainer's too"),
        ("apart", "01", "GPU 0 would be the trainer's too"),
        ("apart", "012", ""),
        ("optional", "", ""),
    ],
)
def test_weights_that_go_from_gpu_to_gpu_need_them(need: Any, available: str, lacks: str) -> None:
    plan = Plan("r", "/r", (ENGINES, TRAINER), need, 'channel.use = "x"')
    if lacks:
        with pytest.raises(EnvironmentNotFit, match=lacks):
            assign_gpus(plan, list(available))
    else:
        assign_gpus(plan, list(available))


def test_one_side_alone_may_lack_a_gpu() -> None:
    plan = Plan("r", "/r", (Role("engine", ()), TRAINER), "required", 'channel.use = "x"')
    with pytest.raises(EnvironmentNotFit, match="none for engine-0: use"):
        assign_gpus(plan, ["0"])


def log_with(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "x.log"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_last_error_is_the_exception_of_the_last_start(tmp_path: Path) -> None:
    log = log_with(
        tmp_path,
        HEADER + "one",
        "ValueError: of the first start",
        HEADER + "two",
        "loading",
        "Traceback (most recent call last):",
        '  File "x.py", line 1, in f',
        "torch.OutOfMemoryError: no memory",
        "bye",
    )
    assert last_error(log) == "torch.OutOfMemoryError: no memory"


def test_a_logged_error_is_quoted_without_time_and_level(tmp_path: Path) -> None:
    log = log_with(tmp_path, "2026-01-02 03:04:05,678 ERROR prl.role: no file", "2026-01-02 03:04:06,1 INFO x: end")
    assert last_error(log) == "prl.role: no file"


@pytest.mark.parametrize(
    ("lines", "expected"), [(["only words", ""], "only words"), ([HEADER + "x"], ""), (["a" * 900], "a" * 397 + "...")]
)
def test_without_an_error_the_last_line_is_quoted(tmp_path: Path, lines: list[str], expected: str) -> None:
    assert last_error(log_with(tmp_path, *lines)) == expected
    assert last_error(tmp_path / "missing.log") == ""


def test_a_killed_process_is_not_quoted(tmp_path: Path) -> None:
    log = log_with(tmp_path, "ValueError: long ago, and handled")
    assert cause("engine-0", how_it_ended(-9), -9, log) == (
        f"engine-0 was killed by SIGKILL (the kernel does this when memory runs out); see {log}"
    )
    assert "long ago" in cause("engine-0", how_it_ended(1), 1, log)
    assert how_it_ended(-64) == "was killed by SIGRTMAX"


def slots(*roles: Role, available: list[str]) -> list[Slot]:
    gpus = assign_gpus(Plan("r", "/r", roles), available)
    return [Slot(role, replica, gpus[role.name, replica]) for role in roles for replica in range(role.replicas)]


def test_another_replica_gets_free_gpus_or_is_refused() -> None:
    engine = Role("engine", (), resources=Resources(gpus=2))
    trainer = Role("trainer", (), resources=Resources(gpus=1))
    there = slots(engine, trainer, available=list("01234567"))
    added = missing(engine, 3, there, list("01234567"))
    assert [(slot.name, slot.gpus) for slot in added] == [("engine-1", ["3", "4"]), ("engine-2", ["5", "6"])]
    with pytest.raises(NoGpuError, match="each takes 2 GPUs, and 1 of 8 are free"):
        missing(engine, 4, there, list("01234567"))
    there[0].state = "ended"
    assert [slot.gpus for slot in missing(engine, 1, there, list("01234567"))] == [["0", "1"]], "what it had is free"


def test_it_is_said_which_gpus_are_shared() -> None:
    roles = [
        Role(name, (), resources=Resources(gpus=gpus)) for name, gpus in (("engine", 1), ("trainer", 1), ("gateway", 0))
    ]
    assert shared_gpus(assign_gpus(Plan("r", "/r", tuple(roles)), ["3"])) == [
        "GPU 3 is shared by engine-0 and trainer-0"
    ]
    assert shared_gpus(assign_gpus(Plan("r", "/r", tuple(roles)), ["3", "4"])) == []
    assert shared_gpus(assign_gpus(Plan("r", "/r", tuple(roles)), [])) == []


def test_where_gpus_are_shared_already_another_replica_shares_too() -> None:
    engine, trainer = (Role(name, (), resources=Resources(gpus=1)) for name in ("engine", "trainer"))
    there = slots(engine, trainer, available=["0"])
    assert [slot.gpus for slot in missing(engine, 2, there, ["0"])] == [["0"]]
    assert [slot.gpus for slot in missing(engine, 2, there, [])] == [None], "on a CPU there is nothing to give"
