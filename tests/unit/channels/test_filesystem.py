"""The filesystem channel: what is sent arrives bit for bit, and nothing damaged, stale or half written is accepted."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from prl import faults
from prl.errors import StoreError, WeightsError
from prl.messages import WeightsRef
from prl.protocols import Probe
from prl_channels.channel import filesystem as build
from prl_channels.config import FilesystemConfig
from prl_channels.shelf import MANIFEST as NAME

PROBES = [Probe([1, 2, 3], [0.0, -0.5, -1.25])]
FAST = FilesystemConfig(visibility_s=0.05)


def tensors(scale: float = 1.0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 4, generator=random) * scale
    return {
        "embed.weight": weight,
        "head.weight": weight,  # tied
        "norm": torch.ones(3, dtype=torch.bfloat16) * scale,
        "turned": torch.randn(5, 3, generator=random).T,
        "half": torch.randn(3, generator=random).half(),
        "steps": torch.tensor(7),
        "mask": torch.tensor([True, False, True]),
        "small": torch.tensor([1, 2, 255], dtype=torch.uint8),
        "eighths": torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn),
        "nothing": torch.zeros(0, 4),
    }


def send(directory: Path, version: int = 12, incarnation: int = 0, config: FilesystemConfig = FAST) -> WeightsRef:
    sender = build(config).sender(directory)
    return sender.send(version, incarnation, tensors(version).items(), PROBES, 1e-3)


def receive(weights: WeightsRef, config: FilesystemConfig = FAST) -> dict[str, Tensor]:
    return dict(build(config).receiver().receive(weights).tensors)


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape, name
        assert (
            got[name]
            .contiguous()
            .reshape(-1)
            .view(torch.uint8)
            .equal(tensor.contiguous().reshape(-1).view(torch.uint8))
        ), name


@pytest.mark.parametrize("shard_bytes", [1, 100, 2_000_000_000])
@pytest.mark.parametrize("fsync", [False, True])
def test_what_is_sent_arrives_bit_for_bit(tmp_path: Path, shard_bytes: int, fsync: bool) -> None:
    config = FilesystemConfig(shard_bytes=shard_bytes, fsync=fsync, visibility_s=0.05)
    weights = send(tmp_path, config=config)
    assert Path(weights.location) == tmp_path / "v_000012" and Path(weights.location).is_absolute()
    assert [path.name for path in tmp_path.iterdir()] == ["v_000012"]
    files = list(Path(weights.location).glob("*.safetensors"))
    assert len(files) == {1: 10, 100: 3, 2_000_000_000: 1}[shard_bytes]
    assert weights.num_bytes == sum(path.stat().st_size for path in files)
    got = build(config).receiver().receive(weights)
    assert_same(dict(got.tensors), tensors(12))
    assert got.probes == PROBES and got.tolerance == 1e-3
    read_by_the_library: dict[str, Tensor] = {}
    for path in files:
        read_by_the_library.update(load_file(path))
    assert_same(read_by_the_library, tensors(12))


def test_received_tensors_may_be_changed_without_changing_the_files(tmp_path: Path) -> None:
    weights = send(tmp_path)
    receive(weights)["embed.weight"].zero_()
    assert_same(receive(weights), tensors(12))


def test_a_sender_may_reuse_the_memory_of_a_tensor_for_the_next(tmp_path: Path) -> None:
    def gathered() -> Iterator[tuple[str, Tensor]]:
        buffer = torch.empty(4)
        for index in range(3):
            yield f"layer.{index}", buffer.fill_(index)

    weights = build(FAST).sender(tmp_path).send(1, 0, gathered(), [], 0.0)
    assert [receive(weights)[f"layer.{index}"][0].item() for index in range(3)] == [0, 1, 2]


def test_nothing_is_deleted_before_it_is_released(tmp_path: Path) -> None:
    """T11: a reader that is many versions late still finds what was announced to it."""
    sender = build(FAST).sender(tmp_path)
    sent = [sender.send(version, 0, tensors(version).items(), PROBES, 1e-3) for version in range(5)]
    for version, weights in enumerate(sent):
        assert_same(receive(weights), tensors(version))
    sender.release([0, 3])
    for version, weights in enumerate(sent):
        if version in (0, 3):
            with pytest.raises(WeightsError, match="it was released"):
                receive(weights)
        else:
            assert_same(receive(weights), tensors(version))
    sender.release([0, 3, 99])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v_000001", "v_000002", "v_000004"]


def test_a_version_released_while_it_is_in_use_stays_readable(tmp_path: Path) -> None:
    sender = build(FAST).sender(tmp_path)
    weights = sender.send(1, 0, tensors().items(), PROBES, 1e-3)
    got = receive(weights)
    sender.release([1])
    assert_same(got, tensors())


def test_after_a_rollback_a_version_is_sent_again_and_only_the_new_one_is_accepted(tmp_path: Path) -> None:
    first = send(tmp_path, incarnation=0)
    second = send(tmp_path, incarnation=1)
    assert first.location == second.location
    assert_same(receive(second), tensors(12))
    with pytest.raises(WeightsError, match="version 12 of incarnation 1, announced was version 12 of incarnation 0"):
        receive(first)


def damage_shard(directory: Path) -> str:
    path = directory / "00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    return r"00000\.safetensors: corrupted: its checksum is"


def truncate_shard(directory: Path) -> str:
    path = directory / "00000.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    return r"00000\.safetensors: \d+ bytes, the manifest says \d+: truncated"


def remove_shard(directory: Path) -> str:
    (directory / "00000.safetensors").unlink()
    return r"00000\.safetensors: cannot be read \(No such file"


def remove_manifest(directory: Path) -> str:
    (directory / NAME).unlink()
    return r"manifest\.json: cannot read the manifest of version 12"


def truncate_manifest(directory: Path) -> str:
    path = directory / NAME
    path.write_bytes(path.read_bytes()[:-20])
    return r"manifest\.json: not a manifest of weights"


def change_manifest(sealed: bool = True, **changes: object) -> object:
    def change(directory: Path) -> str:
        path = directory / NAME
        content = json.loads(path.read_bytes())
        for key, value in changes.items():
            former = content["manifest"][key]
            content["manifest"][key] = value(former) if callable(value) else value
        if sealed:
            text = msgspec.json.encode(content["manifest"])
            content = {"sha256": hashlib.sha256(text).hexdigest(), "manifest": msgspec.Raw(text)}
        path.write_bytes(msgspec.json.encode(content))
        return r"(version 12|/v_000012(/manifest\.json|/00000\.safetensors)?): " if sealed else "not the manifest that"

    return change


def reshape(entries: dict[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    return {**entries, "embed.weight": {**entries["embed.weight"], "shape": [4, 600]}}


def retype(entries: dict[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    return {**entries, "norm": {**entries["norm"], "dtype": "complex64"}}


def another_part(entries: dict[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    return {**entries, "norm": {**entries["norm"], "part": 7}}


def escape(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**parts[0], "segment": {**parts[0]["segment"], "place": "../../secret.safetensors"}}]


def outside(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    (form, start, size, *rest), *_ = parts[0]["blocks"]
    return [{**parts[0], "blocks": [[form, start, size + 99, *rest]]}]


def half(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    (form, start, size, *rest), *_ = parts[0]["blocks"]
    return [{**parts[0], "blocks": [[form, start, size // 2, *rest]]}]


@pytest.mark.parametrize(
    "damage",
    [
        damage_shard,
        truncate_shard,
        remove_shard,
        remove_manifest,
        truncate_manifest,
        change_manifest(sealed=False, tolerance=9.0),
        change_manifest(schema=1),
        change_manifest(schema=3),
        change_manifest(version=13),
        change_manifest(tensors=reshape),
        change_manifest(tensors=retype),
        change_manifest(tensors=another_part),
        change_manifest(parts=escape),
        change_manifest(parts=outside),
        change_manifest(parts=half),
        change_manifest(parts=[]),
        change_manifest(probes="none"),
    ],
)
def test_damage_is_refused_by_name(tmp_path: Path, damage) -> None:  # type: ignore[no-untyped-def]
    weights = send(tmp_path)
    message = damage(Path(weights.location))
    with pytest.raises(WeightsError, match=message):
        receive(weights)


def test_files_that_become_visible_late_are_waited_for(tmp_path: Path) -> None:
    """T30: the announcement, and even the manifest, overtake the data on a network file system."""
    weights = send(tmp_path)
    directory = Path(weights.location)
    shard, content = directory / "00000.safetensors", (directory / "00000.safetensors").read_bytes()
    shard.write_bytes(content[:100])
    hidden = tmp_path / "hidden"
    (directory / NAME).rename(hidden)

    def appear() -> None:
        time.sleep(0.1)
        hidden.rename(directory / NAME)
        time.sleep(0.1)
        shard.write_bytes(content[:-1] + b"\0")
        time.sleep(0.1)
        shard.write_bytes(content)

    thread = threading.Thread(target=appear)
    thread.start()
    assert_same(receive(weights, FilesystemConfig(visibility_s=10.0)), tensors(12))
    thread.join()


def test_the_wait_has_an_end(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(WeightsError):
        receive(WeightsRef(1, 0, str(tmp_path / "v_000001")), FilesystemConfig(visibility_s=0.2))
    assert 0.2 <= time.monotonic() - started < 2.0


def test_a_failing_tensor_leaves_nothing_behind_and_a_retry_works(tmp_path: Path) -> None:
    """T12, the trainer's side: the source dies in the middle of a transfer."""
    sender = build(FAST).sender(tmp_path)

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield "first", torch.ones(3)
        raise RuntimeError("rank 3 is gone")

    with pytest.raises(RuntimeError, match="rank 3 is gone"):
        sender.send(1, 0, broken(), [], 0.0)
    assert not list(tmp_path.iterdir())
    assert_same(receive(sender.send(1, 0, tensors().items(), PROBES, 0.0)), tensors())


