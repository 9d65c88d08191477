"""Changed elements against whole versions: bytes and seconds of the same updates of one model, over every channel.

    python benchmarks/weight_channels.py --model DIR        a Hugging Face folder of a trained model
    python benchmarks/weight_channels.py --model DIR --channels cuda_ipc,shm --device cuda

The model is trained on, on this repository's own documents: float32 masters, AdamW at the learning rate that is asked
for, a warm-up that nobody counts. What is published is bfloat16, as in a run. The versions are made once; every
channel and encoding then sends the same ones to a receiver in a process of its own, which answers with the seconds it
took and a digest of all bits, compared with that of what was sent. Rows go to benchmarks/results/weight_channels.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch
from torch import Tensor

from prl import registry
from prl.messages import WeightsRef

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "weight_channels.json"
ENCODINGS = ("full", "delta")
ROWS, LENGTH = 4, 256
"""Documents of one update, and their tokens."""

Version = dict[str, Tensor]


def updates(model_path: str, count: int, lr: float, warmup: int, device: str) -> list[Version]:
    """`count` + 1 versions in bfloat16 on `device`, each one optimiser step after the other."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).to(device)
    text = "\n".join(path.read_text() for path in sorted((HERE.parent / "docs").glob("*.md")))
    tokens = torch.tensor(AutoTokenizer.from_pretrained(model_path)(text)["input_ids"])
    documents = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    versions = []
    for step in range(warmup + count):
        if step >= warmup:
            versions.append(published(model))
        rows = documents[torch.arange(step * ROWS, (step + 1) * ROWS) % len(documents)].to(device)
        model(input_ids=rows, labels=rows).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [*versions, published(model)]


def published(model: Any) -> Version:
    """What an engine is given; tied parameters once."""
    return {name: parameter.detach().bfloat16() for name, parameter in model.named_parameters()}


def changed_share(former: Version, latter: Version) -> float:
    """Of the elements, bit by bit."""
    bits = torch.int16
    changed = sum(int((former[name].view(bits) != latter[name].view(bits)).sum()) for name in former)
    return changed / sum(tensor.numel() for tensor in former.values())


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(tensors):
        found.update(name.encode())
        found.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def measure(channel: str, encoding: str, versions: Sequence[Version], device: str) -> dict[str, Any]:
    """One row. The first version is whole either way, and not counted.

    Raises:
        RuntimeError: what a receiver has is not what was sent.
    """
    settings = {"encoding": encoding, "chain_length": len(versions), "chain_share": 10.0}
    command = [sys.executable, str(HERE / "weight_channels.py"), "--receive", channel, json.dumps(settings), device]
    sent, received, sizes = [], [], []
    with tempfile.TemporaryDirectory(prefix="prl-channels-") as directory:
        sender = registry.build("channels", channel, settings).sender(Path(directory))
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None and process.stdout is not None
        try:
            for number, version in enumerate(versions):
                synchronize(device)
                began = time.perf_counter()
                reference = sender.send(number, 0, iter(version.items()), [], 0.0)
                sent.append(time.perf_counter() - began)
                sizes.append(reference.num_bytes)
                process.stdin.write(msgspec.json.encode(reference).decode() + "\n")
                process.stdin.flush()
                answer = json.loads(process.stdout.readline() or '{"digest": "the receiver has ended"}')
                if answer["digest"] != digest(version.items()):
                    raise RuntimeError(f"version {number} over {channel}, {encoding}: {answer['digest']}")
                received.append(answer["seconds"])
                if number:
                    sender.release([number - 1])
        finally:
            process.kill()
            process.wait()
            sender.close()
    return {
        "channel": channel,
        "encoding": encoding,
        "updates": len(versions) - 1,
        "bytes": sum(sizes[1:]),
        "send_s": round(median(sent[1:]), 5),
        "receive_s": round(median(received[1:]), 5),
        "bit_equal": True,
    }


def receive(channel: str, settings: str, device: str) -> int:
    """The receiver's process: a reference a line, an answer a line."""
    if device != "cpu":
        # NCCL needs a GPU of its own on this side.
        torch.cuda.set_device(torch.cuda.device_count() - 1 if channel == "nccl" else 0)
    receiver = registry.build("channels", channel, json.loads(settings)).receiver()
    for line in sys.stdin:
        reference = msgspec.json.decode(line, type=WeightsRef)
        began = time.perf_counter()
        tensors = receiver.receive(reference).tensors
        synchronize(device)
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "digest": digest(tensors.items())}), flush=True)
    return 0


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def hardware(device: str) -> str:
    import platform

    return (
        torch.cuda.get_device_name() if device != "cpu" else f"{platform.machine()}, {torch.get_num_threads()} threads"
    )


def main() -> int:
    if sys.argv[1:2] == ["--receive"]:
        return receive(*sys.argv[2:5])
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--channels", default="filesystem,shm")
    parser.add_argument("--lr", type=float, default=1e-6, help="as for reinforcement learning")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    versions = updates(options.model, options.updates, options.lr, options.warmup, options.device)
    pairs = zip(versions, versions[1:], strict=False)
    about = {
        "parameters": sum(tensor.numel() for tensor in versions[0].values()),
        "lr": options.lr,
        "changed": round(median(changed_share(*pair) for pair in pairs), 5),
        "hardware": hardware(options.device),
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__},
        "date": date.today().isoformat(),
    }
    rows = json.loads(options.out.read_text()) if options.out.exists() else []
    for channel in options.channels.split(","):
        for encoding in ENCODINGS:
            row = {**measure(channel, encoding, versions, options.device), **about}
            print(json.dumps(row), flush=True)
            key = ("channel", "encoding", "parameters", "lr", "hardware")
            rows = [other for other in rows if any(other[k] != row[k] for k in key)] + [row]
            options.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
