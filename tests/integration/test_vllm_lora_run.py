"""Adapters reach a real vLLM as adapters, version by version; what they made of the model can then be served."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from prl.store.reader import open_run
from prl_engine_vllm.config import VllmConfig
from prl_engine_vllm.interpreter import REMEDY, choose

from .conftest import make_tiny_model
from .harness import Project, Run, wait_until

pytestmark = pytest.mark.skipif(choose(VllmConfig()) is None, reason=f"no vLLM here: {REMEDY}")

STEPS = 6
MOST_KL = 1e-6
"""Of a float32 step: above rounding, far below what an adapter at the wrong place or of another version would make."""
CONFIG = """\
name = "lora"
seed = 3

[model]
path = "{model}"

[loop]
steps = {steps}
groups_per_step = 4
group_size = 4
max_staleness = 0

[sampling]
max_tokens = 8

[[envs]]
use = "./my_env.py:MyEnv"
marks = "{marks}"

[engine]
use = "vllm"
threads = 1
enforce_eager = true
max_model_len = 64
max_num_seqs = 16
num_gpu_blocks_override = 64
check = false
env = {{ VLLM_CPU_KVCACHE_SPACE = "1" }}

[trainer]
threads = 1
lr = 3e-2

[trainer.lora]
rank = 4
alpha = 8.0

[eval]
tasks = 4

[checkpoint]
every = 3
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Six steps. Do not change it."""
    return configured(tmp_path_factory.mktemp("adapters")).complete()


def configured(folder: Path) -> Run:
    project = Project(folder / "project", make_model(folder / "model"))
    path = project.folder / "lora.toml"
    path.write_text(CONFIG.format(model=project.model, steps=STEPS, marks=project.folder))
    return Run(project, "lora", path)


def make_model(folder: Path) -> Path:
    """With heads as large as vLLM's attention on a CPU wants them, and distributions that are peaked."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir()
    make_tiny_model(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=257,
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder


def test_only_adapters_travel(run: Run) -> None:
    installed = run.events("weights_installed")
    assert [event["version"] for event in installed] == list(range(STEPS + 1))
    assert all(event["adapter"] for event in installed)
    whole = (run.project.model / "model.safetensors").stat().st_size
    assert all(event["bytes"] < whole / 3 for event in installed), (whole, installed)


def test_engine_and_trainer_compute_the_same_under_every_version(run: Run) -> None:
    kls = [row["mismatch/kl"] for row in run.metrics() if "time/step" in row]
    assert len(kls) == STEPS and max(kls) < MOST_KL, kls
    probed = {row["step"]: row["mismatch/probe_kl"] for row in run.metrics() if "mismatch/probe_kl" in row}
    assert list(probed) == list(range(1, STEPS + 1)) and max(probed.values()) < MOST_KL, probed


def test_the_first_version_is_the_base_model_and_later_ones_are_not(run: Run) -> None:
    base = AutoModelForCausalLM.from_pretrained(run.project.model, dtype=torch.float32)
    apart: dict[int, list[float]] = {}
    for row in open_run(run.dir.path).rollouts().to_pylist():
        if row["kind"] == "train":
            ids = torch.tensor([row["token_ids"]])
            with torch.no_grad():
                expected = base(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist()
            for theirs, logprob, version in zip(expected, row["logprobs"][1:], row["versions"][1:], strict=True):
                if version >= 0:
                    apart.setdefault(version, []).append(abs(theirs - logprob))
    assert sorted(apart) == list(range(STEPS))
    assert max(apart[0]) < 1e-5 and statistics.fmean(apart[STEPS - 1]) > 0.1


@pytest.mark.slow
def test_a_run_that_continues_has_the_same_base(tmp_path: Path) -> None:
    """The engine starts from model.path again, and gets the adapters of the checkpoint."""
    run = configured(tmp_path).complete("--set", "loop.steps=3").complete("--resume")
    installed = [event["version"] for event in run.events("weights_installed")]
    assert installed.count(3) == 2 and installed[-1] == STEPS
    assert max(row["mismatch/kl"] for row in run.metrics() if "mismatch/kl" in row) < MOST_KL


def test_the_trained_model_is_served_over_http(run: Run) -> None:
    served = Run(run.project, "serve-lora-6", run.config)
    with served.started("serve", "--ckpt", "lora") as process:
        wait_until(lambda: "  curl " in served.output() or process.poll() is not None, "it serves")
        assert process.poll() is None, served.told(subprocess.CompletedProcess([], process.returncode or 0, "", ""))
        (info,) = (role["info"] for role in served.status["roles"].values() if "api" in role["info"])
        key = served.dir.token.read_text().strip()
        question = {"model": info["model"], "messages": [{"role": "user", "content": "t001"}], "max_tokens": 4}
        answer = post(f"{info['api']}/chat/completions", question, key)
        assert answer["usage"]["completion_tokens"] in range(1, 5)
        assert post(f"{info['api']}/chat/completions", question, "") == 401
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, served.output()
        wait_until(lambda: not served.alive(), "every process has ended", 20)


def post(url: str, body: Any, key: str) -> Any:
    """The answer, or the status that refused it."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    try:
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code
