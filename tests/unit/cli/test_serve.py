"""What `prl serve` makes of its target and options. The processes themselves are tried in tests/integration."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prl.errors import ConfigError, UsageError
from prl.rundir import RunDir
from prl_cli import exporting, serving
from prl_cli.serving import engine_lines, serving_config

ENGINE = """
import sys
from prl.contribution import PluginConfig
from prl.plan import Role

class Api:
    class Config(PluginConfig):
        api_port: int = 0
        slots: int = 1

    def __init__(self, config): ...

    def role(self, config):
        return Role("engine", (sys.executable, "-c", "pass"), replicas=config.engine.replicas)
"""


@pytest.fixture
def model(project: Path) -> str:
    (project / "api.py").write_text(ENGINE)
    folder = project / "models" / "Tiny 0.5"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return str(folder)


API = "./api.py:Api"


def made(target: str | None = None, checkpoint: str | None = None, *sets: str, **options: Any) -> Any:
    given = {"engine": None, "replicas": None, "port": None, "runs_dir": None, **options}
    return serving_config(target, checkpoint, sets=list(sets), **given)


def test_a_model_and_its_options(model: str, project: Path) -> None:
    config = made(model, None, "engine.slots=3", engine=API, replicas=2, port=8000)
    assert (config.model.path, config.name, config.runs_dir) == (model, "serve-Tiny-0.5", "runs")
    assert config.engine.use == f"{project}/api.py:Api" and config.engine.replicas == 2
    assert config.engine.own == {"api_port": 8000, "slots": 3}
    run = config.run_config()
    assert run.envs == [] and run.loop.steps == 0 and run.engine == config.engine and run.model == config.model
    assert made(model, None, "name=mine", engine=API).name == "mine"


def test_a_configuration_gives_model_engine_and_launcher(model: str, project: Path) -> None:
    text = (project / "run.toml").read_text().replace("./parts.py:Engine", API + '"\nslots = "2')
    (project / "serve.toml").write_text(text.replace("tiny/model", model).replace('slots = "2"', "slots = 2"))
    config = made("serve.toml")
    assert config.engine.own["slots"] == 2 and config.launcher.use.endswith("parts.py:Launcher")
    assert config.name == "serve-serve", "not the training run's own name"
    with pytest.raises(ConfigError, match=r"wrong.toml:\d+:1: error: engine.slits"):
        (project / "wrong.toml").write_text((project / "serve.toml").read_text().replace("slots", "slits"))
        made("wrong.toml")


def test_another_engine_does_not_inherit_the_keys_of_the_former(model: str, project: Path) -> None:
    (project / "embedded.toml").write_text(
        f'[model]\npath = "{model}"\n[engine]\nuse = "embedded"\nreplicas = 3\nslots = 64\nswap_kv = "retain"\n'
    )
    config = made("embedded.toml", engine=API)
    assert config.engine.replicas == 3 and config.engine.own == {"api_port": 0, "slots": 1}


def test_an_engine_without_http_is_refused_with_the_remedy(model: str) -> None:
    with pytest.raises(ConfigError, match=r"engine.use: 'embedded' answers .* such as \"vllm\" \(--engine vllm\)"):
        made(model, engine="embedded")


def test_a_checkpoint_is_exported_first(model: str, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(project / "runs" / "first")
    run.control.mkdir(parents=True)
    stored = {
        "model": {"path": "elsewhere", "dtype": "bfloat16"},
        "envs": [{"use": "none"}],
        "engine": {"use": f"{project}/api.py:Api", "slots": 5},
    }
    run.config.write_text(json.dumps(stored))
    for step in (2, 4):
        run.checkpoint(step).mkdir(parents=True)
        (run.checkpoint(step) / "MANIFEST.json").write_text("{}")
    asked: list[int | None] = []
    monkeypatch.setattr(exporting, "exported", lambda run, step: asked.append(step) or Path(model))
    config = made(None, "first")
    assert (config.model.path, config.model.dtype, config.name) == (model, "bfloat16", "serve-first-4")
    assert config.engine.own["slots"] == 5 and Path(config.runs_dir) == project / "runs"
    assert made(None, "first:2").name == "serve-first-2"
    assert asked == [4, 2]
    with pytest.raises(UsageError, match="no complete checkpoint of step 3; it has 2, 4"):
        made(None, "first:3")
    with pytest.raises(UsageError, match="two models: choose one"):
        made(model, "first")
    with pytest.raises(UsageError, match="say what to serve"):
        made()


def test_a_folder_that_is_no_model_is_refused(model: str, prl: Callable[..., Any]) -> None:
    result = prl("serve", "./nowhere", "--engine", API)
    assert result.exit_code == 2 and "model.path: there is no folder nowhere" in result.stderr


def test_the_plan_can_be_seen_without_starting(model: str, project: Path, prl: Callable[..., Any]) -> None:
    result = prl("serve", model, "--engine", API, "--dry-run", "--json")
    assert [role["name"] for role in json.loads(result.stdout)["roles"]] == ["controller", "engine"]
    assert not (project / "runs").exists()


def test_a_folder_in_use_is_left_alone(model: str, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = RunDir(project / "runs" / "serve-Tiny-0.5")
    used.control.mkdir(parents=True)
    assert made(model, engine=API).name == "serve-Tiny-0.5-2"
    (used.path / "plan.json").write_text('{"roles": [{"command": ["python", "-m", "prl.controller.serving"]}]}')
    assert made(model, engine=API).name == "serve-Tiny-0.5"
    monkeypatch.setattr(serving.runs, "is_alive", lambda run: True)
    assert made(model, engine=API).name == "serve-Tiny-0.5-2"


def test_a_request_to_try_survives_a_shell() -> None:
    import shlex

    told = engine_lines("engine-0", {"api": "http://127.0.0.1:1/v1", "model": "it's"}, Path("/a b/token"))
    words = shlex.split(told.splitlines()[1])
    assert words[0] == "curl" and json.loads(words[-1])["model"] == "it's"
    assert words[3] == "Authorization: Bearer $(cat '/a b/token')"
