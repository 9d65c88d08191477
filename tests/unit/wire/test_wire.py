"""The wire: typed calls both ways, a token on every message, and no wait that outlives its peer."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest
import zmq

from prl import faults
from prl.errors import EpisodeFailed, WeightsError, WireError
from prl.messages import NOTHING, CollectRequest, Method, Nothing
from prl.wire import Client, Envelope, Peer, Server

ECHO = Method("echo", CollectRequest, list[int])
FAIL = Method("fail", Nothing, Nothing)
HANG = Method("hang", Nothing, Nothing)
TOKEN = "a" * 64


async def echo(peer: Peer, request: CollectRequest) -> list[int]:
    await asyncio.sleep(0)
    return request.episode_ids


def test_both_sides_may_call() -> None:
    async def main() -> None:
        peers: list[Peer] = []
        server = Server(TOKEN, {ECHO: echo}, on_peer=peers.append)
        client = Client(server.start(), TOKEN, {ECHO: lambda peer, request: request.episode_ids[::-1]})
        assert await client.call(ECHO, CollectRequest([1, 2]), timeout=5) == [1, 2]
        assert await peers[0].call(ECHO, CollectRequest([1, 2]), timeout=5) == [2, 1]
        client.close()
        server.close()

    asyncio.run(main())


def test_a_thousand_calls_at_once_get_their_own_answers() -> None:
    async def main() -> None:
        server = Server(TOKEN, {ECHO: echo})
        client = Client(server.start(), TOKEN)
        calls = [client.call(ECHO, CollectRequest([i] * (i % 50)), timeout=20) for i in range(1000)]
        assert await asyncio.gather(*calls) == [[i] * (i % 50) for i in range(1000)]
        client.close()
        server.close()

    asyncio.run(main())


@pytest.mark.parametrize("size", [0, 20_000, 1_000_000])
def test_payloads_of_any_size_arrive_in_order(size: int) -> None:
    """Large ones travel in a frame of their own, and none overtakes another."""

    async def main() -> None:
        arrived: list[int] = []

        def note(peer: Peer, request: CollectRequest) -> list[int]:
            arrived.append(request.episode_ids[0])
            return request.episode_ids

        server = Server(TOKEN, {ECHO: note})
        client = Client(server.start(), TOKEN)
        sizes = [1, size, 2, size, 100]
        calls = [client.call(ECHO, CollectRequest([i] * max(1, n)), timeout=20) for i, n in enumerate(sizes)]
        assert [len(reply) for reply in await asyncio.gather(*calls)] == [max(1, n) for n in sizes]
        assert arrived == [0, 1, 2, 3, 4]
        client.close()
        server.close()

    asyncio.run(main())


def test_what_was_sent_before_closing_is_delivered() -> None:
    async def main() -> None:
        arrived: list[list[int]] = []
        done = asyncio.Event()

        def take(peer: Peer, request: CollectRequest) -> list[int]:
            arrived.append(request.episode_ids)
            done.set()
            return []

        server = Server(TOKEN, {ECHO: take})
        client = Client(server.start(), TOKEN)
        await client.call(ECHO, CollectRequest([1]), timeout=5)
        done.clear()
        client.notify(ECHO, CollectRequest([2]))
        client.close()
        await asyncio.wait_for(done.wait(), 5)
        assert arrived == [[1], [2]]
        server.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("raised", "expected", "text"),
    [
        (EpisodeFailed("engine_nan", "NaN at token 3", retryable=True), EpisodeFailed, "NaN at token 3"),
        (WeightsError("checksum of model.safetensors"), WeightsError, "checksum of model.safetensors"),
        (ValueError("a bug"), WireError, "ValueError: a bug"),
    ],
)
def test_errors_arrive_as_what_they_are(raised: Exception, expected: type[Exception], text: str) -> None:
    async def fail(peer: Peer, request: Nothing) -> Nothing:
        raise raised

    async def main() -> None:
        logging.disable(logging.ERROR)
        server = Server(TOKEN, {FAIL: fail})
        client = Client(server.start(), TOKEN)
        with pytest.raises(expected, match=text) as caught:
            await client.call(FAIL, NOTHING, timeout=5)
        if isinstance(raised, EpisodeFailed):
            assert caught.value.reason == "engine_nan" and caught.value.retryable  # type: ignore[attr-defined]
        client.close()
        server.close()
        logging.disable(logging.NOTSET)

    asyncio.run(main())


def test_a_wrong_token_is_never_answered() -> None:
    served = []

    async def main() -> None:
        server = Server(TOKEN, {ECHO: lambda peer, request: served.append(1) or []})
        stranger = Client(server.start(), "b" * 64)
        with pytest.raises(WireError, match=r"did not answer within 0.2 s"):
            await stranger.call(ECHO, CollectRequest([1]), timeout=0.2)
        assert not served and not server.peers
        stranger.close()
        server.close()

    asyncio.run(main())


def test_garbage_and_pickles_are_refused_and_the_server_lives(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        server = Server(TOKEN, {ECHO: echo})
        address = server.start()
        raw = zmq.Context.instance().socket(zmq.DEALER)
        raw.connect(address)
        pickled = b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94"
        pickled += b"\x8c\x02id\x94\x85\x94R\x94."
        newer = msgspec.msgpack.encode([Envelope(99, 0, 1, "echo", b"")])
        for frames in ([b""], [pickled], [TOKEN.encode(), pickled, pickled], [TOKEN.encode(), newer]):
            raw.send_multipart(frames)
        client = Client(address, TOKEN)
        async with asyncio.timeout(5):  # the two connections are read in any order
            while "schema 99" not in caplog.text:
                await asyncio.sleep(0.01)
        assert await client.call(ECHO, CollectRequest([7]), timeout=5) == [7]
        answer = msgspec.msgpack.decode(raw.recv_multipart()[1], type=list[Envelope])[0]
        assert answer.id == 1 and b"schema 99 is newer" in answer.payload, "a newer peer need not wait for its timeout"
        raw.close(0)
        client.close()
        server.close()

    asyncio.run(main())


def test_a_wrong_payload_is_an_error_of_that_call_only() -> None:
    async def main() -> None:
        logging.disable(logging.ERROR)
        wrong = Method("echo", Nothing, list[int])
        server = Server(TOKEN, {ECHO: echo})
        client = Client(server.start(), TOKEN)
        with pytest.raises(WireError, match=r"echo"):
            await client.call(wrong, NOTHING, timeout=5)
        assert await client.call(ECHO, CollectRequest([7]), timeout=5) == [7]
        client.close()
        server.close()
        logging.disable(logging.NOTSET)

    asyncio.run(main())


def test_calls_fail_at_once_when_the_server_goes() -> None:
    async def hang(peer: Peer, request: Nothing) -> Nothing:
        await asyncio.sleep(60)
        return NOTHING

    async def main() -> float:
        lost = []
        server = Server(TOKEN, {HANG: hang})
        client = Client(server.start(), TOKEN, on_lost=lambda: lost.append(1))
        call = asyncio.create_task(client.call(HANG, NOTHING, timeout=30))
        await asyncio.sleep(0.1)
        started = asyncio.get_running_loop().time()
        server.close()
        with pytest.raises(WireError, match=r"the connection is lost"):
            await call
        assert lost == [1]
        with pytest.raises(WireError, match=r"is gone"):
            await client.call(HANG, NOTHING, timeout=30)
        client.close()
        return asyncio.get_running_loop().time() - started

    assert asyncio.run(main()) < 2


def test_calls_to_a_dropped_peer_fail_with_the_reason() -> None:
    async def main() -> None:
        peers: list[Peer] = []
        server = Server(TOKEN, {ECHO: echo}, on_peer=peers.append)
        client = Client(server.start(), TOKEN, {HANG: lambda peer, request: asyncio.sleep(60)})
        await client.call(ECHO, CollectRequest([]), timeout=5)
        call = asyncio.create_task(peers[0].call(HANG, NOTHING, timeout=60))
        await asyncio.sleep(0.05)
        server.drop(peers[0], "its process ended (exit code 3)")
        with pytest.raises(WireError, match=r"exit code 3"):
            await call
        client.close()
        server.close()

    asyncio.run(main())


def test_a_lost_message_is_a_timeout_with_a_name() -> None:
    async def main() -> None:
        server = Server(TOKEN, {ECHO: echo})
        client = Client(server.start(), TOKEN)
        # Two sends a call, its request and its reply: the second call loses its reply, the third loses nothing.
        faults.install("any", plan=[faults.Fault("*", "wire.send", "drop", at=4, only="echo")])
        try:
            assert await client.call(ECHO, CollectRequest([1]), timeout=5) == [1]
            with pytest.raises(WireError, match=r"echo: server did not answer within 0.2 s"):
                await client.call(ECHO, CollectRequest([2]), timeout=0.2)
            assert await client.call(ECHO, CollectRequest([3]), timeout=5) == [3]
        finally:
            faults.install("any", plan=[])
            client.close()
            server.close()

    asyncio.run(main())


def test_an_answer_of_another_type_is_an_error_of_the_wire() -> None:
    """A peer of another version, or an environment's result that nobody checked: never an exception nobody expects."""

    async def main() -> None:
        server = Server(TOKEN, {ECHO: lambda peer, request: ["not a number"]})
        client = Client(server.start(), TOKEN)
        with pytest.raises(WireError, match=r"echo: server gave a malformed answer"):
            await client.call(ECHO, CollectRequest([1]), timeout=5)
        client.close()
        server.close()

    asyncio.run(main())


