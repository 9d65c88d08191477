"""What orchestration costs: tokens per second through gateway, environment worker and controller, beside vLLM's own.

    python benchmarks/vllm_generation.py                    Qwen3-0.6B shapes on one NVIDIA GPU, 512 requests at once
    python benchmarks/vllm_generation.py --tiny             a model of two small layers with vLLM on CPU: a trial
    python benchmarks/vllm_generation.py --tiny --engine embedded --parts prl       the same without vLLM

Both sides sample the same prompts (256 random tokens) to the same length from the same model of random weights, one
after the other on the same device: the peer in a process of its own (vllm_peer.py), then a run of real processes
whose controller only dispatches, collects and publishes (vllm_controller.py): engine, trainer, gateway, environment
worker, started by the launcher of every run. There a new version is published and installed every `--swap-every`
seconds while generation goes on, with `swap_kv = "retain"`. Rows go to benchmarks/results/vllm_generation.json, as
soon as each is there.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "vllm_generation.json"
PARTS = ("vllm", "prl")
LOGPROBS = (True, False)
"""How vLLM is measured: with log-probabilities of what it samples, which training needs and prl asks for, and without.
"""
AHEAD = 1.25
"""Requests that prl has in flight for each that vLLM computes at once: the queue is never empty, as in vLLM's own
benchmark, which has all requests in it, and as in a run, whose concurrency follows the engine's room."""
WORDS = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
TINY = {
    "model_type": "qwen3",
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}

Found = dict[str, Any]

CONFIG = """
name = "run"
runs_dir = {runs}
[model]
path = {model}
dtype = {dtype}
[loop]
steps = 1
[[envs]]
use = {env}
name = "prompts"
prompts = {prompts}
[trainer]
lr = 1e-4
row_tokens = {row_tokens}
[channel]
use = {channel}
[eval]
tasks = 0
[store]
rollouts = "none"
[checkpoint]
at_end = false
"""


# --- what both sides are given ---------------------------------------------------------------------------------


