"""Peak memory of the chunked head beside the plain one: log-probabilities and entropies of T tokens over V words, and
their gradients.

The peak is that of torch's allocator, event by event, so it is the same whatever malloc keeps: what the inputs, hidden
states and weight, take is not counted, their gradients are. Each head runs in a process of its own; its largest
resident size is recorded as well.

    python benchmarks/head_memory.py [--tokens 4096] [--vocab 65536] [--hidden 256]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from prl_models.blocks.head import logprobs_and_entropy

RESULT = Path(__file__).parent / "results" / "head_memory.json"
GIB = 1 << 30

Head = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """As it is written down."""
    log_p = (hidden @ weight.t() / temperatures[:, None]).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


HEADS: dict[str, Head] = {"chunked": logprobs_and_entropy, "plain": plain}


def measure(head: Head, tokens: int, vocab: int, hidden_size: int) -> dict[str, Any]:
    """Forward and backward once."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    weight = (0.1 * torch.randn(vocab, hidden_size)).requires_grad_()
    targets, temperatures = torch.randint(0, vocab, (tokens,)), torch.ones(tokens)
    head(hidden[:2], weight, targets[:2], temperatures[:2])  # whatever is made once
    began = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        logprobs, entropy = head(hidden, weight, targets, temperatures)
        (logprobs.sum() + 0.1 * entropy.sum()).backward()
    return {
        "peak_gib": round(peak_bytes(trace) / GIB, 4),
        "seconds": round(time.perf_counter() - began, 2),
        "max_rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB, 2),
    }


def peak_bytes(trace: profile) -> int:
    """Largest sum of what was allocated and not yet freed since the profile began."""
    assert trace.profiler is not None and trace.profiler.kineto_results is not None
    events = [event for event in trace.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    held = most = 0
    for event in events:
        held += event.nbytes()
        most = max(most, held)
    return most


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Peak memory of the chunked head beside the plain one.")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=65536)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--head", choices=list(HEADS), help="this one alone, in this process")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args(argv)
    sizes = (options.tokens, options.vocab, options.hidden)
    if options.head:
        print(json.dumps(measure(HEADS[options.head], *sizes)))
        return 0
    rows = []
    for name in HEADS:
        command = [sys.executable, __file__, "--head", name]
        command += [f"--{key}={value}" for key, value in zip(("tokens", "vocab", "hidden"), sizes, strict=True)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        rows.append(
            {"head": name, "tokens": sizes[0], "vocab": sizes[1], "hidden": sizes[2], "dtype": "float32", **found}
        )
        print(f"{name}: peak {found['peak_gib']:.2f} GiB, {found['seconds']:.1f} s", flush=True)
    about = {"torch": torch.__version__, "date": date.today().isoformat()}
    options.out.write_text(json.dumps([{**row, **about} for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