def test_a_flood_of_refused_messages_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        server = Server(TOKEN, {ECHO: echo})
        address = server.start()
        stranger, client = Client(address, "wrong"), Client(address, TOKEN)
        for _ in range(3000):
            stranger.notify(ECHO, CollectRequest([1]))
        stranger.close()
        await asyncio.sleep(0.1)
        assert await client.call(ECHO, CollectRequest([1]), timeout=5) == [1]
        client.close()
        server.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert 1 <= len([r for r in caplog.records if "refused a message" in r.message]) <= 12


def test_a_cut_is_seen_at_once_and_a_new_connection_works() -> None:
    """Fault injection `cut`: what a failing network does. The process's own connections to others stay."""

    async def main() -> None:
        other = Server(TOKEN, {ECHO: echo})
        outgoing = Client(other.start(), TOKEN)
        assert await outgoing.call(ECHO, CollectRequest([1]), timeout=5) == [1]
        other_peers = len(other.peers)
        release = asyncio.Event()

        async def hang(peer: Peer, request: Nothing) -> Nothing:
            await release.wait()
            return NOTHING

        server = Server(TOKEN, {ECHO: echo, HANG: hang})
        lost: list[int] = []
        address = server.start()
        client = Client(address, TOKEN, on_lost=lambda: lost.append(1))
        waiting = asyncio.create_task(client.call(HANG, NOTHING, timeout=60))
        await client.call(ECHO, CollectRequest([1]), timeout=5)
        # Both ends live in this process here, so every connection counts as made to it.
        assert faults.cut_connections() >= 1
        with pytest.raises(WireError, match="the connection is lost"):
            await waiting
        assert lost == [1] and client.peer.closed and other_peers == 1
        again = Client(address, TOKEN)
        assert await again.call(ECHO, CollectRequest([2]), timeout=5) == [2]
        for end in (client, again, outgoing, server, other):
            end.close()

    asyncio.run(main())
