"""One vLLM engine as a run starts it, with this process in the controller's and the trainer's place.

The role's own command is started in a run directory; it registers at a `Hub` here. Tests are synchronous: `Rig.run`
drives the event loop that everything lives on.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from prl.adapters import Adapter
from prl.config.load import load_config
from prl.controller.hub import Hub
from prl.messages import NOTHING, SHUTDOWN, GenerateRequest, Generation
from prl.protocols import Probe
from prl.rundir import RunDir
from prl.store.files import atomic_write
from prl.store.lock import write_config
from prl.types import Sampling

R = TypeVar("R")

START_S = 300.0
VOCABULARY = 260
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.15}

CONFIG = """
name = "run"
runs_dir = {runs}
[model]
path = {model}
dtype = {dtype}
[[envs]]
use = "reverse_text"
[channel]
use = {channel}
{trainer}
[engine]
use = "vllm"
check = false
max_model_len = 512
max_num_seqs = 64
{engine}
"""


def save_model(folder: Path) -> None:
    """A Qwen3 of four layers whose distributions are peaked, with the tokenizer of the reverse_text example."""
    root = Path(__file__).parents[2]
    sys.path.insert(0, str(root / "examples" / "reverse_text"))
    from prepare import save_tokenizer

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=64, max_position_embeddings=512, tie_word_embeddings=False,
            bos_token_id=None, eos_token_id=257, pad_token_id=256,
        )
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed" not in name:
                parameter.mul_(8.0 if "lm_head" in name else 3.0)
    model.to(torch.bfloat16).save_pretrained(folder)
    save_tokenizer(folder)


class Rig:
    """Args:
    engine: further keys of the `[engine]` table. trainer: lines of `[trainer]`, such as `lora = {...}`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str,
        channel: str,
        engine: Mapping[str, Any],
        trainer: str = "",
        device: str = "cuda",
    ) -> None:
        self.folder = folder
        self.dtype = dtype
        self.device = device
        save_model(folder / "model")
        lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in engine.items())
        text = CONFIG.format(
            runs=json.dumps(str(folder)), model=json.dumps(str(folder / "model")), dtype=json.dumps(dtype),
            channel=json.dumps(channel), trainer=f"[trainer]\n{trainer}", engine=lines,
        )  # fmt: skip
        (folder / "run.toml").write_text(text)
        self.config = load_config([folder / "run.toml"], checks=False).config
        self.run_dir = RunDir(folder / "run")
        for place in (self.run_dir.path, self.run_dir.logs, self.run_dir.control):
            place.mkdir(parents=True)
        self.token = secrets.token_hex(16)
        atomic_write(self.run_dir.token, self.token.encode(), mode=0o600)
        write_config(self.run_dir, self.config.model_dump(mode="json"))
        self.loop = asyncio.new_event_loop()
        self.sender = self.config.channel.build().sender(folder / "weights")
        self.model = self.load()
        self._installed = -1
        self._requests = 0

    def load(self) -> Any:
        """The model as it is on the disk."""
        precision = getattr(torch, self.dtype)
        return Qwen3ForCausalLM.from_pretrained(self.folder / "model", dtype=precision).to(self.device).eval()

    def run(self, call: Coroutine[Any, Any, R], limit_s: float = 120.0) -> R:
        async def within() -> R:
            async with asyncio.timeout(limit_s):
                return await call

        return self.loop.run_until_complete(within())

    # --- its life -------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.run(self._start(), START_S)

    async def _start(self) -> None:
        self.hub = Hub(self.token, "run", 0, 0, {})
        atomic_write(self.run_dir.socket, self.hub.server.start().encode())
        plugin = self.config.engine.build()
        role = plugin.role(self.config)
        command = [word.replace("{run_dir}", str(self.run_dir.path)).replace("{replica}", "0") for word in role.command]
        log = self.run_dir.log("engine", 0)
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, start_new_session=True, env={**os.environ, **role.env}
            )
        waiting = asyncio.ensure_future(self.hub.wait_for("engine", 1, START_S))
        while not waiting.done():
            await asyncio.sleep(0.2)
            if self.process.poll() is not None:
                waiting.cancel()
                raise AssertionError(f"the engine ended with code {self.process.returncode}\n{log.read_text()[-4000:]}")
        (engine,) = waiting.result()
        self.client = plugin.connect(engine.address, self.token)

    def stop(self) -> None:
        try:
            if hasattr(self, "client"):
                self.run(self._stop(), 30)
        finally:
            if hasattr(self, "process"):
                try:
                    self.process.wait(20)
                except subprocess.TimeoutExpired:
                    os.killpg(self.process.pid, signal.SIGKILL)
                    self.process.wait()
            self.loop.close()

    async def _stop(self) -> None:
        await self.client.close()
        self.hub.needed = False
        await asyncio.gather(
            *(one.peer.call(SHUTDOWN, NOTHING, timeout=5) for one in self.hub.connections.values()),
            return_exceptions=True,
        )
        await asyncio.sleep(0.2)
        self.hub.server.close()

    # --- the trainer's part ---------------------------------------------------------------------------------

    def change(self, seed: int, size: float = 0.1) -> None:
        """Move every matrix of the model by so much of its own size."""
        generator = torch.Generator(self.device).manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.ndim > 1:
                    noise = torch.randn(parameter.shape, generator=generator, device=self.device)
                    parameter.add_((noise * size * parameter.float().std()).to(parameter.dtype))

    def publish(self, version: int, probes: Sequence[Probe] | None = None) -> Any:
        tensors = self.model.state_dict()
        told = self.probes() if probes is None else probes
        return self.sender.send(version, 0, iter(tensors.items()), told, TOLERANCES[self.dtype])

    def publish_adapter(self, version: int, adapter: Adapter, tensors: Mapping[str, torch.Tensor]) -> Any:
        """`self.model` has them merged, so that its probes are theirs."""
        return self.sender.send(version, 0, iter(tensors.items()), self.probes(), TOLERANCES[self.dtype], adapter)

    def probes(self) -> list[Probe]:
        generator = torch.Generator().manual_seed(7)
        sequences = [torch.randint(1, 256, (count,), generator=generator).tolist() for count in (24, 17, 9)]
        return [Probe(ids, [0.0, *self.forward(ids)]) for ids in sequences]

    @torch.no_grad()
    def forward(self, ids: Sequence[int], model: Any = None) -> list[float]:
        """f[T-1]: log-probabilities of all tokens but the first."""
        tokens = torch.tensor([list(ids)], device=self.device)
        logits = (self.model if model is None else model)(input_ids=tokens).logits[0, :-1].float()
        found: list[float] = torch.log_softmax(logits, -1).gather(1, tokens[0, 1:, None])[:, 0].tolist()
        return found

    # --- a client's part ------------------------------------------------------------------------------------

    async def generate(self, prompt: Sequence[int], max_tokens: int) -> Generation:
        self._requests += 1
        sampling = Sampling(max_tokens=max_tokens)
        request = GenerateRequest(f"r{self._requests}", list(prompt), sampling, [], self._requests, 60.0)
        return await self.client.generate(request)

    async def answers(self, count: int, max_tokens: int) -> list[tuple[list[int], Generation]]:
        prompts = [[(7 * index + place) % 250 + 1 for place in range(9 + index % 5)] for index in range(count)]
        made = await asyncio.gather(*(self.generate(prompt, max_tokens) for prompt in prompts))
        return list(zip(prompts, made, strict=True))

    def kl(self, answers: Sequence[tuple[list[int], Generation]], model: Any = None) -> float:
        """Mean k3 estimate of KL(engine || model) over what was sampled."""
        logs = []
        for prompt, made in answers:
            expected = self.forward([*prompt, *made.token_ids], model)[len(prompt) - 1 :]
            logs += [theirs - ours for theirs, ours in zip(expected, made.logprobs, strict=True)]
        difference = torch.tensor(logs, dtype=torch.float64)
        return float((difference.exp() - 1 - difference).mean())