def make_model(options: argparse.Namespace, folder: Path) -> int:
    """A folder with random weights and a tokenizer whose word "wN" is token N, so that a prompt's text is its tokens.
    The end token is the last one; prl's side samples it once in as many tokens as there are words, and has a shorter
    completion then. Returns the size of the vocabulary."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers

    from prl_trainer_fsdp.bench.shapes import shapes_of, write_model

    shapes = TINY if options.tiny else options.shapes
    device = torch.device("cuda" if torch.cuda.is_available() and not options.tiny else "cpu")
    size = int(shapes_of(shapes)["vocab_size"])
    write_model(shapes, folder, device, 0)
    words = {f"w{number}": number for number in range(size - 1)} | {"<end>": size - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    (folder / "chat_template.jinja").write_text(WORDS)
    return size


def measurements(options: argparse.Namespace) -> list[Found]:
    """Tokens of a completion and how many of them, for each length."""
    found = []
    for tokens in options.tokens:
        times = options.total // max(tokens, options.prompt) // options.concurrency
        requests = max(2, times) * options.concurrency
        found.append({"tokens": tokens, "requests": requests, "concurrency": options.concurrency})
    return found


def engine_arguments(options: argparse.Namespace) -> Found:
    """The same for both sides: arguments of `vllm serve`."""
    longest = options.prompt + max(options.tokens) + 8
    found: Found = {"max_model_len": longest, "max_num_seqs": options.concurrency, "enable_prefix_caching": False}
    if options.tiny:
        found |= {"enforce_eager": True, "num_gpu_blocks_override": 2048}
    else:
        found |= {"gpu_memory_utilization": 0.5}
    return found | options.engine_args


def precision(options: argparse.Namespace) -> str:
    return "float32" if options.tiny else "bfloat16"


# --- vLLM alone --------------------------------------------------------------------------------------------------


def vllm_part(options: argparse.Namespace, model: Path, prompts: list[list[int]]) -> Iterator[Found]:
    asked = []
    for measurement in measurements(options):
        asked += [{**measurement, "logprobs": logprobs} for logprobs in LOGPROBS]
    request = {
        "model": str(model),
        "prompts": prompts,
        "engine": {"dtype": precision(options), **engine_arguments(options)},
        "concurrency": options.concurrency,
        "measurements": asked,
        "seconds": options.seconds - 10,
    }
    place = model.parent / "peer.json"
    place.write_text(json.dumps(request))
    command = [options.python, "-P", str(HERE / "vllm_peer.py"), str(place)]  # kernels.py here is no package
    with started(command, options.seconds, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("ROW "):
                yield {"side": "vllm", **json.loads(line.removeprefix("ROW "))}
            elif "is ready after" in line:
                print(line.rstrip(), flush=True)


# --- the same through prl ------------------------------------------------------------------------------------------


def prl_part(options: argparse.Namespace, model: Path, prompts: Path) -> Iterator[Found]:
    out = model.parent / "rows.jsonl"
    out.unlink(missing_ok=True)
    request = {
        "in_flight": int(AHEAD * options.concurrency),
        "prompts": len(json.loads(prompts.read_text())),
        "measurements": measurements(options),
        "swap_every_s": options.swap_every,
        "train_samples": 4,
        "out": str(out),
    }
    asked = model.parent / "run.json"
    asked.write_text(json.dumps(request))
    run_dir = prepare(options, model, prompts)
    command = [sys.executable, __file__, "--launch", str(run_dir), str(asked)]
    with started(command, options.seconds) as process:
        told = 0
        while process.poll() is None or told < len(lines(out)):
            for line in lines(out)[told:]:
                told += 1
                yield {"side": "prl", "engine": options.engine, "channel": options.channel, **json.loads(line)}
            time.sleep(0.2)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def prepare(options: argparse.Namespace, model: Path, prompts: Path) -> Path:
    """The run directory, with what the roles read."""
    from prl.config.load import load_config
    from prl.rundir import RunDir
    from prl.store.files import atomic_write
    from prl.store.lock import write_config

    text = CONFIG.format(
        runs=json.dumps(str(model.parent / "runs")),
        model=json.dumps(str(model)),
        dtype=json.dumps(precision(options)),
        env=json.dumps(f"{HERE / 'vllm_generation_env.py'}:Prompts"),
        prompts=json.dumps(str(prompts)),
        row_tokens=4 * (options.prompt + max(options.tokens)),
        channel=json.dumps(options.channel),
    )
    if options.tiny:
        text = text.replace("[trainer]", "[trainer]\nthreads = 1")
    text += "[engine]\n" + "".join(f"{key} = {toml(value)}\n" for key, value in engine_table(options).items())
    path = model.parent / "run.toml"
    path.write_text(text)
    config = load_config([path]).config
    run_dir = RunDir(Path(config.runs_dir) / config.name)
    for folder in (run_dir.path, run_dir.logs, run_dir.control):
        folder.mkdir(parents=True, exist_ok=True)
    atomic_write(run_dir.token, secrets.token_hex(32).encode(), mode=0o600)
    write_config(run_dir, config.model_dump(mode="json"))
    return run_dir.path


def engine_table(options: argparse.Namespace) -> Found:
    if options.engine == "embedded":
        longest = options.prompt + max(options.tokens) + 8
        return {"use": "embedded", "threads": 1, "slots": options.concurrency, "max_sequence_tokens": longest}
    return {"use": "vllm", "swap_kv": "retain", **engine_arguments(options)}


def toml(value: Any) -> str:
    """JSON is TOML for what engine arguments hold, but for nested tables."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value)


def launch(folder: str, request: str) -> int:
    """Start every role, with the stand-in for the controller. Called in a process of its own."""
    import msgspec

    from prl.config.load import read_resolved
    from prl.config.schema import RunConfig
    from prl.plan import CONTROLLER
    from prl.planning import build_plan
    from prl.rundir import RunDir

    run_dir = RunDir(folder)
    config = read_resolved(run_dir.config, RunConfig)
    plan = build_plan(config, run_dir)
    command = (sys.executable, str(HERE / "vllm_controller.py"), folder, request)
    roles = tuple(msgspec.structs.replace(r, command=command) if r.name == CONTROLLER else r for r in plan.roles)
    code = int(config.launcher.build().run(msgspec.structs.replace(plan, roles=roles), run_dir))
    for role in ("controller", "engine"):
        log = run_dir.log(role, 0)
        shown = lines(log)[-12 if code == 0 else -40 :]
        print(f"--- {log.name}\n" + "\n".join(shown), file=sys.stderr, flush=True)
    return code


# --- running and recording -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def started(command: Sequence[str], seconds: float, stdout: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """A process that is ended, with all it has started, after so many seconds. A failure is told and not raised: the
    other parts are measured all the same."""
    ends = time.monotonic() + seconds
    process = subprocess.Popen(command, stdout=stdout, text=True, start_new_session=True)
    alarm = signal.signal(signal.SIGALRM, lambda *_: os.killpg(process.pid, signal.SIGTERM))
    signal.alarm(max(1, int(seconds)))
    try:
        yield process
        code = process.wait(max(1.0, ends - time.monotonic()))
        if code:
            print(f"FAILED (exit code {code}): {' '.join(map(str, command[:3]))}", flush=True)
    except subprocess.TimeoutExpired:
        print(f"FAILED: more than {seconds:.0f} s: {' '.join(map(str, command[:3]))}", flush=True)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, alarm)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is not None:
                break
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(20)


def with_ratios(rows: list[Found]) -> list[Found]:
    """Every row of prl's gets its share of the best that vLLM itself reached at this length with log-probabilities."""
    for row in rows:
        own = [other["tokens_per_s"] for other in rows if is_peer(other) and same_step(row, other)]
        if row["side"] == "prl" and own:
            row["ratio"] = round(row["tokens_per_s"] / max(own), 4)
    return rows


