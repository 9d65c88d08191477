"""`prl bench trainer`: which configurations it takes, and what it hands to the trainer plugin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prl.errors import ConfigError, UsageError
from prl_cli.benching import lengths, read

TRAINER = """
import json, pathlib, sys
class Trainer:
    def role(self, config): raise NotImplementedError
    def bench(self, config, request):
        code = (
            "import json, pathlib, sys; r = pathlib.Path(sys.argv[1]); asked = json.loads(r.read_text()); "
            "r.with_name('rows.json').write_text(json.dumps([asked['bench'], sys.argv[2:]]))"
        )
        return (sys.executable, "-c", code, str(request))
class Without:
    pass
"""


@pytest.fixture
def bench_file(project: Path) -> Path:
    (project / "trainer.py").write_text(TRAINER)
    file = project / "bench.toml"
    file.write_text('[model]\npath = "tiny/model"\n[trainer]\nuse = "./trainer.py:Trainer"\n[bench]\nrows = 3\n')
    return file


def test_a_configuration_of_its_own(bench_file: Path) -> None:
    config = read([bench_file], ["seed=4"], {"documents": [7, 8], "shapes": "qwen3-4b"})
    assert (config.seed, config.bench.rows, config.bench.documents) == (4, 3, (7, 8))
    assert config.bench.shapes == "qwen3-4b"


def test_a_runs_configuration_gives_model_loss_and_trainer(bench_file: Path, project: Path) -> None:
    config = read([project / "run.toml"], ['model.dtype="bfloat16"'], {"steps": 2})
    assert (config.model.path, config.model.dtype, config.bench.steps) == ("tiny/model", "bfloat16", 2)
    assert config.trainer.use.endswith("parts.py:Trainer") and config.loss.use == "dppo"


def test_what_is_wrong_is_said(bench_file: Path, project: Path) -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        read([bench_file], (), {"documents": [7, 1]})
    with pytest.raises(ConfigError, match="at least 2"):
        read([project / "run.toml"], (), {"documents": [7, 1]})
    with pytest.raises(ConfigError, match=r"there is no model: give model\.path"):
        read([bench_file], ['model.path=""'], {})
    with pytest.raises(UsageError, match="6000,200,3000"):
        lengths("12 7")
    assert lengths("16_384,7") == [16384, 7]


def test_the_plugin_measures_and_the_result_is_kept(bench_file: Path, project: Path, prl: Any) -> None:
    result = prl("bench", "trainer", "bench.toml", "--documents", "9,4", "--json", "out.json", "--profile", "p.txt")
    assert result.exit_code == 0, result.output
    asked, rest = json.loads((project / "out.json").read_text())
    assert (asked["documents"], asked["rows"]) == ([9, 4], 3)
    assert rest == [str(project / "p.txt")]


def test_a_trainer_without_a_benchmark_and_a_missing_folder(bench_file: Path, prl: Any) -> None:
    without = prl("bench", "trainer", "bench.toml", "--set", 'trainer.use="./trainer.py:Without"')
    assert without.exit_code == 2 and "has no benchmark" in without.stderr
    nowhere = prl("bench", "trainer", "bench.toml", "--json", "nowhere/out.json")
    assert nowhere.exit_code == 2 and "there is no folder" in nowhere.stderr
