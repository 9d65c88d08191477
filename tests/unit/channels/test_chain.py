"""Versions that follow one another, full and as deltas, over every transport that needs no GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from prl import faults
from prl.errors import StoreError, WeightsError
from prl.messages import WeightsRef
from prl.protocols import ChannelPlugin, ChannelSender
from prl.testing.numerics import assert_same_bits
from prl_channels import channel as channels
from prl_channels.config import FilesystemConfig, ShmConfig

from .models import stepped, weights

Make = Callable[..., ChannelPlugin]


@pytest.fixture(params=["filesystem", "shm"])
def make(request: pytest.FixtureRequest) -> Make:
    def build(**settings: Any) -> ChannelPlugin:
        settings = {"encoding": "delta", "visibility_s": 0.05, **settings}
        if request.param == "filesystem":
            return channels.filesystem(FilesystemConfig(**settings))
        return channels.shm(ShmConfig(**settings))

    return build


def history(versions: int, share: float = 0.02) -> list[dict[str, Tensor]]:
    """What a trainer publishes, version by version."""
    made = [weights()]
    for version in range(1, versions):
        made.append(stepped(made[-1], version, share))
    return made


def send(sender: ChannelSender, version: int, tensors: dict[str, Tensor], incarnation: int = 0) -> WeightsRef:
    return sender.send(version, incarnation, tensors.items(), [], 0.0)


@pytest.mark.parametrize("shard_bytes", [1, 3000, 2_000_000_000])
@pytest.mark.parametrize("encoding", ["full", "delta"])
def test_every_version_arrives_bit_for_bit_whoever_reads_it(
    make: Make, tmp_path: Path, encoding: str, shard_bytes: int
) -> None:
    channel = make(encoding=encoding, shard_bytes=shard_bytes)
    sender, steady = channel.sender(tmp_path), channel.receiver()
    sent = []
    for version, tensors in enumerate(history(6)):
        sent.append(send(sender, version, tensors))
        assert_same_bits(tensors, steady.receive(sent[-1]).tensors, f"version {version}, by a steady reader")
        late = channel.receiver().receive(sent[-1])
        assert_same_bits(tensors, late.tensors, f"version {version}, by one that has nothing")
    for version in (0, 4, 2):
        assert_same_bits(history(6)[version], steady.receive(sent[version]).tensors, f"version {version}, again")
    sizes = [reference.num_bytes for reference in sent]
    if encoding == "full":
        assert len(set(sizes)) == 1
    else:
        assert all(size < 0.2 * sizes[0] for size in sizes[1:]), sizes


def test_a_reader_may_skip_versions(make: Make, tmp_path: Path) -> None:
    """T4: what it has is no base of what it reads, but the versions between are there."""
    channel = make()
    sender, receiver = channel.sender(tmp_path), channel.receiver()
    sent = [send(sender, version, tensors) for version, tensors in enumerate(history(6))]
    sender.release([1, 2, 3, 4])
    for version in (0, 5):
        assert_same_bits(history(6)[version], receiver.receive(sent[version]).tensors, f"version {version}")


def test_what_a_kept_version_builds_on_outlives_its_release_but_is_no_version(make: Make, tmp_path: Path) -> None:
    """T11: a reader that is 70 s, or many versions, late finds what was announced to it, and only that."""
    channel = make()
    sender = channel.sender(tmp_path)
    sent = [send(sender, version, tensors) for version, tensors in enumerate(history(5))]
    sender.release([0, 1, 3])
    for version in (0, 1, 3):
        with pytest.raises(WeightsError, match="it was released"):
            channel.receiver().receive(sent[version])
    for version in (2, 4):
        assert_same_bits(history(5)[version], channel.receiver().receive(sent[version]).tensors, f"version {version}")
    sender.release([4])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v_000000", "v_000001", "v_000002"]
    sender.release([2])
    assert not list(tmp_path.iterdir())


def test_a_chain_has_an_end(make: Make, tmp_path: Path) -> None:
    sizes = {}
    for settings in ({"chain_length": 2}, {"chain_length": 100, "chain_share": 0.1}):
        sender = make(**settings).sender(tmp_path)
        sizes[settings["chain_length"]] = [send(sender, v, tensors).num_bytes for v, tensors in enumerate(history(8))]
    full = sizes[2][0]
    assert [size > full / 2 for size in sizes[2]] == [True, False, False, True, False, False, True, False]
    followed = 0
    for size in sizes[100][1:]:
        assert (size > full / 2) == (followed > 0.1 * full)
        followed = 0 if size > full / 2 else followed + size


def test_when_a_chain_ends_its_versions_go(make: Make, tmp_path: Path) -> None:
    sender = make(chain_length=2).sender(tmp_path)
    for version, tensors in enumerate(history(5)):
        send(sender, version, tensors)
        sender.release([version - 1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v_000003", "v_000004"]


def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {("other" if name == "large" else name): tensor for name, tensor in tensors.items()}


def reshaped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**tensors, "large": tensors["large"].view(200, 200)}


def retyped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**tensors, "large": tensors["large"].half()}


def shorter(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**tensors, "large": tensors["large"][:-1]}


def added(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"new": torch.ones(3), **tensors}


def removed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name != "large"}


def turned(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(reversed(tensors.items()))


@pytest.mark.parametrize("shard_bytes", [3000, 2_000_000_000])
@pytest.mark.parametrize("change", [renamed, reshaped, retyped, shorter, added, removed, turned])
def test_another_set_of_tensors_is_sent_in_full(make: Make, tmp_path: Path, change: Any, shard_bytes: int) -> None:
    channel = make(shard_bytes=shard_bytes)
    sender, receiver = channel.sender(tmp_path), channel.receiver()
    first, second, third = history(3)
    receiver.receive(send(sender, 1, first))
    for version, tensors in ((2, change(second)), (3, change(third))):
        reference = send(sender, version, tensors)
        assert_same_bits(tensors, receiver.receive(reference).tensors, f"version {version}")
        assert_same_bits(tensors, channel.receiver().receive(reference).tensors, f"version {version}, from nothing")


def test_when_everything_changes_every_version_is_full_and_none_is_larger(make: Make, tmp_path: Path) -> None:
    sender, plain = make().sender(tmp_path / "a"), make(encoding="full").sender(tmp_path / "b")
    random = torch.Generator().manual_seed(0)
    for version in range(4):
        tensors = {"w": torch.randn(1000, generator=random), "none": torch.zeros(0)}
        sent = send(sender, version, tensors)
        assert sent.num_bytes == send(plain, version, tensors).num_bytes
        sender.release([version - 1])
        assert [path.name for path in (tmp_path / "a").iterdir()] == [f"v_{version:06d}"], "nothing builds on another"


def test_nothing_changes(make: Make, tmp_path: Path) -> None:
    channel = make()
    sender, receiver = channel.sender(tmp_path), channel.receiver()
    receiver.receive(send(sender, 1, weights()))
    same = send(sender, 2, weights())
    assert same.num_bytes == 0
    assert_same_bits(weights(), receiver.receive(same).tensors, "the same again")
    assert_same_bits(weights(), channel.receiver().receive(same).tensors, "the same, from nothing")


def test_what_is_held_stays_valid_while_later_versions_come(make: Make, tmp_path: Path) -> None:
    """An engine goes back to the former version when the probes of the new one do not agree."""
    channel = make()
    sender, receiver = channel.sender(tmp_path), channel.receiver()
    held = []
    for version, tensors in enumerate(history(4)):
        held.append(receiver.receive(send(sender, version, tensors)))
        sender.release([version - 1])
    for version, tensors in enumerate(history(4)):
        assert_same_bits(tensors, held[version].tensors, f"version {version}")


def test_changes_are_applied_to_nothing_but_their_base(make: Make, tmp_path: Path) -> None:
    """A reader whose copy was written to reads the chain anew."""
    channel = make()
    sender, receiver = channel.sender(tmp_path), channel.receiver()
    first, second, third = history(3)
    receiver.receive(send(sender, 1, first)).tensors["large"].zero_()
    got = receiver.receive(send(sender, 2, second))
    assert_same_bits(second, got.tensors, "after version 1 was spoiled")
    got.tensors["steps"].zero_()
    assert_same_bits(third, receiver.receive(send(sender, 3, third)).tensors, "after version 2 was spoiled")


def test_after_a_rollback_a_chain_begins_anew(make: Make, tmp_path: Path) -> None:
    channel = make()
    sender, receiver = channel.sender(tmp_path), channel.receiver()
    first, second, third = history(3)
    full = send(sender, 1, first)
    receiver.receive(full)
    receiver.receive(send(sender, 2, second))
    again = send(sender, 2, third, incarnation=1)
    assert again.num_bytes >= full.num_bytes
    assert_same_bits(third, receiver.receive(again).tensors, "version 2 of incarnation 1")
    once_more = send(sender, 2, second, incarnation=1)
    assert once_more.num_bytes >= full.num_bytes
    assert_same_bits(second, receiver.receive(once_more).tensors, "version 2 of incarnation 1, sent twice")


def test_a_new_sender_begins_with_a_full_version(make: Make, tmp_path: Path) -> None:
    """T12: the trainer was killed; its successor knows nothing of the chain, a reader still has its end."""
    channel = make()
    former, receiver = channel.sender(tmp_path), channel.receiver()
    made = history(4)
    for version in range(3):
        receiver.receive(send(former, version, made[version]))
    sender = channel.sender(tmp_path)
    reference = send(sender, 3, made[3], incarnation=1)
    assert_same_bits(made[3], receiver.receive(reference).tensors, "the successor's first version")
    sender.release([2])
    assert [path.name for path in tmp_path.iterdir()] == ["v_000003"]


@pytest.fixture
def inject() -> Iterator[Callable[..., None]]:
    def arm(**fault: Any) -> None:
        faults.install("trainer", plan=[faults.Fault(role="trainer", **fault)])

    yield arm
    faults.install("trainer", plan=[])


@pytest.mark.parametrize(
    ("point", "at"), [("channel.segment", 1), ("channel.segment", 2), ("channel.send", 1), ("channel.commit", 1)]
)
def test_a_full_disk_leaves_the_former_versions_and_the_next_one_is_whole(
    make: Make, tmp_path: Path, inject: Callable[..., None], point: str, at: int
) -> None:
    channel = make(shard_bytes=3000)
    sender, receiver = channel.sender(tmp_path), channel.receiver()
    first, second, third = history(3)
    former = send(sender, 1, first)
    receiver.receive(former)
    files = len(os.listdir("/proc/self/fd"))
    inject(point=point, action="disk_full", at=at)
    with pytest.raises(StoreError, match=r"version 2.*No space left.*free space"):
        send(sender, 2, second)
    assert [path.name for path in tmp_path.iterdir()] == ["v_000001"]
    assert len(os.listdir("/proc/self/fd")) == files, "what was kept of the version that failed was dropped"
    assert_same_bits(first, channel.receiver().receive(former).tensors, "the former version")
    faults.install("trainer", plan=[])
    for version, tensors in ((2, second), (3, third)):
        assert_same_bits(tensors, receiver.receive(send(sender, version, tensors)).tensors, f"version {version}")


def test_memory_is_given_back(make: Make, tmp_path: Path) -> None:
    channel = make(shard_bytes=3000)
    files = len(os.listdir("/proc/self/fd"))
    sender, receiver = channel.sender(tmp_path), channel.receiver()
    for version, tensors in enumerate(history(3)):
        receiver.receive(send(sender, version, tensors))
    sender.release([0, 1, 2])
    assert len(os.listdir("/proc/self/fd")) == files
