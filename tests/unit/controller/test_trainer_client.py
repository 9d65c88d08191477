"""Samples are sent to the rank that leads its row, and to no other; every rank takes part in every call."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prl.controller.clients import WireTrainer
from prl.controller.hub import Connection
from prl.messages import CHECKPOINT, NOTHING, SNAPSHOT, CheckpointReply, TrainBatch, TrainReport
from prl.testing.contracts.trainer import batches


class Rank:
    """The far end of a rank: what it was sent, as bytes."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.sent: list[bytes] = []
        self.methods: list[str] = []

    async def call(self, method: Any, request: Any, *, timeout: float | None) -> Any:
        self.methods.append(method.name)
        self.sent.append(msgspec.msgpack.encode(request))
        if method is CHECKPOINT:
            return CheckpointReply({f"rank-{self.number}": "digest"})
        if method is SNAPSHOT:
            return NOTHING
        return TrainReport(0, 1, 1, {}, 0.0)


def connected(places: list[dict[str, Any]]) -> tuple[WireTrainer, list[Rank]]:
    ranks = [Rank(number) for number in range(len(places))]
    connections = [
        Connection("trainer", replica, rank, "", 0, info)  # type: ignore[arg-type]
        for replica, (rank, info) in enumerate(zip(ranks, places, strict=True))
    ]
    return WireTrainer(connections[::-1]), ranks  # in whatever order they registered


@pytest.mark.parametrize(
    ("places", "leaders"),
    [
        ([{}, {}], [0, 1]),  # a trainer that knows nothing of shared rows
        ([{"row_rank": 0}, {"row_rank": 1}, {"row_rank": 0}, {"row_rank": 1}], [0, 2]),
        ([{"row_rank": place} for place in range(4)], [0]),
    ],
)
def test_bodies_go_to_leaders_alone(places: list[dict[str, Any]], leaders: list[int]) -> None:
    client, ranks = connected(places)
    assert client.dp_size == len(leaders)
    sent = batches(1, client.dp_size)
    asyncio.run(client.train(sent))
    for replica, rank in enumerate(ranks):
        (data,) = rank.sent
        if replica in leaders:
            assert data == msgspec.msgpack.encode(sent[leaders.index(replica)])
        else:
            batch = msgspec.msgpack.decode(data, type=TrainBatch)
            assert (batch.step, batch.version, batch.updates) == (1, 0, [])
            assert len(data) < 100 < min(len(ranks[leader].sent[0]) for leader in leaders)
    asyncio.run(client.snapshot(1))
    files = asyncio.run(client.checkpoint(1, Path("/somewhere")))
    assert files == {f"rank-{number}": "digest" for number in range(len(ranks))}, "every rank has written its own"
    assert all(rank.methods == ["train", "snapshot", "checkpoint"] for rank in ranks)
