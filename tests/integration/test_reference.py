"""`max_staleness = 0` is the synchronous algorithm: a loop of thirty lines, in one process, computes the same bits.

It uses the engine's scheduler, the trainer, the algorithm and the loss, and nothing of the loop, the gateway, the wire,
the store or any process of a run.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from prl.config.schema import RunConfig
from prl.env import stable_seed
from prl.messages import GenerateRequest, Generation, TrainBatch, TrainSample, TrainUpdate
from prl.packing import pack
from prl.protocols import GroupMember
from prl.types import Credit, Reward, RolloutHeader, SampleBody, SampleHeader, Sampling, Task

from .harness import Run
from .my_env import MyEnv

torch = pytest.importorskip("torch")


class Sampler:
    """The engine's model and scheduler, called as a function."""

    def __init__(self, config: RunConfig) -> None:
        from prl_engine_embedded.build import build_scheduler
        from prl_engine_embedded.config import EmbeddedConfig

        own = EmbeddedConfig.model_validate(config.engine.own)
        self.model, self.scheduler = build_scheduler(config, own)
        self._results: dict[str, Any] = {}
        self._done = threading.Event()
        self._expected = 0
        self.scheduler.start(self._take)

    def _take(self, results: list[Any]) -> None:
        self._results.update((result.key, result) for result in results)
        if len(self._results) == self._expected:
            self._done.set()

    def sample(self, requests: list[GenerateRequest]) -> list[Generation]:
        self._results.clear()
        self._done.clear()
        self._expected = len(requests)
        self.scheduler.add([(request.id, request) for request in requests])
        assert self._done.wait(60)
        return [self._results[request.id].generation for request in requests]

    def install(self, trainer: Any, version: int) -> None:
        from prl_engine_embedded.weights import Swap

        with self.scheduler.hold():
            swap = Swap(self.model.module)
            swap.apply(dict(trainer.learner.model.disk_tensors(lambda tensor: tensor.detach())))
            swap.commit()
            self.scheduler.version = version


def test_a_plain_loop_in_one_process_computes_the_same_weights(synchronous: Run, tmp_path: Path) -> None:
    with one_thread():
        config = RunConfig.model_validate_json(synchronous.dir.config.read_bytes())
        digests = train(config, tmp_path)
    last = synchronous.steps_saved()[-1]
    expected = {name: hashlib.sha256(data).hexdigest() for name, data in synchronous.weights(last).items()}
    assert {name: digests[name] for name in expected} == expected


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def train(config: RunConfig, folder: Path) -> dict[str, str]:
    """Train `config.loop.steps` steps; digests of the trainer's checkpoint."""
    from transformers import AutoTokenizer

    from prl_trainer_fsdp.trainer import Trainer

    loop = config.loop
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    algorithm = config.algorithm.build()
    tasks = MyEnv().tasks("train")
    sampler, trainer = Sampler(config), Trainer(config, folder)
    group = 0
    while trainer.version < loop.steps:
        sampler.install(trainer, trainer.version)
        requests = [
            request_of(config, tokenizer, tasks[g], g, member)
            for g in range(group, group + loop.groups_per_step)
            for member in range(loop.group_size)
        ]
        group += loop.groups_per_step
        generations = sampler.sample(requests)
        samples: list[TrainSample] = []
        for start in range(0, len(requests), loop.group_size):
            mine = slice(start, start + loop.group_size)
            samples += credited(algorithm, tokenizer, requests[mine], generations[mine])
        if samples:
            trainer.train(batch_of(config, samples, trainer.version))
    sampler.scheduler.close()
    trainer.snapshot(loop.steps)
    return dict(trainer.checkpoint(loop.steps, folder / "trainer"))


def request_of(config: RunConfig, tokenizer: Any, task: Task, group: int, member: int) -> GenerateRequest:
    """The first turn of an episode. Seeds as they are documented: of the run, the group, the member, then the turn."""
    text = "/".join(map(str, (config.seed, "train", group, member, 0)))
    episode = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": task.prompt}], tokenize=False)
    return GenerateRequest(
        id=f"{group}.{member}",
        token_ids=tokenizer(prompt, add_special_tokens=False).input_ids,
        sampling=Sampling(config.sampling.max_tokens, config.sampling.temperature),
        stop_token_ids=[tokenizer.eos_token_id],
        seed=stable_seed(episode, "policy", 0),
        deadline_s=60,
    )


def credited(
    algorithm: Any, tokenizer: Any, requests: list[GenerateRequest], generations: list[Generation]
) -> list[TrainSample]:
    """The samples of one group that carry a signal."""
    headers, bodies, members = [], [], []
    for index, (request, generation) in enumerate(zip(requests, generations, strict=True)):
        prompt, count = len(request.token_ids), len(generation.token_ids)
        header = SampleHeader(
            prompt + count,
            ((prompt, count),),
            min(generation.versions),
            max(generation.versions),
            request.sampling.temperature,
        )
        words = generation.token_ids[: -1 if generation.stop_reason == "stop" else None]
        reward = sum(ord(letter) % 2 for letter in tokenizer.decode(words)) / 8
        rollout = RolloutHeader("policy", True, reward, {"reward": Reward(reward)}, (header,), num_turns=1)
        headers.append(header)
        bodies.append(body_of(request.token_ids, generation))
        members.append(GroupMember(index, (rollout,), {}))
    credits: list[list[Credit]] = algorithm.credit(members)
    return [
        TrainSample(header, credit, body)
        for header, (credit,), body in zip(headers, credits, bodies, strict=True)
        if any(value for _, value in credit.advantages)
    ]


def body_of(prompt: list[int], generation: Generation) -> bytes:
    before, count = len(prompt), len(generation.token_ids)
    arrays = (
        np.array(prompt + generation.token_ids, "<i4"),
        np.array([0] * before + [1] * count, np.uint8),
        np.array([0.0] * before + generation.logprobs, "<f4"),
        np.array([-1] * before + generation.versions, "<i4"),
    )
    return msgspec.msgpack.encode(SampleBody(*(array.tobytes() for array in arrays)))


def batch_of(config: RunConfig, samples: list[TrainSample], version: int) -> TrainBatch:
    (rows,) = pack([sample.header.num_tokens for sample in samples], config.trainer.row_tokens, 1)
    trained = float(sum(sample.header.num_sampled for sample in samples))
    return TrainBatch(
        run_id="reference",
        incarnation=0,
        step=version + 1,
        version=version,
        updates=[
            TrainUpdate([[samples[index] for index in row] for row in rows], {"rl": trained, "ce": 1.0, "ref_kl": 1.0})
        ],
    )
