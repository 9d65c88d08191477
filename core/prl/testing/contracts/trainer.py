"""The contract of a trainer: the role it declares, and what its client does.

`CHECKS` need only the plugin. `CLIENT_CHECKS` are coroutine functions for a `TrainerClient` at version 0, which a
trainer's own tests connect to a running one: `asyncio.run(check(client))`. Tokens are below 16.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from prl.config.schema import RunConfig
from prl.messages import TrainBatch, TrainSample, TrainUpdate
from prl.plan import Role
from prl.protocols import TrainerClient, TrainerPlugin
from prl.rows import denominators
from prl.types import Credit

Make = Callable[[], TrainerPlugin]


def its_role_is_complete(make: Make) -> None:
    check_role(make().role(a_config()), "trainer")


async def a_step_turns_one_version_into_the_next(client: TrainerClient) -> None:
    assert client.dp_size >= 1, f"dp_size is {client.dp_size}"
    for step in (1, 2):
        report = await client.train(batches(step, client.dp_size))
        assert (report.step, report.version) == (step, step), f"step {step} was reported as {report}"
        wrong = {name: value for name, value in report.metrics.items() if not math.isfinite(value)}
        assert not wrong, f"metrics that are not finite: {wrong}"


async def a_batch_may_be_several_updates(client: TrainerClient) -> None:
    """They run one after another and are one step."""
    several = batches(1, client.dp_size)
    for batch in several:
        batch.updates *= 2
    report = await client.train(several)
    assert (report.step, report.version) == (1, 1), f"a step of two updates was reported as {report}"
    report = await client.train(batches(2, client.dp_size))
    assert report.version == 2, f"after a step of two updates, the second was reported as {report}"


async def what_is_published_is_what_was_asked_for(client: TrainerClient) -> None:
    await client.train(batches(1, client.dp_size))
    weights = await client.publish(1)
    assert weights.version == 1, f"asked for version 1, {weights} was published"
    again = await client.publish(1)
    assert again.version == 1, "a version cannot be published again, which a restarted engine needs"
    await client.release([1])
    await client.release([1, 99])


async def a_checkpoint_names_its_files_with_their_checksums(client: TrainerClient) -> None:
    await client.train(batches(1, client.dp_size))
    await client.snapshot(1)
    await client.train(batches(2, client.dp_size))  # training goes on
    with tempfile.TemporaryDirectory(prefix="prl-trainer-") as folder:
        path = Path(folder) / "trainer"
        files = await client.checkpoint(1, path)
        assert {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} == set(files), (
            "the files written are not those that were named"
        )
        for name, digest in files.items():
            found = hashlib.sha256((path / name).read_bytes()).hexdigest()
            assert found == digest, f"{name}: its sha256 is {found}, the checkpoint says {digest}"


def batches(step: int, ranks: int) -> list[TrainBatch]:
    """One step of two samples for every rank."""
    from prl.testing.fakes import fake_sample

    rows: list[list[TrainSample]] = []
    for rank in range(ranks):
        row = []
        for advantage in (0.5, -0.5):
            body, header = fake_sample(8 + rank, 2, (step - 1,))
            stream = ((header.num_tokens, advantage),)
            row.append(TrainSample(header, Credit(stream, ((header.num_tokens, 1.0),)), body))
        rows.append(row)
    whole = denominators((sample.header, sample.credit) for row in rows for sample in row)
    return [TrainBatch("contract", 0, step, step - 1, [TrainUpdate([row], whole)]) for row in rows]


def a_config() -> RunConfig:
    """A run's configuration with every default."""
    return RunConfig.model_validate({"name": "contract", "model": {"path": "none"}, "envs": [{"use": "none"}]})


def check_role(role: object, name: str) -> None:
    """What every launcher relies on."""
    assert isinstance(role, Role), f"role(config) returned a {type(role).__name__}, not a prl.plan.Role"
    assert role.name == name, f"the role is called {role.name!r}, {name!r} is expected"
    assert role.command and all(isinstance(argument, str) for argument in role.command), "the command is empty"
    assert any("{run_dir}" in argument for argument in role.command), (
        'the command has no "{run_dir}": the process could not find its run'
    )
    assert role.replicas >= 1, f"it has {role.replicas} replicas"
    if role.replicas > 1:
        assert any("{replica}" in argument for argument in role.command), 'several replicas need "{replica}" to differ'
    assert role.purpose == "service", "only the controller is a main role: its end is the end of the run"


CHECKS = [its_role_is_complete]
CLIENT_CHECKS: list[Callable[[TrainerClient], Awaitable[None]]] = [
    a_step_turns_one_version_into_the_next,
    a_batch_may_be_several_updates,
    what_is_published_is_what_was_asked_for,
    a_checkpoint_names_its_files_with_their_checksums,
]
