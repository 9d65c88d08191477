"""Booking tokens, versions, holding back, aborting: over a vLLM that is a few fakes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prl.engine.backend import Result
from prl.errors import WireError
from prl.messages import GenerateRequest
from prl.messages import Generation as Made
from prl.types import Sampling
from prl_engine_vllm.flights import Flight
from prl_engine_vllm.generation import Generation

STOP, LENGTH, ABORT = 0, 1, 2


class Core:
    """vLLM's engine core client: it writes down what comes and hands out what a test says."""

    def __init__(self) -> None:
        self.outputs_queue: asyncio.Queue[Any] = asyncio.Queue()
        self.added: list[Any] = []
        self.aborted: list[str] = []
        self.calls: list[Any] = []

    async def add_request_async(self, request: Any) -> None:
        self.added.append(request)

    async def abort_requests_async(self, ids: list[str]) -> None:
        self.aborted += ids

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        self.calls.append(("pause", mode, clear_cache))

    async def resume_scheduler_async(self) -> None:
        self.calls.append("resume")

    async def reset_prefix_cache_async(self, running: bool) -> None:
        self.calls.append(("reset", running))


class World:
    def __init__(self, *, recompute: bool = True, seats: int = 16, ranks: int = 1) -> None:
        self.core = Core()
        self.dead: list[str] = []
        self.results: list[Result] = []
        self.http_aborted: list[str] = []
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=seats),
            parallel_config=SimpleNamespace(data_parallel_size=ranks),
            cache_config=SimpleNamespace(num_gpu_blocks=10, block_size=16),
        )

        async def abort(ids: list[str], internal: bool) -> None:
            self.http_aborted += ids

        self.llm: Any = SimpleNamespace(
            vllm_config=config,
            model_config=SimpleNamespace(max_model_len=100),
            engine_core=self.core,
            input_processor=SimpleNamespace(process_inputs=self._process),
            output_processor=SimpleNamespace(request_states={"chatcmpl-1": None}),
            abort=abort,
            log_stats=False,
        )
        self.generation = Generation(self.llm, ("generate",), recompute=recompute, on_dead=self.dead.append)
        self.generation.start(self.results.extend)

    def _process(self, id: str, prompt: Any, parameters: Any, **keywords: Any) -> Any:
        if max(prompt["prompt_token_ids"]) > 1000:
            raise ValueError("out of vocabulary")
        return SimpleNamespace(
            request_id=id,
            cache_salt=None,
            sampling_params=parameters,
            lora_request=keywords["lora_request"],
            priority=keywords["priority"],
            rank=keywords["data_parallel_rank"],
        )

    async def add(self, *names: str) -> list[str]:
        """Add requests; their names at vLLM."""
        before = len(self.core.added)
        self.generation.add([(("peer", n), GenerateRequest(n, [1, 2], Sampling(8), [3], 5, 60.0)) for n in names])
        await settled()
        return [request.request_id for request in self.core.added[before:]]

    def step(self, *outputs: Any, stats: Any = None) -> None:
        self.core.outputs_queue.put_nowait(
            SimpleNamespace(outputs=list(outputs), scheduler_stats=stats, engine_index=0, timestamp=0.0)
        )

    def ended(self) -> dict[str, Any]:
        return {result.key[1]: result.generation or result.failure for result in self.results}


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def output(id: str, *tokens: int, finish: int | None = None, events: Any = None) -> Any:
    """A step's output of a request: the log-probability of token t is -t; a column beside is another's."""
    scored = SimpleNamespace(logprobs=np.array([[-float(t), -99.0] for t in tokens], np.float32).reshape(-1, 2))
    return SimpleNamespace(
        request_id=id,
        new_token_ids=list(tokens),
        new_logprobs=scored if tokens else None,
        new_prompt_logprobs_tensors=None,
        finish_reason=finish,
        events=events,
    )


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The two modules of vLLM's that a request is made with."""
    parameters, inputs = ModuleType("vllm.sampling_params"), ModuleType("vllm.inputs.engine")
    parameters.SamplingParams = lambda **given: SimpleNamespace(**given)  # type: ignore[attr-defined]
    inputs.tokens_input = lambda ids: {"type": "token", "prompt_token_ids": ids}  # type: ignore[attr-defined]
    for name, module in {
        "vllm": ModuleType("vllm"),
        "vllm.inputs": ModuleType("vllm.inputs"),
        "vllm.sampling_params": parameters,
        "vllm.inputs.engine": inputs,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield


def scenario(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(body())


def test_tokens_are_booked_with_their_logprobs_in_the_order_they_come() -> None:
    async def body() -> None:
        world = World()
        a, b = await world.add("a", "b")
        world.step(output(a, 4), output(b, 5, 6))
        world.step(output(a, 7, finish=STOP), output(b, 8, finish=LENGTH))
        assert world.ended() == {
            "a": Made([4, 7], [-4.0, -7.0], [0, 0], "stop"),
            "b": Made([5, 6, 8], [-5.0, -6.0, -8.0], [0, 0, 0], "length"),
        }
        assert world.generation.load == 0 and world.generation.gauges.tokens == 5

    scenario(body)


def test_sampling_parameters_are_complete() -> None:
    async def body() -> None:
        world = World()
        request = GenerateRequest("a", [1, 2], Sampling(7, 0.5, 0.9, 3), [3, 4], 2**64 - 1, 60.0)
        world.generation.add([(("peer", "a"), request)])
        await settled()
        given = vars(world.core.added[0].sampling_params)
        assert given["seed"] == 2**63 - 1 and given["logprobs"] == 0 and given["ignore_eos"]
        assert (given["max_tokens"], given["temperature"], given["top_p"], given["top_k"]) == (7, 0.5, 0.9, 3)
        assert given["stop_token_ids"] == [3, 4]

    scenario(body)


@pytest.mark.parametrize("recompute", [True, False])
def test_tokens_after_a_swap_are_of_the_new_version(recompute: bool) -> None:
    async def body() -> None:
        world = World(recompute=recompute)
        generation = world.generation
        (a,) = await world.add("a")
        world.step(output(a, 4), output("chatcmpl-1", 9))
        await generation.pause()
        (b,) = await world.add("b")
        await generation.resume(3, 1)
        (c,) = await world.add("c")
        assert ("reset", True) in world.core.calls if recompute else ("reset", True) not in world.core.calls
        world.step(output(a, 5, finish=STOP), output(b, 6, finish=STOP), output(c, 7, finish=STOP))
        versions = {name: made.versions for name, made in world.ended().items()}
        assert versions == {"a": [0, 3], "b": [3], "c": [3]}
        salts = [request.cache_salt for request in world.core.added]
        assert salts[0] != salts[2], "a prefix of the former weights would serve the new ones"

    scenario(body)


def test_a_pause_without_a_swap_changes_nothing() -> None:
    async def body() -> None:
        world = World()
        await world.add("a")
        await world.generation.pause()
        await world.generation.resume(0, 0)
        await world.add("b")
        assert world.core.calls == [("pause", "keep", False), "resume"]
        assert world.core.added[0].cache_salt == world.core.added[1].cache_salt

    scenario(body)


def test_a_request_that_did_not_leave_before_a_swap_is_of_the_new_version_alone() -> None:
    flight = Flight("x", ("peer", "x"), GenerateRequest("x", [1], Sampling(3), [], 0, 1.0))
    for version in (1, 2, 2):
        flight.mark(version)
    flight.tokens = [5, 6]
    flight.mark(3)
    flight.tokens += [7]
    assert flight.versions() == [2, 2, 3]


def test_what_is_held_back_leaves_when_it_is_released_and_not_before() -> None:
    async def body() -> None:
        world = World()
        (a,) = await world.add("a")
        world.generation.hold()
        world.step(output(a, 4, finish=STOP), output("chatcmpl-1", 9))
        assert world.results == [] and world.core.outputs_queue.empty()
        assert world.generation.load == 1, "it has not ended for whoever waits"
        world.generation.release()
        assert list(world.ended()) == ["a"] and world.generation.load == 0
        assert [one.request_id for one in world.core.outputs_queue.get_nowait().outputs] == ["chatcmpl-1"]

    scenario(body)


def test_failing_what_is_in_flight_drops_what_was_held() -> None:
    async def body() -> None:
        world = World(seats=4)  # two of them for probes
        a, b = await world.add("a", "b", "waiting")
        world.generation.hold()
        world.step(output(a, 4, finish=STOP), output(b, 5))
        await settled()
        before = world.core.added[-1].cache_salt
        await world.generation.fail_in_flight("the probes do not agree")
        world.generation.release()
        await settled()
        failed = world.ended()
        assert set(failed) >= {"a", "b"}
        assert all(failed[name].retryable and failed[name].reason == "" for name in ("a", "b"))
        assert b in world.core.aborted and world.http_aborted == ["chatcmpl-1"]
        await world.add("c")
        assert world.core.added[-1].cache_salt != before

    scenario(body)


def test_what_waited_outside_starts_under_the_weights_that_were_put_back() -> None:
    async def body() -> None:
        world = World(seats=4)  # two of them for probes
        await world.add("a", "b", "waiting")
        world.generation.hold()
        await world.generation.resume(2, 0)
        await world.generation.fail_in_flight("the probes do not agree")
        assert await world.add("new") == []
        await world.generation.resume(1, 0)
        world.generation.release()
        await settled()
        started = world.core.added[-2:]
        world.step(*(output(request.request_id, 4, finish=STOP) for request in started))
        versions = {name: made.versions for name, made in world.ended().items() if isinstance(made, Made)}
        assert versions == {"waiting": [1], "new": [1]} and world.generation.load == 0

    scenario(body)


def test_probes_are_scored_while_results_are_held_and_before_what_waits() -> None:
    async def body() -> None:
        world = World()
        await world.add("a")
        world.generation.hold()
        scoring = asyncio.create_task(world.generation.score([[1, 2, 3], [4]], rank=1))
        await settled()
        asked = world.core.added[-1]
        assert asked.priority < world.core.added[0].priority and asked.rank == 1
        answer = output(asked.request_id, 9, finish=LENGTH)
        answer.new_prompt_logprobs_tensors = SimpleNamespace(logprobs=np.array([[-1.0], [-2.0]], np.float32))
        world.step(answer)
        assert await scoring == [[0.0, -1.0, -2.0], [0.0]]
        assert world.results == [] and world.generation.load == 1

    scenario(body)


def test_aborting_forgets_a_request_wherever_it_is() -> None:
    async def body() -> None:
        world = World(seats=3)
        (a,) = await world.add("a", "waiting")
        world.generation.abort([("peer", "waiting"), ("peer", "unknown")])
        world.generation.abort([("peer", "a")])
        await settled()
        assert world.core.aborted == [a] and world.generation.load == 0
        world.step(output(a, 4, finish=ABORT))
        assert world.results == [] and world.core.outputs_queue.empty()

    scenario(body)


def test_only_as_many_as_there_are_seats_are_at_vllm() -> None:
    async def body() -> None:
        world = World(seats=4)
        first = await world.add("a", "b", "c", "d")
        assert len(first) == 2 and world.generation.gauges.values()["waiting"] == 2
        world.step(output(first[0], 4, finish=STOP))
        await settled()
        assert len(world.core.added) == 3 and world.generation.load == 3

    scenario(body)


def test_every_rank_has_its_seats_and_is_given_no_more() -> None:
    async def body() -> None:
        world = World(seats=4, ranks=2)
        names = await world.add("a", "b", "c", "d", "e", "f")
        assert [request.rank for request in world.core.added] == [0, 1, 0, 1]
        world.step(output(names[1], 4, finish=STOP))
        world.generation.abort([("peer", "d")])
        await settled()
        assert [request.rank for request in world.core.added[4:]] == [1, 1]

    scenario(body)


def test_bad_requests_fail_alone() -> None:
    async def body() -> None:
        world = World()
        cases = {"empty": [], "long": [1] * 100, "unknown": [5000], "good": [1]}
        world.generation.add(
            [(("peer", n), GenerateRequest(n, ids, Sampling(4), [], 0, 1.0)) for n, ids in cases.items()]
        )
        reasons = {name: failure.reason for name, failure in world.ended().items()}
        assert reasons == {"empty": "bad_request", "long": "context_full", "unknown": "bad_request"}
        assert world.generation.load == 1

    scenario(body)


def test_a_number_that_is_none_is_the_episode_s_failure_and_a_lost_logprob_the_engine_s() -> None:
    async def body() -> None:
        world = World()
        a, b = await world.add("a", "b")
        spoiled = output(a, 4, finish=STOP)
        spoiled.new_logprobs.logprobs[0, 0] = np.nan
        bare = output(b, 5, finish=STOP)
        bare.new_logprobs = None
        world.step(spoiled, bare)
        assert world.ended()["a"].reason == "engine_nan" and world.ended()["b"].reason == ""

    scenario(body)


def test_a_dead_engine_core_is_told_to_the_process_and_to_who_scores() -> None:
    async def body() -> None:
        world = World()
        scoring = asyncio.create_task(world.generation.score([[1, 2]]))
        await settled()
        world.core.outputs_queue.put_nowait(RuntimeError("gone"))
        with pytest.raises(WireError, match="gone"):
            await scoring
        assert "gone" in world.dead[0]

    scenario(body)


def test_adapters_serve_new_requests_and_are_in_use_until_theirs_end() -> None:
    async def body() -> None:
        world = World()
        one, two = SimpleNamespace(lora_int_id=1), SimpleNamespace(lora_int_id=2)
        world.generation.serve_adapter(1, 0, one)
        (a,) = await world.add("a")
        world.generation.serve_adapter(2, 0, two)
        (b,) = await world.add("b")
        assert [request.lora_request for request in world.core.added] == [one, two]
        assert world.generation.adapters_in_use() == {1, 2}
        world.step(output(a, 4, finish=STOP), output(b, 4, finish=STOP))
        assert world.generation.adapters_in_use() == {2}
        assert [world.ended()[name].versions for name in ("a", "b")] == [[1], [2]]
        stranger: Any = SimpleNamespace(request_id="chatcmpl-2", cache_salt="mine", lora_request=None)
        await world.core.add_request_async(stranger)
        assert stranger.lora_request is two and stranger.cache_salt.endswith(".mine")

    scenario(body)


def test_a_swap_s_own_preemptions_are_no_sign_of_pressure() -> None:
    async def body() -> None:
        world = World()
        (a,) = await world.add("a")
        world.step(output(a, 4))
        await world.generation.pause()
        await world.generation.resume(1, 0)
        preempted = [SimpleNamespace(type=3)]
        world.step(output(a, 5, events=preempted))
        assert world.generation.gauges.preemptions == 0
        stats = SimpleNamespace(num_running_reqs=1, num_waiting_reqs=2, num_skipped_waiting_reqs=1, kv_cache_usage=0.5)
        world.step(output(a, 6, events=preempted), stats=stats)
        assert world.generation.gauges.values() == {
            "tokens": 3.0, "running": 1.0, "waiting": 3.0, "kv_usage": 0.5, "preemptions": 1.0, "capacity": 160.0,
        }  # fmt: skip

    scenario(body)
