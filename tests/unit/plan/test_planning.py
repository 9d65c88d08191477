"""From a configuration to a plan."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prl import registry
from prl.config.schema import EngineTable, EnvTable, ModelTable, RunConfig, TrainerTable
from prl.contribution import Contribution
from prl.errors import PluginError
from prl.plan import Plan, Role
from prl.planning import build_plan
from prl.rundir import RunDir


class Plugin:
    def __init__(self, name: str) -> None:
        self._name = name

    def role(self, config: RunConfig) -> Any:
        return Role(self._name, ("x",), replicas=config.engine.replicas) if self._name else "no role"


def engine(config: Any) -> Plugin:
    return Plugin("engine")


def trainer(config: Any) -> Plugin:
    return Plugin("trainer")


def broken(config: Any) -> Plugin:
    return Plugin("")


def plan(trainer_factory: str = "trainer", **tables: Any) -> Plan:
    envs = [EnvTable(use="reverse_text"), EnvTable(use="./deep/my_env.py:MyEnv"), EnvTable(use="jsonl", name="maths")]
    config = RunConfig(
        model=ModelTable(path="m"), envs=envs, engine=EngineTable(use="e", replicas=2), trainer=TrainerTable(use="t")
    )
    here = __name__ if __name__ in sys.modules else ""
    assert here
    with (
        registry.override("engines", "e", Contribution(f"{here}:engine")),
        registry.override("trainers", "t", Contribution(f"{here}:{trainer_factory}")),
    ):
        return build_plan(config, RunDir(Path("runs/one")))


def test_a_run_has_its_roles() -> None:
    it = plan()
    assert it.run_id == "one"
    assert Path(it.run_dir).is_absolute()
    assert [role.name for role in it.roles] == [
        "controller",
        "engine",
        "trainer",
        "gateway",
        "env-reverse_text",
        "env-MyEnv",
        "env-maths",
    ]
    assert [role.name for role in it.roles if role.purpose == "main"] == ["controller"]
    assert it.role("engine").replicas == 2


def test_only_environments_are_kept_from_secrets_and_started_again() -> None:
    it = plan()
    for role in it.roles:
        assert role.clean_env == role.name.startswith("env-")
    env = it.role("env-MyEnv")
    assert env.restart == "on_failure"
    assert env.command == (sys.executable, "-m", "prl.envworker", "{run_dir}", "MyEnv", "{replica}")
    assert it.role("controller").restart == "never"


def test_a_plan_survives_json() -> None:
    it = plan()
    assert msgspec.json.decode(msgspec.json.encode(it), type=Plan) == it


def test_a_plugin_that_gives_no_role_is_named() -> None:
    with pytest.raises(PluginError, match=r"prl.trainers plugin 't': role\(config\) returned str"):
        plan("broken")