@pytest.fixture
def inject() -> Iterator[object]:
    def arm(**fault: object) -> None:
        faults.install("trainer", plan=[faults.Fault(role="trainer", **fault)])  # type: ignore[arg-type]

    yield arm
    faults.install("trainer", plan=[])


def test_injected_faults(tmp_path: Path, inject) -> None:  # type: ignore[no-untyped-def]
    former = send(tmp_path, version=11)
    inject(point="channel.send", action="disk_full", at=1)
    with pytest.raises(StoreError, match=r"version 12.*No space left.*free space"):
        send(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["v_000011"]
    assert_same(receive(former), tensors(11))
    weights = send(tmp_path)
    inject(point="channel.receive", action="error", at=1)
    with pytest.raises(faults.InjectedFault):
        receive(weights)
    assert_same(receive(weights), tensors(12))


def test_a_sender_clears_away_what_a_dead_one_left(tmp_path: Path) -> None:
    kept = send(tmp_path, version=3)
    left = tmp_path / "v_000004.tmp"
    left.mkdir()
    (left / "00000.safetensors").write_bytes(b"half")
    build(FAST).sender(tmp_path)
    assert not left.exists()
    assert_same(receive(kept), tensors(3))


def test_whole_versions_of_a_dead_sender_go_with_the_first_release(tmp_path: Path) -> None:
    inherited = [send(tmp_path, version=version) for version in (3, 4, 5)]
    sender = build(FAST).sender(tmp_path)
    again = sender.send(4, 1, tensors(4).items(), PROBES, 1e-3)
    newer = sender.send(6, 1, tensors(6).items(), PROBES, 1e-3)
    assert_same(receive(inherited[2]), tensors(5))
    sender.release([2])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v_000004", "v_000006"]
    assert_same(receive(again), tensors(4))
    assert_same(receive(newer), tensors(6))


def test_what_cannot_be_represented_is_refused_before_anything_is_visible(tmp_path: Path) -> None:
    sender = build(FAST).sender(tmp_path)
    with pytest.raises(WeightsError, match="'wave' is torch.complex64"):
        sender.send(1, 0, [("wave", torch.zeros(2, dtype=torch.complex64))], [], 0.0)
    with pytest.raises(WeightsError, match="two tensors are called 'twin'"):
        sender.send(1, 0, [("twin", torch.zeros(1)), ("twin", torch.ones(1))], [], 0.0)
    assert not list(tmp_path.iterdir())


def test_a_manifest_is_plain_json(tmp_path: Path) -> None:
    weights = send(tmp_path)
    content = msgspec.json.decode((Path(weights.location) / NAME).read_bytes())["manifest"]
    assert content["schema"] == 2 and content["version"] == 12 and content["incarnation"] == 0
    assert content["tensors"]["norm"]["dtype"] == "bfloat16" and content["tensors"]["norm"]["shape"] == [3]
    assert content["parts"][0]["segment"]["place"] == "00000.safetensors"
