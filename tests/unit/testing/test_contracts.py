"""The contract suites can fail: for every check there is a plugin, wrong in one way, that this very check catches."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from prl import registry
from prl.contribution import Contribution
from prl.env import SingleTurnEnv
from prl.errors import EnvironmentNotFit, EpisodeFailed, PluginMissing, WeightsError
from prl.loss import LossOutputs
from prl.messages import WeightsRef
from prl.plan import Role
from prl.protocols import ReceivedWeights
from prl.testing import contracts
from prl.testing.contracts import algorithm, channel, declaration, engine, env, launcher, loss, trainer
from prl.testing.fake_engine import FakeEngine
from prl.testing.fakes import FakeTrainer
from prl.types import Credit, Episode, Reward, Task


def catches(check: Callable[..., None], make: Callable[[], Any], message: str) -> None:
    (result,) = contracts.run([check], make)
    assert not result.ok and not result.skipped, f"{check.__name__} let a broken plugin pass"
    assert message in result.detail, f"caught, but for another reason: {result.detail}"


# --- environments -----------------------------------------------------------------------------------------


class GoodEnv(SingleTurnEnv):
    def tasks(self, split):
        offset = 0 if split == "train" else 1000
        return [Task(f"{split}-{n}", prompt=f"say {n + offset}", data={"answer": str(n + offset)}) for n in range(20)]

    def score(self, task, text):
        return float(text == task.data["answer"])


class Drifting(GoodEnv):
    def tasks(self, split):
        return [Task(str(n), prompt=str(random.Random().random())) for n in range(3)]


class SameIds(GoodEnv):
    def tasks(self, split):
        return [Task("same", prompt=f"{split} {n}") for n in range(3)]


class NotJson(GoodEnv):
    def tasks(self, split):
        return [Task("a", prompt=split, data={"pair": (1, 2)})]


class Leaking(GoodEnv):
    def tasks(self, split):
        return [Task(f"{split}-{n}", prompt=str(n), data={"answer": ""}) for n in range(3)]


class Crashing(GoodEnv):
    def score(self, task, text):
        return float(text.split()[0] == "x")


class NanReward(GoodEnv):
    def score(self, task, text):
        return float("nan")


class Hanging(GoodEnv):
    async def run(self, task, ctx):
        await ctx.agent().reply(task.prompt)
        await asyncio.sleep(3600)


class TwoSeats(GoodEnv):
    async def run(self, task, ctx):
        episode = await super().run(task, ctx)
        return Episode([*episode.rollouts, *episode.rollouts])


class Moody(GoodEnv):
    def score(self, task, text):
        return time.perf_counter()


class Sharing(GoodEnv):
    async def run(self, task, ctx):
        self.current = task
        turn = await ctx.agent().reply(task.prompt)
        return Episode([ctx.agent().finish({"reward": Reward(float(turn.text == self.current.prompt))})])


class Stubborn(GoodEnv):
    async def run(self, task, ctx):
        try:
            return await super().run(task, ctx)
        except asyncio.CancelledError:
            return Episode([ctx.agent().finish(0.0)])


class Swallowing(GoodEnv):
    async def run(self, task, ctx):
        try:
            return await super().run(task, ctx)
        except EpisodeFailed:
            return Episode([ctx.agent().finish(0.0)])


class Global(GoodEnv):
    def score(self, task, text):
        return random.random()


class GlobalNumpy(GoodEnv):
    def score(self, task, text):
        return float(np.random.rand())


class Evaluating(GoodEnv):
    def score(self, task, text):
        try:
            return float(bool(eval(text)))
        except Exception:
            return 0.0


@pytest.mark.parametrize(
    ("check", "broken", "message"),
    [
        (env.tasks_are_the_same_every_time, Drifting, "differ in train tasks"),
        (env.there_are_tasks_with_ids_of_their_own, SameIds, "share the ids same"),
        (env.tasks_survive_json, NotJson, "comes back from JSON"),
        (env.splits_are_disjoint, Leaking, "has the content of eval task"),
        (env.episodes_end_well, Crashing, "with empty answers: IndexError"),
        (env.episodes_end_well, NanReward, "reward 'reward' is Reward(score=nan"),
        (env.episodes_end_well, TwoSeats, "one rollout per agent is expected"),
        (env.scores_are_repeatable, Moody, "and one seed gave"),
        (env.episodes_do_not_share_state, Sharing, "beside other episodes"),
        (env.it_can_be_cancelled, Stubborn, "let asyncio.CancelledError through"),
        (env.a_failing_engine_ends_the_episode, Swallowing, "let it through"),
        (env.global_random_state_is_left_alone, Global, "random module's global generator"),
        (env.global_random_state_is_left_alone, GlobalNumpy, "numpy's global generator"),
        (env.answers_are_never_executed, Evaluating, "an answer was executed"),
    ],
)
def test_a_broken_environment_is_caught(check, broken, message) -> None:  # type: ignore[no-untyped-def]
    (result,) = contracts.run([check], GoodEnv)
    assert result.ok and not result.skipped, result.detail
    catches(check, broken, message)


def test_an_episode_that_never_ends_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    quickly = env.play
    monkeypatch.setattr(env, "play", lambda *args, **kwargs: quickly(*args, **{**kwargs, "limit_s": 0.05}))
    catches(env.episodes_end_well, Hanging, "did not end within")


# --- losses -----------------------------------------------------------------------------------------------


def plain(inputs):
    """-advantage * logprob on the rl component, and ce."""
    rl = (-inputs.advantages * inputs.logprobs * inputs.rl_weights).sum() / inputs.denominators["rl"]
    ce = (-inputs.logprobs * inputs.ce_weights).sum() / inputs.denominators["ce"]
    return LossOutputs(rl + ce, {"tokens": (inputs.rl_weights.sum(), 1.0 * len(inputs.rl_weights))})


def refusing(inputs):
    raise WeightsError("no")


def detached(inputs):
    return LossOutputs(plain(inputs).loss.detach())


def unmasked(inputs):
    return LossOutputs(plain(inputs).loss - 1e-3 * inputs.logprobs.sum() / 100)


def averaging(inputs):
    return LossOutputs(plain(inputs).loss / max(1, len(inputs.cu_seqlens) - 1))


def deaf(inputs):
    return LossOutputs((-inputs.logprobs * (inputs.rl_weights + inputs.ce_weights)).sum() / 17.0)


def overflowing(inputs):
    ratio = (inputs.logprobs - inputs.sampler_logprobs).exp()
    return LossOutputs(plain(inputs).loss + (ratio * inputs.rl_weights).sum() / inputs.denominators["rl"])


def meddling(inputs):
    out = plain(inputs)
    inputs.advantages.mul_(2.0)
    return out


class Remembering:
    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, inputs):
        self.seen += 1
        return LossOutputs(plain(inputs).loss * (1.0 + 0.1 * self.seen))


def mean_metric(inputs):
    out = plain(inputs)
    return LossOutputs(out.loss, {"mean": (inputs.entropy.detach().mean() if len(inputs.entropy) else 0.0, 1.0)})


@pytest.mark.parametrize(
    ("check", "broken", "message"),
    [
        (loss.it_trains_some_component, lambda: refusing, "refused every mixture"),
        (loss.it_returns_a_finite_scalar_with_a_gradient, lambda: detached, "the loss has no gradient"),
        (loss.tokens_without_weight_have_no_part, lambda: unmasked, "has a gradient"),
        (loss.rows_add_up, lambda: averaging, "a loss must not average"),
        (loss.denominators_divide, lambda: deaf, "with all denominators doubled"),
        (loss.it_is_finite_at_extremes, lambda: overflowing, "make the loss inf"),
        (loss.it_leaves_its_inputs_alone, lambda: meddling, "changed its inputs: ['advantages']"),
        (loss.it_keeps_nothing_between_calls, Remembering, "after another row"),
        (loss.metrics_are_sums_and_counts, lambda: mean_metric, "metric 'mean'"),
    ],
)
def test_a_broken_loss_is_caught(check, broken, message) -> None:  # type: ignore[no-untyped-def]
    (result,) = contracts.run([check], lambda: plain)
    assert result.ok, result.detail
    catches(check, broken, message)


# --- algorithms -------------------------------------------------------------------------------------------


class GoodAlgorithm:
    """Reward minus mean, and a count of groups as its state."""

    min_members = 2

    def __init__(self) -> None:
        self.groups = 0

    def credit(self, members):
        self.groups += 1
        rewards = [sum(r.reward for r in member.rollouts if r.trainable) for member in members]
        mean = sum(sorted(rewards)) / len(rewards)
        return [self.member(m, r - mean) for m, r in zip(members, rewards, strict=True)]

    def member(self, member, advantage):
        return [self.sample(header, advantage) for header in algorithm.trainable(member)]

    def sample(self, header, advantage):
        return Credit(((header.num_tokens, advantage),), ((header.num_tokens, 1.0),))

    def state(self):
        return {"groups": self.groups}

    def load_state(self, state):
        self.groups = state["groups"]


class Demanding(GoodAlgorithm):
    min_members = 0


class Forgetful(GoodAlgorithm):
    def member(self, member, advantage):
        return super().member(member, advantage)[:1]


class TooShort(GoodAlgorithm):
    def sample(self, header, advantage):
        return Credit(((header.num_tokens - 1, advantage),), ((header.num_tokens, 1.0),))


class Silent(GoodAlgorithm):
    def sample(self, header, advantage):
        return Credit((), ((header.num_tokens, 1.0),))


class Random(GoodAlgorithm):
    def sample(self, header, advantage):
        return super().sample(header, random.random())


class FirstWins(GoodAlgorithm):
    def credit(self, members):
        return [self.member(member, float(index == 0)) for index, member in enumerate(members)]


class Mutating(GoodAlgorithm):
    def credit(self, members):
        credits = super().credit(members)
        members[0].metrics["seen"] = 1.0
        return credits


class Amnesiac(GoodAlgorithm):
    def load_state(self, state):
        pass


@pytest.mark.parametrize(
    ("check", "broken", "message"),
    [
        (algorithm.it_says_how_many_members_it_needs, Demanding, "min_members is 0"),
        (algorithm.every_trainable_sample_has_one_credit, Forgetful, "trainable samples of a member, 1 credits"),
        (algorithm.streams_cover_their_samples, TooShort, "'advantages' covers"),
        (algorithm.different_rewards_give_a_signal, Silent, "no token of a group"),
        (algorithm.credit_depends_on_the_group_alone, Random, "credited the same group differently"),
        (algorithm.the_order_of_members_does_not_matter, FirstWins, "got another credit"),
        (algorithm.members_are_left_alone, Mutating, "changed the members"),
        (algorithm.state_survives_a_checkpoint, Amnesiac, "the states differ"),
    ],
)
def test_a_broken_algorithm_is_caught(check, broken, message) -> None:  # type: ignore[no-untyped-def]
    (result,) = contracts.run([check], GoodAlgorithm)
    assert result.ok, result.detail
    catches(check, broken, message)


# --- channels ---------------------------------------------------------------------------------------------


class Memory:
    """A channel within one process. Subclasses break it."""

    stores: dict[str, dict[int, Any]] = {}

    def sender(self, directory: Path) -> Memory:
        self.name = str(directory)
        self.versions = self.stores.setdefault(self.name, {})
        return self

    def receiver(self) -> Memory:
        return self

    def send(self, version, incarnation, tensors, probes, tolerance, adapter=None):
        held = {name: tensor.clone() for name, tensor in tensors}
        self.versions[version] = (incarnation, held, list(probes), tolerance, adapter)
        return WeightsRef(version, incarnation, self.name, 1, adapter is not None)

    def release(self, versions):
        for version in versions:
            self.versions.pop(version, None)

    def receive(self, weights):
        held = self.stores.get(weights.location, {}).get(weights.version)
        if held is None or held[0] != weights.incarnation:
            raise WeightsError("unknown")
        return ReceivedWeights(*held[1:])


class Rounding(Memory):
    def send(self, version, incarnation, tensors, probes, tolerance, adapter=None):
        rounded = ((name, t.bfloat16().float() if t.dtype == torch.float32 else t) for name, t in tensors)
        return super().send(version, incarnation, rounded, probes, tolerance, adapter)


class NoProbes(Memory):
    def send(self, version, incarnation, tensors, probes, tolerance, adapter=None):
        return super().send(version, incarnation, tensors, [], tolerance, adapter)


class NoAdapter(Memory):
    def send(self, version, incarnation, tensors, probes, tolerance, adapter=None):
        return super().send(version, incarnation, tensors, probes, tolerance)


class OneReader(Memory):
    def receive(self, weights):
        got = super().receive(weights)
        self.release([weights.version])
        return got


class KeepsTwo(Memory):
    def send(self, version, incarnation, tensors, probes, tolerance, adapter=None):
        self.release([version - 2])
        return super().send(version, incarnation, tensors, probes, tolerance, adapter)


class ReleasesOnce(Memory):
    def release(self, versions):
        for version in versions:
            del self.versions[version]


class AnyIncarnation(Memory):
    def receive(self, weights):
        return ReceivedWeights(*self.stores[weights.location][weights.version][1:])


class Newest(Memory):
    def receive(self, weights):
        versions = self.stores.get(weights.location) or next(iter(reversed(self.stores.values())))
        return ReceivedWeights(*versions[max(versions)][1:])


class InPlace(Memory):
    def send(self, version, incarnation, tensors, probes, tolerance, adapter=None):
        self.versions.clear()
        return super().send(version, incarnation, tensors, probes, tolerance, adapter)


@pytest.mark.parametrize(
    ("check", "broken", "message"),
    [
        (channel.what_is_sent_arrives_bit_for_bit, Rounding, "differs in"),
        (channel.probes_and_tolerance_travel_along, NoProbes, "the probes arrived as []"),
        (channel.an_adapter_arrives_with_its_description, NoAdapter, "does not say that it is one"),
        (channel.several_readers_may_read_one_version, OneReader, "unknown"),
        (channel.nothing_goes_before_it_is_released, KeepsTwo, "unknown"),
        (channel.releasing_is_idempotent, ReleasesOnce, "KeyError"),
        (channel.a_version_sent_again_replaces_the_former, AnyIncarnation, "a former incarnation was accepted"),
        (channel.an_unknown_version_is_refused, Newest, "another version than announced was accepted"),
        (channel.an_interrupted_send_leaves_the_former_version_whole, InPlace, "unknown"),
    ],
)
def test_a_broken_channel_is_caught(check, broken, message) -> None:  # type: ignore[no-untyped-def]
    store = Memory()
    (result,) = contracts.run([check], lambda: store)
    assert result.ok, result.detail
    store = broken()
    catches(check, lambda: store, message)


# --- engines and trainers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("check", engine.CLIENT_CHECKS, ids=lambda check: check.__name__)
def test_the_fake_engine_keeps_the_contract(check) -> None:  # type: ignore[no-untyped-def]
    async def main() -> None:
        await check(FakeEngine())

    asyncio.run(main())


class WrongVersion(FakeEngine):
    async def generate(self, request):
        made = await super().generate(request)
        return msgspec.structs.replace(made, versions=[version + 1 for version in made.versions])


class WrongLogprobs(FakeEngine):
    async def score(self, sequences):
        return [[0.0, *(value - 0.1 for value in row[1:])] for row in await super().score(sequences)]


class Crowded(FakeEngine):
    async def generate(self, request):
        made = await super().generate(request)
        return msgspec.structs.replace(made, token_ids=[0] * len(made.token_ids)) if self.load > 3 else made


class OneStream(FakeEngine):
    async def generate(self, request):
        return await super().generate(msgspec.structs.replace(request, seed=1))


class Unstoppable(FakeEngine):
    async def generate(self, request):
        return await super().generate(msgspec.structs.replace(request, stop_token_ids=[]))


class Unpausable(FakeEngine):
    async def pause(self):
        await super().pause()
        asyncio.get_running_loop().call_later(0.05, self._running.set)


class LeakingLoad(FakeEngine):
    async def generate(self, request):
        try:
            return await super().generate(request)
        except asyncio.CancelledError:
            self.load += 1
            raise


class HalfInstalled(FakeEngine):
    async def install(self, weights):
        self.version = weights.version
        return await super().install(weights)


@pytest.mark.parametrize(
    ("check", "broken", "error"),
    [
        (engine.every_token_has_its_logprob_and_version, WrongVersion, "the tokens say"),
        (engine.logprobs_are_those_of_the_model, WrongLogprobs, "scoring it gives"),
        (engine.companions_do_not_change_a_greedy_answer, Crowded, "in company"),
        (engine.requests_with_other_seeds_are_sampled_otherwise, OneStream, "gave 1 different"),
        (engine.a_stop_token_ends_an_answer, Unstoppable, "stopping at"),
        (engine.pausing_holds_requests_and_resuming_finishes_them, Unpausable, "a paused engine answered"),
        (engine.a_cancelled_request_leaves_nothing_behind, LeakingLoad, None),
        (engine.weights_that_cannot_be_read_change_nothing, HalfInstalled, "the version is 1"),
    ],
)
def test_a_broken_engine_is_caught(check, broken, error, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(engine, "PATIENCE_S", 1.0)

    async def main() -> None:
        await check(broken())

    with pytest.raises((AssertionError, TimeoutError), match=error):
        asyncio.run(main())


@pytest.mark.parametrize("check", trainer.CLIENT_CHECKS, ids=lambda check: check.__name__)
def test_the_fake_trainer_keeps_the_contract(check) -> None:  # type: ignore[no-untyped-def]
    asyncio.run(check(FakeTrainer(dp_size=2)))


@pytest.mark.parametrize(
    ("role", "message"),
    [
        (None, "returned a NoneType"),
        (Role("learner", ("python", "{run_dir}")), "is called 'learner'"),
        (Role("trainer", ("python", "-m", "x")), 'no "{run_dir}"'),
        (Role("trainer", ("python", "{run_dir}"), replicas=2), 'need "{replica}"'),
        (Role("trainer", ("python", "{run_dir}"), purpose="main"), "only the controller is a main role"),
    ],
)
def test_a_broken_role_is_caught(role, message) -> None:  # type: ignore[no-untyped-def]
    class Plugin:
        def role(self, config):
            return role

    catches(trainer.its_role_is_complete, Plugin, message)


# --- launchers --------------------------------------------------------------------------------------------


class Careless:
    """Starts nothing and is pleased with that."""

    def run(self, plan, run_dir, on_tick=None):
        return 0


def test_a_broken_launcher_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    for check in launcher.CHECKS[1:3]:
        catches(check, Careless, "with 0")
    catches(launcher.it_runs_every_role_to_the_end_of_the_main_ones, Careless, "No such file")

    class Endless:
        def run(self, plan, run_dir, on_tick=None):
            time.sleep(5)

    monkeypatch.setattr(launcher, "LIMIT_S", 1)
    catches(launcher.a_failing_main_role_fails_the_run, Endless, "did not end within 1 s")


# --- declarations and the door ------------------------------------------------------------------------------


def test_a_heavy_or_incomplete_declaration_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "heavy_plugin"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "plugin.py").write_text(
        "import numpy\nfrom prl.contribution import Contribution\nP = Contribution(factory='heavy_plugin.plugin:P')\n"
    )
    info = tmp_path / "heavy_plugin-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: heavy-plugin\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[prl.losses]\nheavy = heavy_plugin.plugin:P\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    registry.refresh()
    try:
        declared = declaration.Declared("losses", "heavy", registry.describe("losses", "heavy"))
    finally:
        registry.refresh()
    catches(declaration.the_declaration_is_complete, lambda: declared, "the summary is empty")
    catches(declaration.the_declaration_imports_nothing_heavy, lambda: declared, "declaring it imports numpy")
    catches(declaration.the_factory_exists, lambda: declared, "cannot be called")


def test_check_is_the_door_for_names_files_and_settings(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from prl.env import SingleTurnEnv\nfrom prl import Task\n"
        "class Mine(SingleTurnEnv):\n"
        "    def __init__(self, count: int):\n        self.count = count\n"
        "    def tasks(self, split):\n"
        "        return [Task(f'{split}-{n}', prompt=f'{split} {n}') for n in range(self.count)]\n"
        "    def score(self, task, text):\n        return float(text == 'yes')\n"
    )
    name = "./mine.py:Mine"
    without = contracts.check("envs", name, base=tmp_path)
    assert without[-1].skipped and "count" in without[-1].detail
    wrong = contracts.check("envs", name, {"count": "three"}, base=tmp_path)
    assert not wrong[-1].ok and "count" in wrong[-1].detail
    results = contracts.check("envs", name, {"count": 3}, base=tmp_path)
    assert all(result.ok for result in results), results
    assert {result.check for result in results} >= {check.__name__ for check in env.CHECKS}
    with pytest.raises(PluginMissing):
        contracts.check("envs", "no_such_environment")


def test_what_cannot_run_here_is_skipped_with_its_reason() -> None:
    class Cluster:
        def run(self, plan, run_dir, on_tick=None):
            raise EnvironmentNotFit("sbatch is not installed")

    results = contracts.run(launcher.CHECKS, Cluster)
    assert all(result.skipped and result.detail == "sbatch is not installed" for result in results)


def test_an_error_names_its_place() -> None:
    def broken(make: Callable[[], Any]) -> None:
        make().missing  # noqa: B018

    (result,) = contracts.run([broken], object)
    assert not result.ok and "AttributeError" in result.detail and "test_contracts.py" in result.detail
    assert dataclasses.asdict(result)["check"] == "broken"
    assert isinstance(Contribution("x:y"), Contribution)
