"""Bringing one version of the weights into a running engine, whole and verified, or not at all.

    announced     the workers are told; each starts to read and check it, while generation goes on
    transferring  they are asked how far they are
    installed     generation stopped between two tokens, the weights were exchanged, generation goes on;
                  what is generated now stays in this process
    verified      the trainer's probes, scored on every data-parallel rank, agree: what was held back is let go
    acknowledged  the caller is told, and the version before is dropped

What fails before "installed" changes nothing. What fails later fails the requests in flight, whose tokens came from
weights that nobody can vouch for, and puts the former version back, which its channel keeps until a newer one is
acknowledged. An engine that cannot do that ends itself: its launcher starts another, which installs before it serves.
Each state may take half of `engine.install_timeout_s`, after all of which the controller would have this engine killed:
time to fail, and to be asked once more. And each is a point of fault injection, "engine.<state>".
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from prl import faults
from prl.errors import WeightsError
from prl.messages import Installed, WeightsRef
from prl.protocols import Probe
from prl_engine_vllm import probes
from prl_engine_vllm.adapters import Adapters
from prl_engine_vllm.gate import Gate
from prl_engine_vllm.worker import Setup, said

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)

State = Literal["idle", "announced", "transferring", "installed", "verified", "acknowledged"]
FIRST_POLL_S, LAST_POLL_S = 0.005, 0.05
"""Pauses between two questions of how far the workers are. Each costs a running engine less than a millisecond."""


class Read(msgspec.Struct):
    """A version that every worker has read, and what it must reproduce."""

    token: str
    probes: list[Probe]
    tolerance: float


class Installer:
    """One engine's. `version` and `incarnation` are what it holds; 0 and 0 before the first install."""

    def __init__(
        self,
        llm: AsyncLLM,
        gate: Gate,
        setup: Setup,
        *,
        timeout_s: float,
        adapters: Adapters | None = None,
        end: Callable[[str], None] | None = None,
    ) -> None:
        self.version = 0
        self.incarnation = 0
        self.state: State = "idle"
        self.swap_stall_s = 0.0
        self.held_s = 0.0
        self.said = Installed()
        """How the version it holds reproduces the probes."""
        self.installs = 0
        self.last_error = ""
        self._llm = llm
        self._gate = gate
        self._setup = msgspec.to_builtins(setup)
        self._limit_s = timeout_s / 2
        self._adapters = adapters
        self._end = end or end_process
        self._quantised = llm.vllm_config.model_config.quantization is not None
        self._ranks = len(_engines(llm))
        self._lock = asyncio.Lock()
        self._held: Read | None = None
        self._target: WeightsRef | None = None
        self._since = time.monotonic()
        self._count = 0

    async def install(self, weights: WeightsRef) -> Installed:
        """Returns when it is verified. One that is asked for meanwhile waits; the version held is not installed again.

        Raises:
            WeightsError: it could not be; the engine holds exactly one whole version, as `version` says.
        """
        # Once begun it is ended, whoever stops waiting for it: nobody else would let go what is held back.
        return await asyncio.shield(asyncio.ensure_future(self._install(weights)))

    async def _install(self, weights: WeightsRef) -> Installed:
        async with self._lock:
            if self._held is not None and (weights.version, weights.incarnation) == (self.version, self.incarnation):
                return self.said
            self._target = weights
            try:
                read = await self._read(weights)
                await (self._add_adapter if weights.adapter else self._swap)(weights, read)
                async with self._state("acknowledged"):
                    self.installs += 1
                    self.last_error = ""
                return self.said
            except Exception as error:
                self.last_error = str(error)
                log.warning("version %d: %s; version %d is held", weights.version, error, self.version)
                if isinstance(error, WeightsError):
                    raise
                raise WeightsError(f"installing version {weights.version}: {said(error)}") from error
            finally:
                self._enter("idle")
                self._target = None

    def info(self) -> dict[str, Any]:
        """For health and for whoever asks why nothing moves."""
        found: dict[str, Any] = {
            "installs": self.installs,
            "swap_stall_s": round(self.swap_stall_s, 4),
            "install_held_s": round(self.held_s, 4),
            "probes_differ": self.said.probe_difference,
            "probe_kl": self.said.probe_kl,
        }
        if self._target is not None:
            found["installing"] = self.doing
        if self.last_error:
            found["install_error"] = self.last_error
        return found

    @property
    def doing(self) -> str:
        """One phrase while something is installed, else empty."""
        if self._target is None:
            return ""
        spent = time.monotonic() - self._since
        return f"installing version {self._target.version}: {self.state} for {spent:.1f} of {self._limit_s:g} s"

    def gauges(self) -> dict[str, float]:
        return {"swap_stall_s": self.swap_stall_s, "probes_differ": self.said.probe_difference}

    def close(self) -> None:
        """Nothing is installed any more."""
        if self._adapters is not None:
            self._adapters.close()

    # --- reading, while generation goes on ------------------------------------------------------------------

    async def _read(self, weights: WeightsRef) -> Read:
        self._count += 1
        token = f"{weights.version}.{weights.incarnation}.{self._count}"
        async with self._state("announced"):
            answers = await self._workers("prl_begin", token, msgspec.to_builtins(weights), self._setup)
            _raise_first(answers)
        async with self._state("transferring"):
            answers = await self._until_read(token)
        described = next((answer for answer in answers if answer["probes"]), answers[0])
        tolerance = max(answer["tolerance"] for answer in answers)
        log.info(
            "version %d: %d tensors read in %.3f s", weights.version, described["tensors"],
            max(answer["seconds"] for answer in answers),
        )  # fmt: skip
        return Read(
            token,
            [Probe(list(ids), list(logprobs), first) for ids, logprobs, first in described["probes"]],
            probes.allowed(tolerance, quantised=self._quantised),
        )

    async def _until_read(self, token: str) -> list[dict[str, Any]]:
        pause = FIRST_POLL_S
        while True:
            answers = await self._workers("prl_poll", token)
            _raise_first(answers)
            if all(answer["read"] for answer in answers):
                return answers
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_POLL_S)

    # --- the exchange ---------------------------------------------------------------------------------------

    async def _swap(self, weights: WeightsRef, read: Read) -> None:
        started = time.monotonic()
        try:
            async with self._deadline("stopping between two tokens"):
                await self._gate.pause()
        except Exception:
            await self._go_on()
            raise
        generated = False
        try:
            async with self._state("installed"):
                self._gate.hold()
                await asyncio.to_thread(faults.point, "engine.install")
                _raise_first(await self._workers("prl_apply", read.token))
                generated = True
                await self._gate.resume(weights.version, weights.incarnation)
            self.swap_stall_s = time.monotonic() - started
            async with self._state("verified"):
                found = await probes.check(self._gate, read.probes, read.tolerance, ranks=self._ranks)
        except Exception as error:
            await self._put_back(error, generated=generated)
            raise
        await self._keep(read)
        self._hold(weights, read, found)
        self._gate.release()
        self.held_s = time.monotonic() - started
        log.info(
            "version %d installed: generation stood still for %.3f s, answers were held for %.3f s, probes differ by "
            "%.2g (allowed is %.2g), KL %.2g over %d tokens",
            weights.version, self.swap_stall_s, self.held_s, found.probe_difference, read.tolerance, found.probe_kl,
            found.probe_tokens,
        )  # fmt: skip

    async def _put_back(self, why: Exception, *, generated: bool) -> None:
        """Bring the former version back, after an exchange or the probes failed for `why`, or end this process.

        Args:
            generated: the engine may have made tokens, keys and values with the weights that failed. Else requests
                go on as if nothing had been.
        """
        log.warning("version %d is put back: %s", self.version, why)
        try:
            async with self._deadline("putting the former version back"):
                if generated:
                    # Stopped first: a request that comes meanwhile must not get a token of these weights.
                    await self._gate.pause()
                    await self._gate.fail_in_flight(f"weights that were not verified: {why}")
                    # Blocks that were filled meanwhile stand under the former version's salt too.
                    await self._llm.reset_prefix_cache(reset_running_requests=True)
                _raise_first(await self._workers("prl_restore"))
                await self._gate.resume(self.version, self.incarnation)
                if self._held is not None:
                    await probes.check(self._gate, self._held.probes, self._held.tolerance, ranks=self._ranks)
        except Exception as error:
            self._end(f"version {self.version} cannot be put back, this engine holds no whole version: {said(error)}")
            raise
        self._gate.release()

    async def _keep(self, read: Read) -> None:
        """From here on this version is the one that would be put back."""
        try:
            async with self._deadline("telling the workers that it is verified"):
                _raise_first(await self._workers("prl_keep", read.token))
        except Exception as error:
            self._end(f"the workers may not agree on the version to keep: {said(error)}")
            raise

    async def _go_on(self) -> None:
        """After a pause that did not come in time."""
        try:
            async with self._deadline("going on"):
                await self._gate.resume(self.version, self.incarnation)
        except Exception as error:
            self._end(f"the engine can be neither paused nor resumed: {said(error)}")
            raise

    def _hold(self, weights: WeightsRef, read: Read, found: Installed) -> None:
        self.version, self.incarnation, self._held, self.said = weights.version, weights.incarnation, read, found

    # --- adapters: no exchange, another one beside those in use ---------------------------------------------

    async def _add_adapter(self, weights: WeightsRef, read: Read) -> None:
        adapters = self._adapters
        if adapters is None:
            raise WeightsError("adapters were announced, and this engine was started without room for them")
        in_use = self._gate.adapters_in_use
        async with self._state("installed"):
            await asyncio.to_thread(faults.point, "engine.install")
            await adapters.remove_unused(in_use())  # room for this one
            folder = adapters.next_folder()
            _raise_first(await self._workers("prl_adapter", read.token, str(folder)))
            lora = await adapters.load(folder, weights.version)
        try:
            async with self._state("verified"):
                found = await probes.check(self._gate, read.probes, read.tolerance, ranks=self._ranks, lora=lora)
        except Exception:
            await adapters.remove_unused(in_use())
            raise
        self._gate.serve_adapter(weights.version, weights.incarnation, lora)
        self._hold(weights, read, found)
        await adapters.remove_unused(in_use())
        log.info(
            "version %d serves as adapters, probes differ by %.2g, KL %.2g over %d tokens",
            weights.version, found.probe_difference, found.probe_kl, found.probe_tokens,
        )  # fmt: skip

    # --- states, deadlines, workers -------------------------------------------------------------------------

    def _enter(self, state: State) -> None:
        self.state, self._since = state, time.monotonic()

    @asynccontextmanager
    async def _state(self, state: State) -> AsyncIterator[None]:
        self._enter(state)
        async with self._deadline(state):
            await asyncio.to_thread(faults.point, f"engine.{state}")
            yield

    @asynccontextmanager
    async def _deadline(self, what: str) -> AsyncIterator[None]:
        limit = asyncio.timeout(self._limit_s)
        try:
            async with limit:
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise WeightsError(
                f"{what} took longer than {self._limit_s:g} s, half of engine.install_timeout_s; raise that where "
                "reading weights takes so long"
            ) from error

    async def _workers(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """Call a method of every worker of every data-parallel engine; all of their answers."""
        engines = _engines(self._llm)
        if len(engines) == 1:
            answers: list[dict[str, Any]] = await self._llm.collective_rpc(method, args=args)
            return answers
        # vLLM's own call returns the first engine's answers alone.
        client = self._llm.engine_core
        each = await asyncio.gather(
            *(client._call_utility_async("collective_rpc", method, None, args, {}, engine=engine) for engine in engines)
        )
        return [answer for answers in each for answer in answers]


def _engines(llm: AsyncLLM) -> Sequence[bytes]:
    """The data-parallel engines behind `llm`."""
    engines: Sequence[bytes] = llm.engine_core.core_engines
    return engines


def _raise_first(answers: Sequence[dict[str, Any]]) -> None:
    for index, answer in enumerate(answers):
        if answer["error"]:
            where = f"worker {index}: " if len(answers) > 1 else ""
            raise WeightsError(where + answer["error"])


def end_process(why: str) -> None:
    """At once: what is in flight must not leave, and vLLM's processes end with this one."""
    log.critical("%s", why)
    sys.stderr.flush()
    os._exit(1)
