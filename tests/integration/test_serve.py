"""`prl serve`: engines alone, told where they answer, watched, and all gone at the end."""

from __future__ import annotations

import json
import re
import signal
import stat
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .harness import Project, Run, wait_until

ENGINE = f"{Path(__file__).with_name('api_engine.py')}:ApiEngine"
LINE = re.compile(r"^(engine-\d)  (http://127\.0\.0\.1:\d+/v1)  model (\S+)  key (.+)$", re.MULTILINE)
Going = tuple[Run, subprocess.Popen[str]]


@pytest.fixture(scope="module")
def going(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Going]:
    """Two engines. The tests below use them in their order; the last one ends them."""
    run = served(Project(tmp_path_factory.mktemp("serve"), tiny_model), "serve-it")
    arguments = ("serve", str(tiny_model), "--engine", ENGINE, "--replicas", "2", "--set", "name=serve-it")
    with run.started(*arguments) as process:
        wait_until(lambda: len(LINE.findall(run.output())) == 2 or process.poll() is not None, "both engines serve")
        assert process.poll() is None, run.output()
        yield run, process


def served(project: Project, name: str) -> Run:
    return Run(project, name, project.folder / "none.toml")


def models(api: str, key: str | None) -> Any:
    """The answer of /v1/models, or the status that refused it."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{api}/models", headers=headers), timeout=10) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code


def test_every_engine_is_told_with_its_address_name_and_key(going: Going, tiny_model: Path) -> None:
    run, _ = going
    told = LINE.findall(run.output())
    assert [engine for engine, *_ in told] == ["engine-0", "engine-1"]
    for _, api, name, key in told:
        path = run.project.folder / key
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.resolve() == run.dir.token.resolve()
        assert models(api, path.read_text().strip())["data"] == [{"id": name, "path": str(tiny_model)}]
        assert models(api, "wrong") == 401 and models(api, None) == 401
        assert f"curl {api}/chat/completions -H" in run.output()
    assert len({api for _, api, *_ in told}) == 2


def test_the_commands_for_runs_know_it(going: Going) -> None:
    run, _ = going
    asked = run.ask("why-stuck", "--json")
    assert asked.returncode == 0 and json.loads(asked.stdout)["data"]["waits"] == [], asked.stderr
    refused = run.ask("checkpoint")
    assert refused.returncode == 1 and "only serves a model" in refused.stderr
    listed = json.loads(run.project.prl("runs", "--json").stdout)["runs"]
    assert [(row["name"], row["state"]) for row in listed] == [("serve-it", "running")]
    assert run.project.prl("runs", "show", "serve-it").stdout.startswith("serve-it: running\n")
    again = run.project.prl("serve", str(run.project.model), "--engine", ENGINE, "--set", "name=serve-it")
    assert again.returncode == 2 and "is going on" in again.stderr


def test_an_engine_that_dies_is_started_again_and_told_again(going: Going) -> None:
    run, process = going
    assert run.kill("engine-1")
    wait_until(lambda: len(LINE.findall(run.output())) == 3 or process.poll() is not None, "it serves again")
    assert LINE.findall(run.output())[2][0] == "engine-1"
    assert [row["role"] for row in run.events("role_lost")] == ["engine"]


def test_ctrl_c_ends_all_of_it(going: Going) -> None:
    run, process = going
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0, run.output()
    wait_until(lambda: not run.alive(), "every process has ended", 20)
    assert (run.status["kind"], run.status["state"]) == ("serve", "stopped") and run.summary["outcome"] == "stopped"
    told = run.ask("why-stuck")
    assert told.returncode == 1 and "is not running: stopped, " in told.stderr


def test_stop_ends_it_and_the_same_folder_is_used_again(tmp_path: Path, tiny_model: Path) -> None:
    project = Project(tmp_path, tiny_model)
    run = served(project, f"serve-{tiny_model.name}")
    for _ in range(2):
        with run.started("serve", str(tiny_model), "--engine", ENGINE, "--json") as process:
            wait_until(lambda: run.dir.status.exists() and run.status["state"] == "running", "it serves", 60)
            assert run.ask("stop").returncode == 0
            assert process.wait(60) == 0, run.output()
        told = json.loads(run.output()[run.output().index("{") : run.output().rindex("}") + 1])
        assert [engine["model"] for engine in told["engines"]] == ["tiny"]
        (project.folder / f"{run.name}.out").unlink()
    assert [path.name for path in (project.folder / "runs").iterdir()] == [run.name]


def test_an_engine_that_cannot_start_ends_it(tmp_path: Path, tiny_model: Path) -> None:
    project = Project(tmp_path, tiny_model)
    done = project.prl("serve", str(tiny_model), "--engine", ENGINE, "--set", "engine.fails=true")
    assert done.returncode == 1 and "this engine cannot load the model" in done.stderr, done.stderr
    assert not served(project, f"serve-{tiny_model.name}").alive()
