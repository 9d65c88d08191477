"""Which numbers of ranks fit: refused with the numbers that do not, and the nearest that do, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from prl.config.load import load_config
from prl.config.schema import SftConfig
from prl.errors import ConfigError, EnvironmentNotFit
from prl_trainer_fsdp.config import FsdpConfig
from prl_trainer_fsdp.parallel.layout import ALONE, Layout, make, misfit
from prl_trainer_fsdp.parallel.runtime import start
from prl_trainer_fsdp.role import FsdpPlugin

from .helpers import CPU, run_config


@pytest.mark.parametrize(
    ("world", "numbers", "expected"),
    [
        (1, (1, 0, 1, 1), ALONE),
        (8, (1, 0, 1, 1), Layout(1, 8, 1, 1)),
        (8, (2, 0, 2, 1), Layout(2, 2, 2, 1)),
        (8, (2, 2, 2, 4), Layout(2, 2, 2, 4)),
        (6, (1, 0, 3, 6), Layout(1, 2, 3, 6)),
    ],
)
def test_what_fits(world: int, numbers: tuple[int, int, int, int], expected: Layout) -> None:
    made = make(world, *numbers)
    assert made == expected
    assert (made.world, made.data_ranks * made.cp, made.dp_replicate * made.shards) == (world, world, world)


@pytest.mark.parametrize(
    ("world", "numbers", "key", "says"),
    [
        (
            6,
            (1, 0, 4, 1),
            "cp",
            "is 4, but 6 processes are not dp_replicate x dp_shard x cp = 1 x (all that remain) x 4",
        ),
        (6, (1, 0, 4, 1), "cp", "Nearest that fit: cp = 3, processes = 4 or processes = 8"),
        (1, (1, 0, 2, 1), "cp", "Nearest that fit: cp = 1, processes = 2"),
        (8, (1, 3, 1, 1), "dp_shard", "is 3, but 8 processes are not"),
        (8, (1, 3, 1, 1), "dp_shard", "Nearest that fit: dp_shard = 8, processes = 3"),
        (8, (2, 3, 2, 1), "dp_shard", "Nearest that fit: dp_shard = 2, processes = 12"),
        (8, (3, 0, 1, 1), "dp_replicate", "Nearest that fit: dp_replicate = 2, processes = 6 or processes = 9"),
        (8, (1, 0, 2, 3), "ep", "is 3, but must divide dp_shard x cp = 4 x 2 = 8. Nearest that fit: ep = 2"),
    ],
)
def test_what_does_not(world: int, numbers: tuple[int, int, int, int], key: str, says: str) -> None:
    found = misfit(world, *numbers)
    assert found is not None and found[0] == key and says in found[1], found
    with pytest.raises(ConfigError, match=rf"^trainer\.{key} is "):
        make(world, *numbers)


def test_every_remedy_fits() -> None:
    for world in range(1, 13):
        for replicate in (1, 2, 3):
            for shard in range(5):
                for cp in (1, 2, 4):
                    found = misfit(world, replicate, shard, cp, 1)
                    if found is None:
                        continue
                    numbers = {"dp_replicate": replicate, "dp_shard": shard, "cp": cp, "ep": 1}
                    offered = found[1].partition("Nearest that fit: ")[2].replace(" or ", ", ").split(", ")
                    assert offered != [""], (world, numbers, found)
                    for key, _, value in (option.partition(" = ") for option in offered):
                        changed = {"processes": world, **numbers, key: int(value)}
                        assert misfit(changed.pop("processes"), *changed.values()) is None, (world, numbers, found)


def test_a_configuration_is_refused_with_the_line_of_the_key(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    text = f'model.path = "{model}"\n[[envs]]\nuse = "reverse_text"\n[trainer]\nprocesses = 6\ncp = 4\n'
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config([file])
    (problem,) = caught.value.problems
    assert "run.toml:6" in problem and "trainer.cp: is 4" in problem and "Nearest that fit: cp = 3" in problem
    file.write_text(text.replace("cp = 4", "cp = 3").replace("cp", 'cp_style = "ring"\ncp'))
    assert load_config([file]).config.trainer.processes == 6


def test_a_plan_is_refused_before_anything_starts(model: Path) -> None:
    config = run_config(model, processes=3, cp=2)
    with pytest.raises(ConfigError, match=r"trainer.cp is 2, but 3 processes"):
        FsdpPlugin(FsdpConfig(cp=2)).role(config)
    assert FsdpPlugin(FsdpConfig(cp=3)).role(config).name == "trainer"


def test_ranks_that_are_not_the_configured_number_are_refused(model: Path) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "4"}
    with pytest.raises(ConfigError, match="trainer.processes is 2, but the trainer was started as 4 processes"):
        start(run_config(model, processes=2), environ)
    supervised = SftConfig.model_validate(
        {"model": {"path": str(model)}, "data": {"train": "none"}, "trainer": {"cp": 3, "device": "cpu"}}
    )
    with pytest.raises(ConfigError, match="trainer.cp is 3, but 4 processes"):  # torchrun decides how many they are
        start(supervised, environ)


def test_a_process_has_a_gpu_of_its_own(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    config = run_config(model, processes=4, device="auto")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    environ = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    with pytest.raises(
        EnvironmentNotFit, match=r"4 trainer processes need a GPU each, but torch finds 2 .*processes = 2"
    ):
        start(config, environ)
    assert not taken
    from prl_trainer_fsdp.parallel.runtime import _device

    assert _device("auto", environ | {"LOCAL_WORLD_SIZE": "2"}) == torch.device("cuda", 1)  # of two on each node
    assert taken == [1]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EnvironmentNotFit, match="torch finds no GPU"):
        start(run_config(model, processes=4, device="cuda"), environ)


def test_experts_are_not_divided_yet(model: Path) -> None:
    import dataclasses

    from prl_trainer_fsdp.assembly import assemble

    runtime = dataclasses.replace(CPU, layout=Layout(1, 2, 1, 2))
    with pytest.raises(ConfigError, match="trainer.ep = 2, but .* use ep = 1"):
        assemble(run_config(model).model, FsdpConfig(ep=2), runtime)
