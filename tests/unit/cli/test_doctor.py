"""The doctor on machines that are broken in one way each; every finding that is not fine has a remedy."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prl.config.load import load_config
from prl.config.schema import SftConfig
from prl_cli.doctor import machine, packages, setup
from prl_cli.doctor.finding import Finding

GB = 1 << 30
TORCH = {"topic": "torch", "version": "2.9.0", "cuda_build": None, "threads": 2, "cuda": False, "gpus": []}
KINDS = ("engines", "trainers", "envs", "launchers", "losses", "algorithms", "channels")
PLUGINS = [{"topic": "plugin", "kind": kind, "name": "x", "package": "p", "problem": ""} for kind in KINDS]
TOLD = [TORCH, {"topic": "library", "name": "transformers", "version": "5.0"}, *PLUGINS, {"topic": "end"}]


def usage(free: float, total: float = 100 * GB) -> Any:
    return lambda path: SimpleNamespace(free=int(free), total=int(total), used=0)


def test_this_machine_has_no_finding_without_a_remedy(tmp_path: Path) -> None:
    findings = list(machine.check_machine(tmp_path / "runs"))
    assert {finding.name for finding in findings} >= {
        "python",
        "memory",
        "ports",
        "shared memory",
        "disk",
        "file system",
    }
    for finding in findings:
        assert finding.level == "ok" or finding.remedy, finding
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("free", "level"), [(0.1 * GB, "fail"), (2 * GB, "warn"), (50 * GB, "ok")])
def test_disk_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: float, level: str) -> None:
    monkeypatch.setattr(shutil, "disk_usage", usage(free))
    assert machine.disk_space(tmp_path).level == level


def test_small_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", usage(64 << 20, 64 << 20))
    assert "--shm-size" in machine.shared_memory(tmp_path).remedy
    assert machine.shared_memory(tmp_path / "missing").level == "warn"


@pytest.mark.parametrize(("kind", "level"), [("ext4", "ok"), ("nfs4", "warn"), ("tmpfs", "warn")])
def test_the_type_of_the_file_system_is_that_of_the_deepest_mount(tmp_path: Path, kind: str, level: str) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        f"22 1 8:1 / / rw shared:1 - btrfs /dev/sda1 rw\n30 22 0:5 / {tmp_path} rw shared:2 - {kind} server:/x rw\n"
    )
    found = machine.file_system(tmp_path / "runs", mounts)
    assert (found.level, found.seen.split()[0]) == (level, kind)


def test_a_folder_that_may_not_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(machine.tempfile, "TemporaryDirectory", refuse)
    found = machine.writing(tmp_path)
    assert (found.level, "runs_dir" in found.remedy) == ("fail", True)


def test_a_container_limit_counts(tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text("1073741824\n")
    assert machine.cgroup_memory_limit(limit) == GB
    limit.write_text("max\n")
    assert machine.cgroup_memory_limit(limit) is None


def test_gpus() -> None:
    free = {"name": "A", "free": 70 * GB, "total": 80 * GB}
    assert packages.gpus({**TORCH, "gpus": [free], "cuda_build": "12.8"}, nvidia_smi=True).level == "ok"
    assert packages.gpus({**TORCH, "gpus": [{**free, "free": GB}]}, nvidia_smi=True).level == "warn"
    assert "CPU build" in packages.gpus(TORCH, nvidia_smi=True).seen
    assert "driver" in packages.gpus({**TORCH, "cuda_build": "12.8"}, nvidia_smi=True).remedy
    assert packages.gpus(TORCH, nvidia_smi=False).level == "ok"


def levels(findings: Iterator[Finding]) -> dict[str, str]:
    return {finding.name: finding.level for finding in findings}


def test_packages_that_are_whole() -> None:
    found = levels(packages.check_packages(TOLD, ""))
    assert {found[name] for name in ("torch", "transformers", "plugins", "gpu")} == {"ok"}


def test_a_missing_torch_and_a_missing_kind_of_plugin_are_failures() -> None:
    told = [{"topic": "torch", "error": "ModuleNotFoundError: No module named 'torch'"}, *PLUGINS[1:]]
    found = {finding.name: finding for finding in packages.check_packages(told, "")}
    assert found["torch"].level == "fail"
    assert (found["plugins"].level, "engines" in found["plugins"].seen) == ("fail", True)


def test_a_broken_plugin_is_a_warning_with_its_reason() -> None:
    broken = {"topic": "plugin", "kind": "envs", "name": "bad", "package": "prl-bad", "problem": "ImportError: no x"}
    found = {finding.name: finding for finding in packages.check_packages([*TOLD, broken], "")}
    assert found["plugin envs/bad"] == Finding(
        "plugin envs/bad",
        "warn",
        "ImportError: no x",
        "reinstall or remove prl-bad; it is an error only where it is used",
    )


def test_a_library_that_brings_the_probe_down_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        'import os; print(\'{"topic": "library", "name": "transformers", "version": "5"}\', flush=True); os.abort()'
    )
    run = subprocess.run
    monkeypatch.setattr(packages.subprocess, "run", lambda command, **more: run([sys.executable, "-c", script], **more))
    told, broke = packages.probe()
    found = {finding.name: finding for finding in packages.check_packages(told, broke)}
    assert (found["imports"].level, "after transformers" in found["imports"].seen) == ("fail", True)


def test_a_probe_that_hangs_keeps_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    script = 'import time; print(\'{"topic": "torch", "error": "x"}\', flush=True); time.sleep(60)'
    run = subprocess.run
    monkeypatch.setattr(packages.subprocess, "run", lambda command, **more: run([sys.executable, "-c", script], **more))
    told, broke = packages.probe(timeout=1)
    assert told == [{"topic": "torch", "error": "x"}]
    assert "no answer within 1 s" in broke


def test_the_setup(project: Path) -> None:
    model = project / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    sets = [f"model.path={model}", "engine.replicas=6", "trainer.processes=4", "trainer.threads=1", "engine.threads=1"]
    config = load_config(["run.toml"], sets).config
    found = {finding.name: finding for finding in setup.check_setup(config, TOLD)}
    assert "tokenizer_config.json, *.safetensors" in found["model"].seen
    assert found["devices"].seen.startswith("10 compute threads on")
    gpu = {**TORCH, "gpus": [{"name": "A", "free": 1, "total": 1}] * 8}
    assert setup.devices(config, gpu).level == "warn"


def test_a_supervised_setup_has_no_engine(project: Path) -> None:
    (project / "sft.toml").write_text('[model]\npath = "org/model"\n[[data.train]]\npath = "org/data"\n')
    config = load_config(["sft.toml"], ["trainer.processes=100", "trainer.threads=4"], SftConfig).config
    found = {finding.name: finding for finding in setup.check_setup(config, TOLD)}
    assert set(found) == {"model", "devices"}
    assert found["devices"].seen.startswith("400 compute threads on")
    assert found["devices"].remedy == "set trainer.threads = 1"
    gpu = {**TORCH, "gpus": [{"name": "A", "free": 1, "total": 1}] * 8}
    assert setup.devices(config, gpu).seen == "100 trainer processes on 8 GPUs"


@pytest.mark.parametrize(("told", "code"), [(TOLD, 0), ([TORCH, {"topic": "end"}], 3)])
def test_the_exit_code_tells_whether_it_is_fit(
    project: Path, prl: Any, monkeypatch: pytest.MonkeyPatch, told: list[dict[str, Any]], code: int
) -> None:
    monkeypatch.setattr(packages, "probe", lambda: (told, ""))
    monkeypatch.setattr(packages, "requirements", lambda: iter(()))
    monkeypatch.setattr(machine, "check_machine", lambda runs_dir: iter([Finding("disk", "ok", "plenty")]))
    assert prl("doctor").exit_code == code
    answer = json.loads(prl("doctor", "--json").stdout)
    assert answer["fit"] == (code == 0)
    assert all(finding["remedy"] for finding in answer["findings"] if finding["level"] != "ok")
