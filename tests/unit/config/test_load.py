"""Loading a configuration: composition, every problem with its place, plugins' tables, origins."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from prl.config.compose import Problem
from prl.config.load import load_config, read_resolved
from prl.config.schema import RunConfig, SftConfig
from prl.errors import ConfigError
from prl.rundir import RunDir
from prl.store.lock import write_config

GOOD = """\
[model]
path = "org/model"

[loop]
steps = 10

[[envs]]
use = "hello"
length = 3
"""
Write = Callable[..., str]


def problems(*arguments: object, **keywords: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(*arguments, **keywords)  # type: ignore[arg-type]
    assert caught.value.exit_code == 2
    return caught.value.problems


def test_a_good_file_is_filled_in(write: Write) -> None:
    loaded = load_config([write(GOOD)])
    assert loaded.config.loop.steps == 10
    assert loaded.config.loop.group_size == 8
    assert loaded.config.envs[0].own == {"length": 3, "words": []}
    assert loaded.config.engine.own == {"batching": "fixed", "memory": 0.9}
    assert loaded.warnings == []


def test_every_problem_is_reported_at_its_place_with_the_line_and_a_caret(write: Write) -> None:
    text = 'nam = "x"\n[loop]\nsteps = "ten"\n[[envs]]\nuse = "hello"\nlenght = 3\n[[envs]]\nuse = "helo"\n'
    found = problems([write(text)])
    assert found[0] == "run.toml: error: model: is required" or "model" in found[-1]
    located = [problem for problem in found if "run.toml:" in problem and "\n" in problem]
    assert located == [
        "run.toml:1:1: error: nam: unknown key 'nam'; did you mean 'name'?\n    1 | nam = \"x\"\n      | ^",
        "run.toml:3:9: error: loop.steps: must be an integer, not 'ten'\n    3 | steps = \"ten\"\n      |         ^",
        "run.toml:6:1: error: envs.0.lenght: unknown key 'lenght'; did you mean 'length'?\n"
        "    6 | lenght = 3\n      | ^",
        located[3],
    ]
    assert located[3].startswith(
        "run.toml:8:7: error: envs.1.use: no environment is called 'helo'. Did you mean 'hello'?"
    )
    assert len(found) == 5


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("loop.steps=-1", "loop.steps: must be at least 0, not -1"),
        ("loop.steps=true", "loop.steps: must be an integer, not True"),
        ("loop.steps=1.0", "loop.steps: must be an integer, not 1.0"),
        ("envs.0.weight=0", "envs.0.weight: must be more than 0, not 0"),
        ("envs.0.length=0", "envs.0.length: must be at least 1, not 0"),
        ("envs.0.wieght=1", "envs.0.wieght: unknown key 'wieght'; did you mean 'weight'?"),
        ("engine.max_staleness=1", "unknown key 'max_staleness' here; did you mean loop.max_staleness?"),
        ("engine.memry=1", "did you mean 'memory'?"),
        ("mismatch.action=halt", "must be 'warn', 'pause', 'stop' or 'correct', not 'halt'"),
        ("mismatch.clip=0.9", "mismatch.clip: is 0.9: a ratio of 1 needs room on both sides"),
        ("mismatch.action=correct", "mismatch.correction: must name one"),
        ("loop.max_concurrency=-1", 'loop.max_concurrency: must be "auto" or an integer of at least 0, not -1'),
        ("loop.max_concurrency=many", "must be \"auto\" or an integer of at least 0, not 'many'"),
        ("loop.max_concurrency=true", 'must be "auto" or an integer of at least 0, not True'),
        ("sampling.top_p=0.9", "sampling.top_p: training needs top_p = 1"),
        ("sampling.repetition_penalty=1.1", "sampling.repetition_penalty: training needs the distribution that the"),
        ("sampling.min_p=0.05", "the engine's log-probabilities would not be those that the trainer computes again"),
        ("sampling.temperature=0", "sampling.temperature: must be at least 0.01, not 0"),
        ("name=a/b", "name: must match"),
        ("envs=[]", "envs: needs at least 1"),
        ("model=3", "model: must be a table"),
        ("faults=[{role='a', point='b', action='kill', whne=1}]", "unknown key 'whne'"),
        ("envs.7.weight=1", "envs has 1 entries, counted from 0, so there is no envs.7"),
        ("envs.use=x", "envs is an array: write envs.0.use"),
        ("model.path.x=1", "model.path is 'org/model', not a table"),
        ("loop.steps", "is not of the form key=value"),
        ("=3", "is not of the form key=value"),
        ("envs=[1", "the value is not valid TOML"),
        ("name='a'\nseed=2", "more than one line"),
    ],
)
def test_a_wrong_set_says_so_and_shows_itself(write: Write, expression: str, message: str) -> None:
    (found,) = problems([write(GOOD)], [expression])
    assert found.startswith("--set: error: ")
    assert message in found
    assert expression.partition("\n")[0] in found


def test_files_are_laid_over_one_another_and_then_sets(write: Write) -> None:
    base = write(GOOD + "[eval]\nevery = 2\ntasks = 8\n", "base.toml")
    over = write('[eval]\nevery = 3\n[loop]\nsteps = 4\n[[envs]]\nuse = "hello"\nname = "other"\n', "over.toml")
    loaded = load_config([base, over], ["loop.steps=5", "envs.0.words=['a']", "name=first", "eval.at_end=false"])
    config = loaded.config
    assert (config.eval.every, config.eval.tasks, config.loop.steps, config.name) == (3, 8, 5, "first")
    assert [env.label for env in config.envs] == ["other"], "arrays are replaced as a whole"
    assert config.envs[0].own == {"length": 5, "words": ["a"]}
    assert loaded.origin("eval.tasks") == "base.toml:12:9"
    assert loaded.origin("eval.every") == "over.toml:2:9"
    assert loaded.origin("loop.steps") == "--set loop.steps=5"
    assert str(loaded.origins["loop.steps"].replaces) == "over.toml:4:9"
    assert loaded.origin("loop.group_size") == "default"
    assert loaded.origin("envs.0.length") == "default", "what was replaced leaves no origin behind"


def test_a_problem_is_reported_where_the_winning_value_came_from(write: Write) -> None:
    base = write(GOOD, "base.toml")
    over = write("[loop]\nsteps = -2\n", "over.toml")
    assert problems([base, over])[0].startswith("over.toml:2:9: error: loop.steps: must be at least 0, not -2")


def test_unreadable_files_are_all_reported(write: Write) -> None:
    syntax = write("[a]\nb = \n", "syntax.toml")
    ends = write("a = [1,", "ends.toml")
    Path("binary.toml").write_bytes(b"\xff\xfe")
    found = problems([syntax, ends, "absent.toml", "binary.toml"], ["loop"])
    assert found[0].startswith("syntax.toml:2:5: error: not valid TOML: ")
    assert found[1].startswith("ends.toml:1:8: error: not valid TOML: ")
    assert found[2] == "absent.toml: error: there is no such file"
    assert "binary.toml: error: cannot be read" in found[3]
    assert len(found) == 5


def test_a_plugin_of_a_default_that_is_not_installed_is_reported(write: Write) -> None:
    (found,) = problems([write(GOOD)], ["loss.use=gspo"])
    assert "no loss is called 'gspo'" in found and "`prl plugins install PACKAGE`" in found
    found = problems([write("[model]\npath='a/b'\n[data]\ntrain='x'\n")], ["loss.use=cross"], SftConfig, checks=False)[
        0
    ]
    assert "no loss is called 'cross'" in found


def test_a_name_in_a_file_is_made_absolute(write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write("class MyEnv:\n    def __init__(self, size: int = 1): self.size = size\n", "my_env.py")
    run = write(GOOD.replace('"hello"\nlength', '"./my_env.py:MyEnv"\nsize'))
    loaded = load_config([run])
    monkeypatch.chdir("/")
    env = loaded.config.envs[0]
    assert env.use == f"{tmp_path / 'my_env.py'}:MyEnv"
    assert (env.label, env.build().size) == ("MyEnv", 3)
    monkeypatch.chdir(tmp_path)
    (found,) = problems([run], ["envs.0.sise=2"])
    assert "did you mean 'size'?" in found


def test_rules_across_tables(write: Write) -> None:
    run = write(GOOD)
    assert "compares at least 2" in problems([run], ["loop.group_size=1"])[0]
    assert "trainer.processes" in problems([run], ["trainer.processes=9", "loop.groups_per_step=1"])[0]
    assert "trainer.processes" in problems([run], ["trainer.processes=20", "trainer.updates_per_batch=32"])[0]
    assert "trainer.updates_per_batch" in problems([run], ["trainer.updates_per_batch=33"])[0]
    assert "there is no folder" in problems([run], ["model.path=./nowhere"])[0]
    Path("empty").mkdir()
    assert "holds no config.json" in problems([run], ["model.path=empty"])[0]
    assert "two environments are called 'hello'" in problems([run], ["envs=[{use='hello'}, {use='hello'}]"])[0]
    load_config([run], ["model.path=./nowhere"], checks=False)
    loaded = load_config([run], ["loop.max_staleness=0", "engine.batching=continuous"])
    assert "warning: engine: with these settings embedded samples otherwise" in loaded.warnings[0]


@pytest.mark.parametrize("side", ["trainer", "engine"])
def test_a_channel_between_gpus_needs_gpus(write: Write, side: str) -> None:
    text = GOOD + f'[channel]\nuse = "between"\n[{side}]\nuse = "on_gpu"\ndevice = "cpu"\n'
    with pytest.raises(ConfigError, match=rf'"between", which carries .* GPU to GPU, and {side}.device is "cpu"'):
        load_config([write(text)])
    load_config([write(text.replace("between", "filesystem"))])


def test_a_hook_may_refuse(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    from prl import hooks

    def refuse(config: RunConfig, manager: object = None) -> list[Problem]:
        return [Problem("loop.steps", "is more than this site allows, 5"), Problem("", "odd", severity="warning")]

    monkeypatch.setattr(hooks, "check_config", refuse)
    (found,) = problems([write(GOOD)])
    assert found.startswith("run.toml:5:9: error: loop.steps: is more than this site allows, 5")


def test_the_resolved_configuration_is_read_back(write: Write) -> None:
    config = load_config([write(GOOD)], ["engine.memory=inf"]).config
    write_config(RunDir("."), config.model_dump(mode="json"))
    again = read_resolved(Path("config.json"), RunConfig)
    assert again == config
    assert again.engine.own["memory"] == float("inf")


def test_a_resolved_configuration_that_is_wrong_is_refused(write: Write) -> None:
    with pytest.raises(ConfigError, match="no run directory"):
        read_resolved(Path("absent.json"), RunConfig)
    config = load_config([write(GOOD)]).config.model_dump(mode="json")
    config["loop"]["stepz"] = 3
    with pytest.raises(ConfigError, match="loop.stepz: unknown key"):
        read_resolved(Path(write(json.dumps(config), "config.json")), RunConfig)
    with pytest.raises(ConfigError, match="config.json: error"):
        read_resolved(Path(write('{"model": ', "config.json")), RunConfig)


def test_supervised_configurations(write: Write) -> None:
    write("", "data.jsonl")
    run = write('[model]\npath = "org/model"\n[data]\ntrain = "data.jsonl"\n')
    assert load_config([run], schema=SftConfig).config.loss.use == "ce"
    (found,) = problems([run], ["data.train=nope.jsonl"], SftConfig)
    assert "there is no file nope.jsonl" in found
    assert "belongs to configurations of prl sft; prl config reads those with --sft" in problems([run])[0]
    told = problems([write(GOOD)], ["data.train=data.jsonl"], SftConfig)
    assert any("unknown key 'loop' here: it belongs to configurations of prl run" in problem for problem in told)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("seed", 10**30, "must be at most 9223372036854775807"),
        ("seed", -1, "must be at least 0"),
        ("loop.group_size", 2**63, "must be at most"),
        ("engine.threads", 2**63, "must be at most"),
        ("runs_dir", '"a\\u0000b"', "NUL"),
        ("envs.0.weight", "inf", "must be a finite number"),
        ("sampling.temperature", "inf", "must be a finite number"),
        ("channel", '{use = "nccl", timeout_s = inf}', "must be a finite number"),
        ("channel", '{use = "nccl", host = ""}', "must have 1 or more characters"),
    ],
)
def test_what_no_message_and_no_generator_can_hold_is_refused(write: Write, key: str, value: object, why: str) -> None:
    (problem,) = problems([write(GOOD)], [f"{key}={value}"])
    assert key in problem and why in problem


def test_a_byte_order_mark_is_no_part_of_the_text(write: Write) -> None:
    assert load_config([write("\ufeff" + GOOD)]).config.loop.steps == 10


def test_nesting_without_end_is_a_problem_of_the_file(write: Write) -> None:
    deep = "[" * 20_000 + "]" * 20_000
    assert "nested too deeply" in problems([write(GOOD + f"deep = {deep}\n")])[0]
    assert "nested too deeply" in problems([write(GOOD)], [f"loop.steps={deep}"])[0]


def test_a_file_without_a_name_in_it_is_told_how_to_write_it(write: Write) -> None:
    (problem,) = problems([write(GOOD.replace("hello", "./my_env.py"))])
    assert "./file.py:Name" in problem
