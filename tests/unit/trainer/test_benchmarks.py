"""Tables of docs/performance.md, the chunked head's memory, and one process against several: benchmarks/ on CPU."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from .benchmarks import BENCHMARKS, loaded

table, head, scaling, costs = (loaded(name) for name in ("table", "head_memory", "h200_scaling", "trainer_costs"))
TINY = loaded("trainer_peer").TINY
ABOUT = {"hardware": "NVIDIA H200", "versions": {"torch": "2.11.0"}, "date": "2026-11-30"}


def step(trainer: str, rate: float, recompute: str = "none", **more: Any) -> dict[str, Any]:
    return {
        "trainer": trainer,
        "case": "16k",
        "model": "qwen3-0.6b",
        "seq_len": 16384,
        "documents": [16384],
        "recompute": recompute,
        "lora": 0,
        "tokens_per_s": rate,
        "mfu": 0.5,
        "peak_gib": 20.25,
        "step_s": [16384 / rate],
        **ABOUT,
        **more,
    }


def test_the_page_has_what_the_results_say() -> None:
    page = table.PAGE.read_text()
    assert table.updated(page) == page, "run python benchmarks/table.py"
    with pytest.raises(ValueError, match="no place for 'trainer'"):
        table.updated("")


def test_a_row_compares_with_the_peer_and_the_limit(tmp_path: Path) -> None:
    rows = [step("prl", 40000), step("prl", 60000), step("prl", 50000), step("transformers", 40000)]
    (tmp_path / "h200_trainer.json").write_text(json.dumps([*rows, step("prl", 30000, "full")]))
    shown = table.table("trainer", tmp_path).splitlines()
    # 6 x 596 million x 16,384 at 650 TFLOP/s, and 7 x 16,384^2 x 2,048 x 28 at 604: 268.5 ms.
    assert table.limit_s(rows[0]) == pytest.approx(0.26853, abs=1e-5)
    assert table.limit_s(step("prl", 1, "full")) > table.limit_s(step("prl", 1, "selective")) > 0.2686
    cells = "none | **50,000** | 50% | 20.2 | 61,013 | 82% | 40,000 | 20.2 | 1.25 |"
    assert shown[2] == f"| Qwen3-0.6B, 16,384 tokens as one document | {cells}"
    assert "| full | **30,000** |" in shown[3] and shown[3].endswith("| - | - | - |")
    assert shown[-1] == "NVIDIA H200, 2026-11-30: torch 2.11.0."
    assert table.table("parts", tmp_path) == "No profile has been recorded yet."


def test_a_profile_says_where_the_gap_goes(tmp_path: Path) -> None:
    profiled = step("prl", 16384 / 0.3, profile_ms={"categories": {"attention": 180.0, "products": 95.5}})
    (tmp_path / "h200_trainer.json").write_text(json.dumps([profiled]))
    assert table.table("parts", tmp_path).splitlines()[-1].endswith("| none | 300.0 | 268.5 | 180.0 | 95.5 | 24.5 |")


def test_the_chunked_head_needs_a_fraction_of_the_plain_one() -> None:
    """1,024 tokens and 8,192 words: one matrix of them is 32 MiB, of which the plain head has several at once."""
    matrix = 1024 * 8192 * 4 / head.GIB
    chunked = head.measure(functools.partial(head.HEADS["chunked"], chunk=64), 1024, 8192, 16)
    plain = head.measure(head.HEADS["plain"], 1024, 8192, 16)
    assert chunked["peak_gib"] < 0.5 * matrix
    assert plain["peak_gib"] > 3 * matrix


def test_the_recorded_peak_is_a_fraction_of_the_plain_one() -> None:
    rows = {row["head"]: row for row in json.loads((BENCHMARKS / "results" / "head_memory.json").read_text())}
    assert all((row["tokens"], row["vocab"]) == (4096, 65536) for row in rows.values())
    assert rows["chunked"]["peak_gib"] < 0.2 * rows["plain"]["peak_gib"]


def test_two_processes_compute_what_one_does(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    options = ["--device", "cpu", "--shapes", json.dumps(TINY), "--documents", "20,12,31", "--scaling", ""]
    assert scaling.main([*options, "--dtypes", "float32", "--out", str(out)]) == 0, capfd.readouterr()
    rows = json.loads(out.read_text())
    assert [row["layout"] for row in rows] == ["fsdp", "ulysses", "ring"]
    assert all(row["agrees"] and row["logprobs"] < 1e-5 and row["grad_norm"] < 1e-5 for row in rows)
    assert all(max(row["gradient"]) < 1e-5 and "layers.1" in row["gradient_layers"] for row in rows)
    assert any(max(row["gradient"]) > 0 for row in rows)
    timed = {"kind": "scaling", "layout": "fsdp", "world": 2, "one": 100.0, "all": 190.0, "efficiency": 0.95}
    out.rename(tmp_path / "h200_scaling.json")
    (tmp_path / "h200_scaling.json").write_text(json.dumps([*rows, {**timed, "model": "m", "seq_len": 9, **ABOUT}]))
    shown = table.table("scaling", tmp_path)
    assert "| ring, 2 ranks | float32 |" in shown and "| fsdp, 2 GPUs | m | 9 | 100 | 190 | 95% |" in shown


def test_a_checkpoint_stops_the_trainer_for_its_snapshot_only(tmp_path: Path) -> None:
    options = costs.parsed(["--device", "cpu", "--steps", "2", "--tokens", "64"])
    config = costs.asked(options)
    config["bench"]["shapes"] = TINY
    row = costs.measure({"config": config, "folder": str(tmp_path)})
    assert len(row["step_s"]) == 2 and row["bytes"] > 100_000
    assert 0 < max(row["snapshot_s"]) < row["beside_s"] + 1 and row["waited_s"] > min(row["snapshot_s"])
    optimizer = {"kind": "optimizer", "optimizer": "muon", "peak_gib": 14.0, "parts": {"optimizer": 0.012}, **ABOUT}
    rows = [{**optimizer, "step_s": [0.31, 0.3, 0.32]}, {**row, **ABOUT, "step_meanwhile_s": [0.4], "step_s": [0.3]}]
    (tmp_path / "h200_trainer_costs.json").write_text(json.dumps(rows))
    shown = table.table("costs", tmp_path)
    assert "| muon | 310.0 | 12.0 | 14.0 |" in shown and "400 ms beside 300 ms" in shown


def test_orchestration_is_compared_with_the_best_of_vllm_alone(tmp_path: Path) -> None:
    generation = loaded("vllm_generation")
    about = {"model": "m", "hardware": "NVIDIA H200", "tokens": 512, "concurrency": 512, "requests": 2048}
    about |= {"prompt": 256, "versions": {"torch": "2.11.0"}, "date": "2026-12-01"}
    vllm = {"side": "vllm", **about}
    rows = [{**vllm, "logprobs": False, "tokens_per_s": 33000.0}]
    rows += [{**vllm, "logprobs": True, "tokens_per_s": 30000.0}]
    rows += [{**vllm, "logprobs": True, "tokens_per_s": 90000.0, "tokens": 64}]
    swaps = [{"swap_stall_s": 0.2, "probes_differ": 0.03}, {"swap_stall_s": 0.1}]
    own = {"side": "prl", **about, "tokens_per_s": 27000.0, "swaps": swaps, "crossing": 512, "channel": "cuda_ipc"}
    rows = generation.with_ratios([*rows, own])
    assert rows[-1]["ratio"] == 0.9
    (tmp_path / "vllm_generation.json").write_text(json.dumps(rows))
    shown = table.table("generation", tmp_path)
    assert "| 256 + 512 tokens | 512 | 33,000 | 30,000 | 27,000 | 90% | 82% |" in shown
    assert "| 2 by cuda_ipc | 150 ms, 200 ms | 512 of 2,048 | at most 3.0e-02 |" in shown
