"""What a run would refuse minutes later is refused by `prl config check`, by the files of model and data alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prl.config.load import LoadedConfig, load_config
from prl.config.schema import RunConfig, SftConfig
from prl.errors import ConfigError, PrlError
from prl_trainer_fsdp.trainer import Trainer

from .helpers import CPU


def write(folder: Path, model: Path, *lines: str) -> Path:
    text = "\n".join([f'model.path = "{model}"', "[[envs]]", 'use = "reverse_text"', "[trainer]", *lines])
    (folder / "run.toml").write_text(text)
    return folder / "run.toml"


def refusals(file: Path, *sets: str, schema: type[RunConfig] | type[SftConfig] = RunConfig) -> list[str]:
    try:
        load_config([file], sets, schema)
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize(
    ("lines", "says", "later"),
    [
        (["compile = true"], "trainer.compile: is true, but prl's own implementation of 'llama'", "compile = true"),
        (
            ["lora.targets = ['q_proj', 'wq']"],
            "trainer.lora.targets: names 'wq', but the linear layers of this model's blocks are down_proj, gate_proj, "
            "k_proj, o_proj, q_proj, up_proj, v_proj",
            "names 'wq'",
        ),
        (
            ["lora.rank = 20"],
            "trainer.lora.rank: is 20, more than k_proj has rows or columns, which is 16 x 32: a rank of at most 16",
            "rank = 20",
        ),
        (["ep = 2", "processes = 2"], "trainer.ep: is 2, but no model divides its experts", ""),
        (["cp = 3", "processes = 3"], "trainer.cp: is 3, which cannot divide the 4 attention heads", ""),
    ],
)
def test_what_the_trainer_would_refuse_is_refused_before(
    model: Path, tmp_path: Path, lines: list[str], says: str, later: str
) -> None:
    file = write(tmp_path, model, *lines)
    (problem,) = refusals(file)
    assert says in problem and "run.toml:5" in problem
    if later:  # the same by who builds the model
        config = load_config([file], ["trainer.device=cpu", "trainer.threads=1"], checks=False).config
        with pytest.raises(PrlError, match=later):
            Trainer(config, tmp_path, CPU)


@pytest.mark.parametrize(
    "lines",
    [["compile = true"], ["compile = true", "cp = 2", "processes = 2"], ["lora.rank = 4"], ["cp_style = 'ring'"]],
)
def test_what_it_takes_is_not_refused(model: Path, tmp_path: Path, lines: list[str]) -> None:
    impl = "hf" if "compile = true" in lines else "auto"
    assert not refusals(write(tmp_path, model, *lines), f"model.impl={impl}")


def test_kernels_of_own_families_are_not_for_others(model: Path, tmp_path: Path) -> None:
    file = write(tmp_path, model, "kernels.operations = 'torch'")
    assert not refusals(file)
    (problem,) = refusals(file, "model.impl=hf")
    assert "trainer.kernels.operations" in problem and 'leave it at "auto"' in problem


def test_a_window_is_not_for_a_ring_and_a_model_on_a_hub_is_left_to_the_run(model: Path, tmp_path: Path) -> None:
    windowed = tmp_path / "model"
    windowed.mkdir()
    config = json.loads((model / "config.json").read_text()) | {"model_type": "mistral", "sliding_window": 8}
    (windowed / "config.json").write_text(json.dumps(config))
    lines = ["processes = 2", "cp = 2", "cp_style = 'ring'"]
    (problem,) = refusals(write(tmp_path, windowed, *lines))
    assert 'trainer.cp_style: is "ring", which cannot compute the sliding window of 8' in problem
    assert not refusals(write(tmp_path, Path("org/model"), *lines, "lora.targets = ['wq']"))


# --- data ---------------------------------------------------------------------------------------------------


def supervised(folder: Path, model: Path, data: Path, **keys: str) -> list[str]:
    lines = [
        f'model.path = "{model}"',
        "[data]",
        f'train.path = "{data}"',
        f'train.format = "{keys.pop("format", "auto")}"',
    ]
    (folder / "sft.toml").write_text("\n".join([*lines, *(f'{key} = "{value}"' for key, value in keys.items())]))
    return refusals(folder / "sft.toml", schema=SftConfig)


def test_columns_of_other_names_are_refused_before_the_run(model: Path, tmp_path: Path) -> None:
    table = tmp_path / "data.parquet"
    pq.write_table(pa.table({"text": ["a"]}), table)
    (problem,) = supervised(tmp_path, model, table)
    assert "data.train.0" in problem and "has the columns text; expected 'messages', or 'prompt'" in problem
    lines = tmp_path / "data.jsonl"
    lines.write_text('{"text": "a"}\n' * 100)
    (problem,) = supervised(tmp_path, model, lines)
    assert "data.train.0" in problem and f"{lines}:1: " in problem
    assert "data.train.0" in supervised(tmp_path, model, lines, on_bad_row="skip")[0], "none of them is right"
    lines.write_text('{"text": "a"}\n{"prompt": "a", "completion": "b"}\n')
    assert not supervised(tmp_path, model, lines, on_bad_row="skip")
    lines.write_text('{"prompt": "a", "completion": "b"}\n')
    assert not supervised(tmp_path, model, lines)


def test_the_checks_load_no_torch(model: Path, tmp_path: Path) -> None:
    lines = tmp_path / "data.jsonl"
    lines.write_text('{"prompt": "a", "completion": "b"}\n')
    run = write(tmp_path, model, "lora.rank = 4")
    (tmp_path / "sft.toml").write_text(f'model.path = "{model}"\n[data]\ntrain = "{lines}"\n')
    code = (
        "import sys; from prl.config.load import load_config; from prl.config.schema import SftConfig\n"
        f"load_config(['{run}']); load_config(['{tmp_path / 'sft.toml'}'], (), SftConfig)\n"
        "print([name for name in ('torch', 'transformers', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def loaded(file: Path, *sets: str) -> LoadedConfig[RunConfig]:
    return load_config([file], sets)


# --- sequences ----------------------------------------------------------------------------------------------


def test_answers_that_leave_no_room_for_a_prompt_are_refused(model: Path, tmp_path: Path) -> None:
    """The model knows 256 positions."""
    file = write(tmp_path, model)
    assert not refusals(file, "sampling.max_tokens=255")
    (problem,) = refusals(file, "sampling.max_tokens=256")
    assert "sampling.max_tokens: is 256, which leaves no room for a prompt within the 256 positions" in problem
    (problem,) = refusals(file, "sampling.max_tokens=64", "engine.max_sequence_tokens=64")
    assert "within engine.max_sequence_tokens = 64: lower it, or raise engine.max_sequence_tokens" in problem
    (problem,) = refusals(file, "engine.max_sequence_tokens=257")
    assert "engine.max_sequence_tokens: is 257, but" in problem and "knows positions up to 256" in problem
    (problem,) = refusals(file, "sampling.max_tokens=64", "trainer.row_tokens=64")
    assert (
        "sampling.max_tokens: is 64, but no sample, prompt included, may be longer than trainer.row_tokens" in problem
    )


def test_a_context_longer_than_the_model_s_is_refused_of_vllm_too(model: Path, tmp_path: Path) -> None:
    file, vllm = write(tmp_path, model), ("engine.use=vllm", "engine.check=false")
    (problem,) = refusals(file, *vllm, "engine.max_model_len=512")
    assert "engine.max_model_len: is 512, but" in problem
    assert not refusals(file, *vllm, "engine.max_model_len=512", "engine.hf_overrides={a=1}")
    config = json.loads((model / "config.json").read_text())
    scaled = tmp_path / "scaled"
    scaled.mkdir()
    config["rope_parameters"] = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
    (scaled / "config.json").write_text(json.dumps(config))
    assert not refusals(write(tmp_path, scaled), *vllm, "engine.max_model_len=512"), "scaled: it may know more"


def test_a_quantised_engine_without_a_gate_is_warned_of(model: Path, tmp_path: Path) -> None:
    file, vllm = write(tmp_path, model), ("engine.use=vllm", "engine.check=false", "engine.quantization=fp8")
    assert not [w for w in loaded(file, *vllm).warnings if "mismatch" in w]
    (warning,) = [w for w in loaded(file, *vllm, "mismatch.probes=0").warnings if "mismatch" in w]
    assert "mismatch.probes: is 0 and the engine quantises to fp8" in warning
    (warning,) = [w for w in loaded(file, *vllm, "mismatch.action=warn").warnings if "mismatch" in w]
    assert 'Set mismatch.correction, such as "truncate"' in warning
    assert not [
        w for w in loaded(file, *vllm, "mismatch.action=warn", "mismatch.correction=truncate").warnings if "mis" in w
    ]
