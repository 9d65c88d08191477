"""Checkpoints: complete ones only, whatever else lies in the directory (scenario T8), and on a disk that fills."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from prl import faults
from prl.errors import StoreError
from prl.faults import Fault
from prl.rundir import RunDir
from prl.store import Checkpoints
from prl.store.files import sha256_file


def save(run_dir: RunDir, step: int) -> Path:
    """A checkpoint as the controller makes one: the trainer's part from outside, its own, the manifest."""
    checkpoints = Checkpoints(run_dir)
    path = checkpoints.begin(step)
    (path / "trainer" / "shards").mkdir(parents=True)
    weights = path / "trainer" / "shards" / "model.safetensors"
    weights.write_bytes(b"weights of step %d" % step)
    controller = checkpoints.write_part(step, "controller", {"state.msgpack": b"state"})
    parts = {"trainer": {"shards/model.safetensors": sha256_file(weights)}, "controller": controller}
    return checkpoints.commit(step, parts, {"version": step}).path


def latest_step(run_dir: RunDir) -> int | None:
    found, _ = Checkpoints(run_dir).latest()
    return found.step if found else None


def test_a_checkpoint_comes_back(run_dir: RunDir) -> None:
    save(run_dir, 10)
    found, warnings = Checkpoints(run_dir).latest()
    assert found is not None
    assert (found.step, found.path, warnings) == (10, run_dir.checkpoint(10), [])
    assert found.manifest.facts == {"version": 10}
    assert (found.part("controller") / "state.msgpack").read_bytes() == b"state"
    assert found.manifest.parts["trainer"]["shards/model.safetensors"].size == len(b"weights of step 10")
    assert [path.name for path in run_dir.checkpoints.iterdir()] == ["step_000010"]


def test_none_yet(run_dir: RunDir) -> None:
    assert Checkpoints(run_dir).latest() == (None, [])


def test_whatever_is_incomplete_is_passed_over_with_a_warning(run_dir: RunDir) -> None:
    save(run_dir, 9)
    half = run_dir.checkpoint(10) / "trainer"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"weights")
    Checkpoints(run_dir).begin(11)
    (run_dir.checkpoints / "step_abc").mkdir()
    (run_dir.checkpoints / "notes.txt").write_text("mine")
    found, warnings = Checkpoints(run_dir).latest()
    assert found is not None and found.step == 9
    for name in ("step_000010", "step_000011.tmp", "step_abc", "notes.txt"):
        assert any(name in warning for warning in warnings), name
    assert len(warnings) == 4


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "manifest", "renamed", "newer"])
def test_a_damaged_checkpoint_is_passed_over(run_dir: RunDir, damage: str) -> None:
    save(run_dir, 9)
    path = save(run_dir, 10)
    weights, manifest = path / "trainer" / "shards" / "model.safetensors", path / "MANIFEST.json"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "flipped":
        weights.write_bytes(b"W" + weights.read_bytes()[1:])
    elif damage == "missing":
        weights.unlink()
    elif damage == "manifest":
        manifest.write_bytes(manifest.read_bytes()[:50])
    elif damage == "renamed":
        path.rename(run_dir.checkpoint(12))
    elif damage == "newer":
        manifest.write_text(manifest.read_text().replace('"schema_version": 1', '"schema_version": 2'))
    found, warnings = Checkpoints(run_dir).latest()
    assert found is not None and found.step == 9
    assert len(warnings) == 1 and "ignored" in warnings[0]


def test_when_every_checkpoint_is_damaged_nothing_starts_over(run_dir: RunDir) -> None:
    for step in (9, 10):
        (save(run_dir, step) / "trainer" / "shards" / "model.safetensors").write_bytes(b"")
    with pytest.raises(StoreError, match=r"no checkpoint of .* can be used: .*step_000010.*step_000009.*--clean"):
        Checkpoints(run_dir).latest()


def test_a_part_that_was_promised_and_not_saved(run_dir: RunDir) -> None:
    checkpoints = Checkpoints(run_dir)
    checkpoints.begin(1)
    with pytest.raises(StoreError, match="step_000001"):
        checkpoints.commit(1, {"trainer": {"model.safetensors": "0" * 64}}, {})
    assert latest_step(run_dir) is None


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_full_disk_leaves_the_earlier_checkpoint(run_dir: RunDir, at: int) -> None:
    """In `begin`, in the controller's part, and in the manifest."""
    save(run_dir, 9)
    faults.install("controller", plan=[Fault("controller", "checkpoint.write", "disk_full", at=at)])
    with pytest.raises(StoreError, match="disk is full"):
        save(run_dir, 10)
    assert Checkpoints(run_dir).latest()[1] == []
    assert latest_step(run_dir) == 9
    save(run_dir, 10)
    assert latest_step(run_dir) == 10


def test_saving_a_step_again_replaces_it(run_dir: RunDir) -> None:
    save(run_dir, 9)
    (run_dir.checkpoint(9) / "trainer" / "old").write_bytes(b"")
    save(run_dir, 9)
    assert latest_step(run_dir) == 9
    assert not (run_dir.checkpoint(9) / "trainer" / "old").exists()


def test_a_crash_while_replacing_leaves_the_old_one(run_dir: RunDir) -> None:
    path = save(run_dir, 9)
    path.rename(path.with_suffix(".old"))
    assert latest_step(run_dir) == 9
    save(run_dir, 9)
    save(run_dir, 10)
    assert latest_step(run_dir) == 10


def test_prune_counts_complete_checkpoints_only(run_dir: RunDir) -> None:
    for step in (1, 2, 3, 4):
        save(run_dir, step)
    (run_dir.checkpoint(4) / "MANIFEST.json").unlink()
    (run_dir.checkpoints / "step_000002.tmp").mkdir()
    (run_dir.checkpoints / "step_000009.tmp").mkdir()  # being written
    removed = Checkpoints(run_dir).prune(2)
    assert removed == [1]
    assert sorted(path.name for path in run_dir.checkpoints.iterdir()) == [
        "step_000002",
        "step_000003",
        "step_000004",
        "step_000009.tmp",
    ]


def test_what_an_attempt_that_was_killed_left_is_no_part_of_the_next(run_dir: RunDir) -> None:
    stray = Checkpoints(run_dir).begin(7) / "trainer" / "stray"
    stray.parent.mkdir()
    stray.write_bytes(b"half a tensor")
    path = save(run_dir, 7)
    assert latest_step(run_dir) == 7 and not (path / "trainer" / "stray").exists()


def test_the_new_one_counts_when_the_old_one_was_not_yet_removed(run_dir: RunDir) -> None:
    path = save(run_dir, 7)
    shutil.copytree(path, path.with_suffix(".old"))
    found, _ = Checkpoints(run_dir).latest()
    assert found is not None and found.path == run_dir.checkpoint(7)
