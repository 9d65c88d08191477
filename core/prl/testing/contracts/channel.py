"""The contract of a weight channel: exactly what was sent arrives, or an error does; nothing goes before its release.

Torch comes in through `prl.testing.numerics`, so this module can be imported without it. A channel that needs devices
this machine lacks raises `prl.errors.EnvironmentNotFit` when its sender or receiver is made; its checks are skipped.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from prl.errors import PrlError, WeightsError
from prl.messages import WeightsRef
from prl.protocols import Adapter, ChannelPlugin, ChannelReceiver, ChannelSender, Probe

Make = Callable[[], ChannelPlugin]
PROBES = [Probe([3, 1, 2], [0.0, -0.25, -1.5], 2), Probe([7], [0.0])]


def what_is_sent_arrives_bit_for_bit(make: Make) -> None:
    with ends(make) as (sender, receiver):
        weights = send(sender, 12)
        assert (weights.version, weights.incarnation) == (12, 0), f"the reference names {weights}"
        assert weights.num_bytes > 0, "num_bytes of the reference is 0"
        expect(receiver, weights, seed=12)


def probes_and_tolerance_travel_along(make: Make) -> None:
    with ends(make) as (sender, receiver):
        got = receiver.receive(send(sender, 1))
        assert got.probes == PROBES, f"the probes arrived as {got.probes}"
        assert got.tolerance == 0.125, f"the tolerance arrived as {got.tolerance}, sent was 0.125"


def an_adapter_arrives_with_its_description(make: Make) -> None:
    adapter = Adapter(8, 16.0, ("q_proj", "v_proj"))
    with ends(make) as (sender, receiver):
        weights = sender.send(3, 0, iter(_tensors(3).items()), PROBES, 0.125, adapter)
        assert weights.adapter, "the reference to an adapter does not say that it is one"
        got = receiver.receive(weights)
        assert got.adapter == adapter, f"the adapter's description arrived as {got.adapter}"
        expect(receiver, weights, seed=3)
        whole = send(sender, 4)
        assert not whole.adapter and receiver.receive(whole).adapter is None, "whole weights are said to be an adapter"


def several_readers_may_read_one_version(make: Make) -> None:
    with ends(make) as (sender, receiver):
        weights = send(sender, 4)
        for reader in (receiver, make().receiver(), receiver):
            expect(reader, weights, seed=4)


def nothing_goes_before_it_is_released(make: Make) -> None:
    """However late a reader is: only its acknowledgement, which comes as a release, ends a version."""
    with ends(make) as (sender, receiver):
        sent = [send(sender, version) for version in range(4)]
        sender.release([1])
        for version in (0, 2, 3):
            expect(receiver, sent[version], seed=version)
        refuses(receiver, sent[1], "a released version")


def releasing_is_idempotent(make: Make) -> None:
    with ends(make) as (sender, receiver):
        kept = send(sender, 2)
        send(sender, 1)
        sender.release([1])
        sender.release([1, 0, 99])
        expect(receiver, kept, seed=2)


def a_version_sent_again_replaces_the_former(make: Make) -> None:
    """After a rollback the trainer, in its next incarnation, makes other weights of the same version."""
    with ends(make) as (sender, receiver):
        former = send(sender, 5, seed=1)
        latter = send(sender, 5, incarnation=1, seed=2)
        expect(receiver, latter, seed=2)
        refuses(receiver, former, "weights of a former incarnation")


def an_unknown_version_is_refused(make: Make) -> None:
    with ends(make) as (sender, receiver):
        weights = send(sender, 1)
        refuses(receiver, msgspec.structs.replace(weights, version=2), "another version than announced")
        refuses(receiver, msgspec.structs.replace(weights, location=f"{weights.location}-elsewhere"), "a wrong place")


def an_interrupted_send_leaves_the_former_version_whole(make: Make) -> None:
    with ends(make) as (sender, receiver):
        former = send(sender, 1)

        def broken() -> Iterator[tuple[str, object]]:
            yield from _tensors(2).items()
            raise RuntimeError("the source is gone")

        try:
            sender.send(2, 0, broken(), PROBES, 0.125)
        except (RuntimeError, PrlError):
            pass
        else:
            raise AssertionError("the source of the tensors raised, and send returned")
        expect(receiver, former, seed=1)
        expect(receiver, send(sender, 2), seed=2)


# --- helpers ----------------------------------------------------------------------------------------------


@contextmanager
def ends(make: Make) -> Iterator[tuple[ChannelSender, ChannelReceiver]]:
    """Both halves of one channel, in a directory of their own."""
    with tempfile.TemporaryDirectory(prefix="prl-channel-") as directory:
        yield make().sender(Path(directory)), make().receiver()


def send(sender: ChannelSender, version: int, *, incarnation: int = 0, seed: int | None = None) -> WeightsRef:
    tensors = _tensors(version if seed is None else seed)
    return sender.send(version, incarnation, iter(tensors.items()), PROBES, 0.125)


def expect(receiver: ChannelReceiver, weights: WeightsRef, *, seed: int) -> None:
    from prl.testing.numerics import assert_same_bits

    assert_same_bits(_tensors(seed), receiver.receive(weights).tensors, f"version {weights.version}")


def refuses(receiver: ChannelReceiver, weights: WeightsRef, what: str) -> None:
    try:
        receiver.receive(weights)
    except WeightsError as error:
        assert str(error), f"{what} was refused without a word"
        return
    raise AssertionError(f"{what} was accepted")


def _tensors(seed: int) -> dict[str, object]:
    from prl.testing.numerics import random_tensors

    return dict(random_tensors(seed))


CHECKS = [
    what_is_sent_arrives_bit_for_bit,
    probes_and_tolerance_travel_along,
    an_adapter_arrives_with_its_description,
    several_readers_may_read_one_version,
    nothing_goes_before_it_is_released,
    releasing_is_idempotent,
    a_version_sent_again_replaces_the_former,
    an_unknown_version_is_refused,
    an_interrupted_send_leaves_the_former_version_whole,
]
