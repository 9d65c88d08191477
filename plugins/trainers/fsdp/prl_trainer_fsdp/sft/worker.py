"""`python -m prl_trainer_fsdp.sft.worker`: prepares steps for one rank, asked through stdin, answering through stdout.

A message is its length, 4 bytes little-endian, and that much msgpack. The first says what to prepare from; each further
one is a step's number, answered by its `Part` or by what is wrong. When stdin ends, however that came about, so does
this process, at once and whatever it is doing: it cannot outlive the trainer that it works for.
"""

from __future__ import annotations

import os
import queue
import signal
import struct
import sys
import threading
import traceback
from typing import IO

import msgspec
import numpy as np

from prl.config.data import SftDataTable
from prl.errors import ConfigError, PrlError
from prl.model_config import vocab_size
from prl.packing import Cost
from prl.process import start_logging
from prl_trainer_fsdp.sft.order import Order
from prl_trainer_fsdp.sft.rendering import choose, load_tokenizer
from prl_trainer_fsdp.sft.sources import open_sources
from prl_trainer_fsdp.sft.steps import Part, Preparer

HEADER = struct.Struct("<I")


class Orders(msgspec.Struct, frozen=True):
    """What a worker prepares from. `data` is the table `[data]` as JSON, `indices` each source's good rows,
    `cost` the two factors of `prl.packing.Cost`."""

    data: bytes
    model: str
    row_tokens: int
    seed: int
    rank: int
    ranks: int
    indices: list[bytes]
    cost: tuple[float, float]


class Answer(msgspec.Struct, frozen=True):
    """A part, or `problems`: of the configuration and the data, where `expected`; otherwise a mistake of ours."""

    part: Part | None = None
    problems: list[str] = []
    expected: bool = True


def preparer(orders: Orders) -> Preparer:
    """Raises: ConfigError: tokenizer, renderer or data are not what the trainer found them to be."""
    data = SftDataTable.model_validate_json(orders.data)
    indices = [np.frombuffer(index, np.int64).reshape(-1, 3) for index in orders.indices]
    sources = open_sources(data.train, skip=data.on_bad_row == "skip", indices=indices)
    return Preparer(
        data,
        sources,
        training_order(data, [len(source) for source in sources], orders.seed),
        choose(load_tokenizer(orders.model), orders.model, data.renderer),
        orders.row_tokens,
        orders.rank,
        orders.ranks,
        Cost(*orders.cost),
        vocab_size(orders.model),
    )


def training_order(data: SftDataTable, sizes: list[int], seed: int) -> Order:
    """Raises: ConfigError: a source's weight is too small."""
    weights = [source.weight for source in data.train]
    epochs = 0 if data.steps else data.epochs or 1
    return Order(sizes, weights, data.batch_size, seed, shuffle=data.shuffle, epochs=epochs)


def read_message(stream: IO[bytes]) -> bytes | None:
    """None at the end of the stream, also in the middle of a message."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    body = stream.read(HEADER.unpack(header)[0])
    return body if len(body) == HEADER.unpack(header)[0] else None


def write_message(stream: IO[bytes], body: bytes) -> None:
    stream.write(HEADER.pack(len(body)) + body)
    stream.flush()


def answer(prepare: Preparer, step: int) -> Answer:
    try:
        return Answer(prepare.step(step))
    except ConfigError as error:
        return Answer(problems=error.problems)
    except Exception:
        return Answer(problems=[traceback.format_exc()], expected=False)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # of the whole group: the trainer decides when this ends
        signal.signal(number, signal.SIG_IGN)
    start_logging()
    # Tokenizers need no torch, and importing it would take 3 s and 250 MB of each worker.
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as many cores as there are workers
    stdin, stdout = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not be taken for a message
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(stdin, requests), daemon=True).start()
    try:
        prepare = preparer(msgspec.msgpack.decode(requests.get(), type=Orders))
    except PrlError as error:
        problems = error.problems if isinstance(error, ConfigError) else [str(error)]
        write_message(stdout, msgspec.msgpack.encode(Answer(problems=problems)))
        return
    while True:
        step = msgspec.msgpack.decode(requests.get(), type=int)
        write_message(stdout, msgspec.msgpack.encode(answer(prepare, step)))


def _listen(stdin: IO[bytes], requests: queue.SimpleQueue[bytes]) -> None:
    while (message := read_message(stdin)) is not None:
        requests.put(message)
    os._exit(0)


if __name__ == "__main__":
    main()
