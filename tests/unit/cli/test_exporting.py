"""What the process that exports says of its failure reaches the user, with its exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from prl_cli.exporting import ExportFailed, _ask


def test_wrong_usage_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    request = {"action": "export", "run": str(tmp_path), "step": 1}
    with pytest.raises(ExportFailed, match=r"^the run could not be exported: .*data") as failed:
        _ask(request, "the run", "exported")
    assert failed.value.exit_code == 2


@pytest.mark.parametrize(("code", "exits"), [(3, 3), (1, 1), (-9, 1), (75, 1)])
def test_what_is_no_wrong_usage_has_the_code_of_a_failure(code: int, exits: int) -> None:
    assert ExportFailed("", code).exit_code == exits
