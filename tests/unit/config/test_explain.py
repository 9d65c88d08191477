"""`explain`: documentation, type, default, value and origin of every key."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from prl.config.explain import explain
from prl.config.load import load_config
from prl.config.problems import everywhere
from prl.config.schema import RunConfig, SftConfig
from prl.errors import ConfigError


def test_a_key_shows_what_it_may_be() -> None:
    assert explain("mismatch.action").splitlines() == [
        "mismatch.action",
        '  What happens past the limit. With "correct" `correction` comes into force only then, from the next step on.',
        '  type      "warn" or "pause" or "stop" or "correct"',
        '  default   "pause"',
    ]
    assert "  type      number, more than 0, at most 1\n" in explain("sampling.top_p")
    assert "none: it is required" in explain("model.path")


def test_a_value_shows_where_it_came_from(write: Callable[..., str]) -> None:
    base = write("[model]\npath='a/b'\n[loop]\nsteps = 3\n[[envs]]\nuse='hello'\nlength=2\n", "base.toml")
    loaded = load_config([base], ["loop.steps=4"])
    assert "  value     4   (--set loop.steps=4, replaces base.toml:4:9)\n" in explain("loop.steps", loaded)
    assert "  value     8   (default)\n" in explain("loop.group_size", loaded)
    assert "  value     2   (base.toml:7:8)\n" in explain("envs.0.length", loaded)


def test_a_plugins_keys_are_explained(write: Callable[..., str]) -> None:
    assert "batching" in explain("engine") and "replicas" in explain("engine")
    assert "number" in explain("engine.memory")
    with pytest.raises(ConfigError, match="did you mean 'memory'"):
        explain("engine.memry")
    with pytest.raises(ConfigError, match="say which plugin"):
        explain("envs.length")
    assert re.search(r"^  length +5? *\S* *Characters of a text\.$", explain("envs.hello"), re.MULTILINE)
    assert "Characters of a text." in explain("envs.hello.length")
    with pytest.raises(ConfigError, match="did you mean 'length'"):
        explain("envs.hello.lenght")
    loaded = load_config([write("[model]\npath='a/b'\n[[envs]]\nuse='hello'\n")])
    assert "Characters of a text." in explain("envs.length", loaded)
    assert re.search(r"^    hello +Says hello\.$", explain("envs.use"), re.MULTILINE)


@pytest.mark.parametrize("table", ["adapters", "kernels"])
def test_tables_within_a_plugins_table_are_explained(table: str) -> None:
    """Also where leaving the table out, or a word in its place, is allowed."""
    assert f"prl config explain trainer.{table}." in " ".join(explain("trainer").split())
    assert re.search(r"^  rank +16 +Rows of one, columns of the other\.$", explain(f"trainer.{table}"), re.MULTILINE)
    assert "  type      integer\n  default   16\n" in explain(f"trainer.{table}.rank")
    with pytest.raises(ConfigError, match="did you mean 'rank'"):
        explain(f"trainer.{table}.rnk")


def test_a_table_shows_defaults_and_whole_descriptions() -> None:
    text = explain("loop")
    assert re.search(r"^  steps +100 +Steps\.", text, re.MULTILINE)
    assert max(map(len, text.splitlines())) <= 120
    assert "in which no sample carried any signal." in " ".join(text.split())


@pytest.mark.parametrize("key", ["lop", "loop.stepps", "loop.steps.x", "envs.0.x.y"])
def test_an_unknown_key_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        explain(key)


@pytest.mark.parametrize("schema", [RunConfig, SftConfig])
def test_every_key_is_documented(schema: type[RunConfig] | type[SftConfig]) -> None:
    for path in everywhere(schema):
        text = explain(".".join(map(str, path)), schema=schema)
        assert len(text.splitlines()[1].strip()) > 5, f"{path} needs a docstring"
