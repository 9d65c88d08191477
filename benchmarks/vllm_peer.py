"""The peer half of vllm_generation.py: vLLM alone, under its own interpreter.

    python vllm_peer.py REQUEST.json     prints one line "ROW {...}" for every measurement

The request names a model, prompts (lists of token ids), engine arguments and the measurements. Nothing of prl is
imported: what is measured is `AsyncLLM` of an unmodified vLLM, used as an application would for the most tokens per
second: it is given all requests at once, and its own scheduler keeps so many of them running as `max_num_seqs` says.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

Found = dict[str, Any]


async def measure(engine: Any, prompts: list[list[int]], asked: Found) -> Found:
    """One row: sampled tokens of all requests, divided by the seconds from the first request to the last answer."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    async def one(index: int) -> int:
        sampling = SamplingParams(
            temperature=1.0,
            max_tokens=asked["tokens"],
            ignore_eos=True,
            detokenize=False,
            logprobs=0 if asked["logprobs"] else None,
            output_kind=RequestOutputKind.FINAL_ONLY,
            seed=None,
        )
        name = f"{asked['tokens']}-{asked['logprobs']}-{index}"
        prompt = {"prompt_token_ids": prompts[index % len(prompts)]}
        answers = [answer async for answer in engine.generate(prompt, sampling, name)]
        return len(answers[-1].outputs[0].token_ids)

    began = time.perf_counter()
    counts = await asyncio.gather(*(one(index) for index in range(asked["requests"])))
    seconds = time.perf_counter() - began
    total = sum(counts)
    return {**asked, "sampled": total, "seconds": round(seconds, 3), "tokens_per_s": round(total / seconds, 1)}


async def serve(request: Found) -> None:
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    began = time.perf_counter()
    arguments = AsyncEngineArgs(model=request["model"], disable_log_stats=True, **request["engine"])
    engine = AsyncLLM.from_engine_args(arguments)
    try:
        first = {"requests": 2 * request["concurrency"]}
        await measure(engine, request["prompts"], {**first, "tokens": 8, "logprobs": False})
        await measure(engine, request["prompts"], {**first, "tokens": 8, "logprobs": True})
        print(f"vLLM {vllm.__version__} is ready after {time.perf_counter() - began:.0f} s", flush=True)
        gc.collect()
        gc.freeze()
        for asked in request["measurements"]:
            row = await measure(engine, request["prompts"], asked)
            print("ROW " + json.dumps({**row, "vllm": vllm.__version__}), flush=True)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    faulthandler.enable()
    asked = json.loads(Path(sys.argv[1]).read_text())
    faulthandler.dump_traceback_later(asked["seconds"], exit=True)
    asyncio.run(serve(asked))