def is_peer(row: Found) -> bool:
    return row["side"] == "vllm" and bool(row["logprobs"])


def same_step(one: Found, other: Found) -> bool:
    return all(one[key] == other[key] for key in ("model", "tokens", "concurrency", "hardware"))


def interpreter() -> str:
    """Where vLLM is: this one, or the one that $PRL_VLLM_PYTHON names."""
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    return os.environ.get("PRL_VLLM_PYTHON", sys.executable)


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [int(word) for word in words(text)]

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", type=words, default=list(PARTS))
    parser.add_argument("--tiny", action="store_true", help="a small model, on CPU, a few requests")
    parser.add_argument("--shapes", default="qwen3-0.6b")
    parser.add_argument("--engine", choices=["vllm", "embedded"], default="vllm")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="more arguments of vLLM, as JSON")
    parser.add_argument("--channel", default="", help="cuda_ipc where there is a GPU, filesystem otherwise")
    parser.add_argument("--prompt", type=int, default=0, help="tokens of a prompt: 256, tiny 32")
    parser.add_argument("--tokens", type=numbers, default=[], help="of a completion: 512,64, tiny 96,16")
    parser.add_argument("--concurrency", type=int, default=0, help="512, tiny 16")
    parser.add_argument("--total", type=int, default=0, help="tokens in each measurement: 1,048,576, tiny 8,192")
    parser.add_argument("--swap-every", type=float, default=10.0)
    parser.add_argument("--python", default=interpreter(), help="the interpreter that has vLLM")
    parser.add_argument("--seconds", type=float, default=290.0, help="limit of each part")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args(argv)
    tiny = options.tiny
    options.channel = options.channel or ("filesystem" if tiny or options.engine == "embedded" else "cuda_ipc")
    options.prompt = options.prompt or (32 if tiny else 256)
    options.tokens = options.tokens or ([96, 16] if tiny else [512, 64])
    options.concurrency = options.concurrency or (16 if tiny else 512)
    options.total = options.total or (8192 if tiny else 2**20)
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts {sorted(unknown)}: choose from {', '.join(PARTS)}")
    return options


def main(argv: Sequence[str]) -> int:
    if argv[:1] == ["--launch"]:
        return launch(argv[1], argv[2])
    options = parsed(argv)
    from prl_trainer_fsdp.bench.run import versions

    rows: list[Found] = json.loads(options.out.read_text()) if options.out.exists() else []
    rows = [row for row in rows if row["side"] not in options.parts]
    about = {
        "model": "tiny" if options.tiny else options.shapes,
        "prompt": options.prompt,
        "hardware": hardware(options.tiny),
        "versions": versions(),
        "date": date.today().isoformat(),
    }
    found = 0
    with tempfile.TemporaryDirectory(prefix="prl-generation-") as folder:
        model, prompts = Path(folder, "model"), Path(folder, "prompts.json")
        rng = random.Random(0)
        size = make_model(options, model)
        most = max(measurement["requests"] for measurement in measurements(options))
        ids = [[rng.randrange(size - 1) for _ in range(options.prompt)] for _ in range(most)]
        prompts.write_text(json.dumps(ids))
        for part in options.parts:
            made = vllm_part(options, model, ids) if part == "vllm" else prl_part(options, model, prompts)
            for row in made:
                found += 1
                rows.append({**row, **about})
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps(with_ratios(rows), indent=1) + "\n")
                shown = ("side", "logprobs", "tokens", "requests", "tokens_per_s", "ratio", "crossing", "cores")
                print(", ".join(f"{key} {rows[-1][key]}" for key in shown if key in rows[-1]), flush=True)
    expected = len(measurements(options)) * sum({"vllm": len(LOGPROBS), "prl": 1}[part] for part in options.parts)
    return 0 if found == expected else 1


def hardware(tiny: bool) -> str:
    import torch

    from prl_trainer_fsdp.bench.run import device_name

    return device_name(torch.device("cuda" if torch.cuda.is_available() and not tiny else "cpu"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
