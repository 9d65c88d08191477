"""Sources of supervised data: what they read, and what they refuse, with its place."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from prl.config.data import SftDataTable, SftSourceTable
from prl.errors import ConfigError, EnvironmentNotFit
from prl_trainer_fsdp.sft.records import BadRow, Conversation, Text
from prl_trainer_fsdp.sft.sources import Source, open_sources

from .sft_helpers import conversations, turns, write_jsonl

GOOD = {"messages": turns("a", "b")}
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def source(path: str, *, skip: bool = False, **table: Any) -> Source:
    return Source(SftSourceTable(path=path, **table), skip=skip)


def parquet(path: Path, columns: dict[str, Any]) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), path)
    return str(path)


def contents(found: Source) -> list[str]:
    records = [found.record(index) for index in range(len(found))]
    return [r.completion if isinstance(r, Text) else str(r.messages[-1]["content"]) for r in records]


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ("{", "it is no JSON"),
        ("[", r"it is no JSON: .*an array over several lines\?"),
        ("[" * 3000, "it is no JSON: maximum recursion"),
        ('{"prompt": "\\ud800", "completion": "a"}', "it is no JSON"),
        ('"text"', "it is 'text', not a table"),
        ({"text": "a"}, "it has 'text'; expected 'messages', or 'prompt' and 'completion'"),
        ({"prompt": "a"}, "it has 'prompt'; expected"),
        ({"messages": []}, "'messages' is \\[\\]; expected messages"),
        ({"messages": "hello"}, "'messages' is 'hello'; expected messages"),
        ({"messages": [{"content": "a"}]}, "message 1 of 'messages' has no role, only 'content'"),
        ({"messages": [{"role": "user"}]}, "message 1 of 'messages' has no content, only 'role'"),
        ({"messages": [{"role": "user", "content": 5}]}, "its content is 5; expected a text"),
        ({"messages": turns("a")}, "no token to train: its turns are user"),
        ({"messages": [{"role": "user", "content": "a", "train": True}]}, "only an assistant's turn can be trained"),
        ({"messages": [*turns("a"), {"role": "assistant", "content": "b", "weight": 2}]}, "weight is 2; expected"),
        ({"messages": turns("a", "b"), "tools": "{"}, "'tools' is no JSON"),
        ({"messages": turns("a", "b"), "tools": [1]}, "'tools' is \\[1\\]; expected a list of tools"),
        ({"prompt": 3, "completion": "b"}, "'prompt' is 3; expected messages"),
    ],
)
def test_a_wrong_line_is_named_and_may_be_left_out(tmp_path: Path, row: Any, what: str) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", [GOOD, "", row, GOOD])
    with pytest.raises(ConfigError, match=f"data.jsonl:3: .*{what}"):
        source(path)
    found = source(path, skip=True)
    assert (len(found), found.skipped, found.place(1)) == (2, 1, f"{path}:4")


def test_a_file_that_changes_under_a_run_is_told(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", [GOOD, GOOD])
    found = source(path)
    write_jsonl(tmp_path / "data.jsonl", [{"messages": turns("aa", "b")}, GOOD])
    with pytest.raises(BadRow, match="it is no JSON"):
        found.record(1)


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + (json.dumps(GOOD) + "\r\n").encode() * 2)
    assert contents(source(str(path))) == ["b", "b"]


def test_every_bad_row_counts_and_the_first_are_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", ["{"] * 8)
    with pytest.raises(ConfigError) as error:
        source(path)
    assert len(error.value.problems) == 6 and error.value.problems[-1].endswith("and 3 more bad rows")
    with pytest.raises(ConfigError, match="holds 8 rows, all of them bad"):
        source(path, skip=True)


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_a_file_without_a_row_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "data.jsonl").write_text(content)
    with pytest.raises(ConfigError, match="data.jsonl holds no example"):
        source(str(tmp_path / "data.jsonl"))


def test_a_file_of_an_unknown_kind_needs_its_format(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.txt", [GOOD])
    with pytest.raises(ConfigError, match="neither .jsonl nor .parquet"):
        source(path)
    assert contents(source(path, format="jsonl")) == ["b"]


def test_columns_may_have_other_names(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", [{"q": "x", "a": "y"}, {"chat": turns("a", "b"), "fns": TOOLS}])
    found = source(path, prompt="q", completion="a", messages="chat", tools="fns")
    assert contents(found) == ["y", "b"]
    second = found.record(1)
    assert isinstance(second, Conversation) and second.tools == TOOLS


def test_parquet_of_both_shapes(tmp_path: Path) -> None:
    rows = [row["messages"] for row in conversations(("abc", "def"))]
    assert contents(source(parquet(tmp_path / "m.parquet", {"messages": rows, "other": [1, 2]}))) == ["cba", "fed"]
    plain = parquet(tmp_path / "p.parquet", {"prompt": ["a", "b"], "completion": ["c", "d"]})
    assert contents(source(plain)) == ["c", "d"]
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    mixed = parquet(tmp_path / "t.parquet", {"messages": [[*turns("a"), call]], "tools": [json.dumps(TOOLS)]})
    record = source(mixed).record(0)
    assert isinstance(record, Conversation) and record.tools == TOOLS
    assert record.messages[0] == {"role": "user", "content": "a"}, "null is no field"


@pytest.mark.parametrize(
    ("columns", "what"),
    [
        ({"text": ["a"]}, "has the columns text; expected 'messages', or 'prompt' and 'completion'"),
        ({"prompt": ["a"], "completion": [7]}, "column 'completion' is int64; expected text or a list"),
        ({"messages": ["a"]}, "column 'messages' is string; expected a list of {role, content}"),
        ({"messages": [["a"]]}, "column 'messages' is list<element: string>; expected a list"),
        ({"prompt": ["a", "b"], "completion": ["c", None]}, "data.parquet:2: it has 'prompt'; expected"),
    ],
)
def test_parquet_of_wrong_columns(tmp_path: Path, columns: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        source(parquet(tmp_path / "data.parquet", columns))


def test_a_file_that_is_no_parquet(tmp_path: Path) -> None:
    (tmp_path / "data.parquet").write_text("hello")
    with pytest.raises(ConfigError, match="data.parquet is no Parquet file"):
        source(str(tmp_path / "data.parquet"))
    with pytest.raises(ConfigError, match="none.parquet cannot be read"):
        source(str(tmp_path / "none.parquet"))


def test_datasets_from_disk_and_from_a_folder_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="the datasets library is optional")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    made = datasets.Dataset.from_list(conversations(("abc", "def")))
    made.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": made, "test": made.select([1])}).save_to_disk(tmp_path / "two")
    assert contents(source(str(tmp_path / "one"))) == ["cba", "fed"]
    assert contents(source(str(tmp_path / "two"), split="test")) == ["fed"]
    with pytest.raises(ConfigError, match="has no split 'dev': it has train, test"):
        source(str(tmp_path / "two"), split="dev")
    with pytest.raises(ConfigError, match="has the columns messages; expected 'chat'"):
        source(str(tmp_path / "one"), messages="chat")
    (tmp_path / "files").mkdir()
    write_jsonl(tmp_path / "files" / "train.jsonl", [*conversations(("abc",)), {"messages": turns("a")}])
    files = source(str(tmp_path / "files"))
    assert len(files) == 2 and files.place(1).endswith("files:2")
    with pytest.raises(BadRow, match="its turns are user"):
        files.record(1)


def test_without_the_library_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(EnvironmentNotFit, match=r'pip install "prl-trainer-fsdp\[datasets\]"'):
        source(str(tmp_path))


def test_the_problems_of_all_sources_are_told(tmp_path: Path) -> None:
    bad = write_jsonl(tmp_path / "bad.jsonl", ["{"])
    tables = [SftSourceTable(path=bad), SftSourceTable(path="/none.jsonl")]
    with pytest.raises(ConfigError) as error:
        open_sources(tables, skip=False)
    assert len(error.value.problems) == 2


def test_sources_are_a_path_or_tables() -> None:
    assert [s.path for s in SftDataTable.model_validate({"train": "a.jsonl"}).train] == ["a.jsonl"]
    table = {"train": {"path": "a"}, "eval": [{"path": "b"}, {"path": "c"}]}
    assert [s.path for s in SftDataTable.model_validate(table).eval] == ["b", "c"]
    with pytest.raises(ValueError, match="give one of them"):
        SftDataTable.model_validate({"train": "a", "steps": 1, "epochs": 1})
    with pytest.raises(ValueError, match="give all of them one, or none"):
        SftDataTable.model_validate({"train": [{"path": "a", "weight": 1}, {"path": "b"}]})
