"""The trainer's process of a channel in the tests: sends versions, says so, and does what it is told.

    python peer.py CHANNEL SETTINGS DIRECTORY FIRST LAST INCARNATION [DEVICE]

It prints the reference of every version as JSON; then it reads lines: `release N`, `send N`, `end`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from models import stepped, weights

from prl import faults, registry

WEIGHTS: list[dict[str, Tensor]] = []


def version_of(number: int) -> dict[str, Tensor]:
    """Both processes make the same weights."""
    while len(WEIGHTS) <= number:
        WEIGHTS.append(stepped(WEIGHTS[-1], len(WEIGHTS)) if WEIGHTS else weights())
    return WEIGHTS[number]


def main(kind: str, settings: str, directory: str, first: str, last: str, incarnation: str, device: str = "cpu") -> int:
    torch.set_num_threads(1)
    faults.install("trainer")
    sender = registry.build("channels", kind, msgspec.json.decode(settings)).sender(Path(directory))

    def send(number: int) -> None:
        tensors = ((name, tensor.to(device)) for name, tensor in version_of(number).items())
        print(msgspec.json.encode(sender.send(number, int(incarnation), tensors, [], 0.0)).decode(), flush=True)

    for number in range(int(first), int(last) + 1):
        send(number)
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "end":
            break
        if word == "release":
            sender.release([int(rest[0])])
            print("released", flush=True)
        elif word == "send":
            send(int(rest[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
