"""Write the tables of docs/performance.md from the results: `python benchmarks/table.py`.

Each table stands between `<!-- benchmarks/table.py: NAME -->` and `<!-- end -->`; a test fails when one is not what
this prints, so no figure there is typed by hand. A part of a step that nobody has measured has no row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from prl.flops import step_flops
from prl_trainer_fsdp.bench.named import SHAPES

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "performance.md"
RESULTS = HERE / "results"

PRODUCTS = 650e12
"""Operations per second that large bfloat16 products reach on one H200."""
ATTENTION = {"16k": 604e12, "mixed": 451e12, "64k": 604e12, "4b-lora": 604e12}
"""The same of FlashAttention 4, forward and backward together, on the documents of each case."""
TITLES = {
    "16k": "Qwen3-0.6B, 16,384 tokens as one document",
    "mixed": "the same tokens as 8 documents",
    "64k": "Qwen3-0.6B, 65,536 tokens as one document",
    "4b-lora": "Qwen3-4B, LoRA rank 16, 16,384 tokens",
}
RECOMPUTED = ("none", "selective", "full")

Row = dict[str, Any]
Rows = Sequence[Row]


def limit_s(row: Row) -> float:
    """Seconds of products and attention alone, at the rates above: no element-wise work, no optimiser, no waiting."""
    config = SHAPES[row["model"]]
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    flops = step_flops(config, [row["documents"]], lora_rank=row["lora"], lora_targets=targets)
    products, attention = flops.hardware(row["recompute"])
    return products / PRODUCTS + attention / ATTENTION[row["case"]]


def best(rows: Rows, case: str, trainer: str, recompute: str) -> Row | None:
    """Of several measurements of one step the one in the middle."""
    found = [r for r in rows if (r.get("case"), r["trainer"], r["recompute"]) == (case, trainer, recompute)]
    return sorted(found, key=lambda row: row["tokens_per_s"])[len(found) // 2] if found else None


def trainer_table(rows: Rows) -> list[str]:
    lines = [
        "| a step of | recomputed | prl, tokens/s | MFU | peak GiB | limit by arithmetic | of it | peer, tokens/s |"
        " peak GiB | prl / peer |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case, title in TITLES.items():
        for recompute in RECOMPUTED:
            own, peer = (best(rows, case, trainer, recompute) for trainer in ("prl", "transformers"))
            if own is None and peer is None:
                continue
            cells = [title, recompute, *["-"] * 5]
            if own is not None:
                most = own["seq_len"] / limit_s(own)
                cells[2:] = [
                    f"**{own['tokens_per_s']:,.0f}**",
                    percent(own["mfu"]),
                    f"{own['peak_gib']:.1f}",
                    f"{most:,.0f}",
                    percent(own["tokens_per_s"] / most),
                ]
            cells += [f"{peer['tokens_per_s']:,.0f}", f"{peer['peak_gib']:.1f}"] if peer is not None else ["-", "-"]
            both = own is not None and peer is not None
            cells.append(f"{own['tokens_per_s'] / peer['tokens_per_s']:.2f}" if own and peer and both else "-")
            lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", *measured_on(rows)]


def parts_table(rows: Rows) -> list[str]:
    """What a step of prl's is spent on, beside what arithmetic allows: from the steps that were profiled."""
    profiled = [row for row in rows if row["trainer"] == "prl" and row.get("profile_ms", {}).get("categories")]
    if not profiled:
        return ["No profile has been recorded yet."]
    names = list(dict.fromkeys(name for row in profiled for name in row["profile_ms"]["categories"]))
    lines = [
        f"| a step of | recomputed | ms | products, attention by arithmetic | {' | '.join(names)} | nothing ran |",
        f"|{'---|' * (len(names) + 5)}",
    ]
    for row in profiled:
        spent = row["profile_ms"]["categories"]
        step = 1000 * median(row["step_s"])
        limit = 1000 * limit_s(row)
        parts = [f"{spent[name]:.1f}" if name in spent else "-" for name in names]
        idle = max(0.0, step - sum(spent.values()))
        cells = [TITLES[row["case"]], row["recompute"], f"{step:.1f}", f"{limit:.1f}", *parts, f"{idle:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def head_table(rows: Rows) -> list[str]:
    lines = ["| head | tokens | vocabulary | peak GiB |", "|---|---|---|---|"]
    lines += [f"| {r['head']} | {r['tokens']:,} | {r['vocab']:,} | {r['peak_gib']:.2f} |" for r in rows]
    return [*lines, "", f"torch {rows[0]['torch']}, {rows[0]['date']}, float32, without the inputs; `make bench-head`."]


def scaling_table(rows: Rows) -> list[str]:
    lines = [
        "| layout | precision | log-probabilities differ by | gradient norm by | allowed |"
        " gradient from float32's: one rank, all, one from all |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["kind"] == "parity":
            apart = ", ".join(f"{value:.1e}" for value in row.get("gradient", ())) or "-"
            cells = (f"{row['logprobs']:.1e}", f"{row['grad_norm']:.1e}", f"{row['tolerance']:.0e}", apart)
            lines.append(f"| {row['layout']}, {row['world']} ranks | {row['dtype']} | {' | '.join(cells)} |")
    lines += ["", "| layout | model | tokens of a row | one GPU, tokens/s | all, tokens/s | efficiency |"]
    lines += ["|---|---|---|---|---|---|"]
    for row in rows:
        if row["kind"] == "scaling":
            cells = [f"{row['layout']}, {row['world']} GPUs", row["model"], f"{row['seq_len']:,}"]
            cells += [f"{row['one']:,.0f}", f"{row['all']:,.0f}", percent(row["efficiency"])]
            lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", *measured_on(rows)]


def costs_table(rows: Rows) -> list[str]:
    lines = ["| optimiser | the step, ms | of it the optimiser, ms | peak GiB |", "|---|---|---|---|"]
    for row in rows:
        if row["kind"] == "optimizer":
            figures = (1000 * median(row["step_s"]), 1000 * row["parts"]["optimizer"], row["peak_gib"])
            lines.append(f"| {row['optimizer']} | {' | '.join(f'{figure:.1f}' for figure in figures)} |")
    lines += [
        "",
        "| a checkpoint of | training stands still for | the first time | files written in | a step meanwhile |",
    ]
    lines += ["|---|---|---|---|---|"]
    for row in rows:
        if row["kind"] == "checkpoint":
            steps = [f"{1000 * median(values):.0f} ms" for values in (row["step_meanwhile_s"], row["step_s"]) if values]
            cells = [
                f"{row['bytes'] / 1e9:.1f} GB, beside training",
                f"{1000 * median(row['snapshot_s']):.0f} ms",
                f"{1000 * row['first_snapshot_s']:.0f} ms",
                f"{row['beside_s']:.1f} s",
                " beside ".join(steps) if len(steps) == 2 else "-",
            ]
            lines.append(f"| {' | '.join(cells)} |")
            lines.append(f"| the same, waited for | {1000 * row['waited_s']:.0f} ms | - | - | - |")
    return [*lines, "", *measured_on(rows)]


def generation_table(rows: Rows) -> list[str]:
    """vLLM's best way and prl, for each length; then what the swaps did."""
    lines = [
        "| a completion of | at once | vLLM alone, tokens/s | with log-probabilities | prl, tokens/s | of that |"
        " of vLLM without |",
        "|---|---|---|---|---|---|---|",
    ]
    own = [row for row in rows if row["side"] == "prl"]
    for row in own:
        peers = [other for other in rows if other["side"] == "vllm" and other["tokens"] == row["tokens"]]
        plain, with_logprobs = (
            max((peer["tokens_per_s"] for peer in peers if peer["logprobs"] == logprobs), default=None)
            for logprobs in (False, True)
        )
        cells = [f"{row['prompt']} + {row['tokens']} tokens", str(row["concurrency"])]
        cells += ["-" if rate is None else f"{rate:,.0f}" for rate in (plain, with_logprobs, row["tokens_per_s"])]
        without = row["tokens_per_s"] / plain if plain is not None else None
        lines.append(f"| {' | '.join(cells)} | {percent(row.get('ratio'))} | {percent(without)} |")
    lines += ["", "| a completion of | swaps | stall, median and worst | sequences across a swap | probes differ by |"]
    lines += ["|---|---|---|---|---|"]
    for row in own:
        stalls = [swap["swap_stall_s"] for swap in row["swaps"] if "swap_stall_s" in swap]
        apart = [swap["probes_differ"] for swap in row["swaps"] if "probes_differ" in swap]
        cells = [
            f"{row['prompt']} + {row['tokens']} tokens",
            f"{len(row['swaps'])} by {row['channel']}",
            f"{1000 * median(stalls):.0f} ms, {1000 * max(stalls):.0f} ms" if stalls else "-",
            f"{row['crossing']:,} of {row['requests']:,}",
            f"at most {max(apart):.1e}" if apart else "-",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    for row in own:
        busy = ", ".join(f"{label} {share:.2f}" for label, share in row.get("cores", {}).items() if share >= 0.005)
        lines += ["", f"Processor cores at {row['tokens']} tokens: {busy}."] if busy else []
    return [*lines, "", *measured_on(rows)]


def channels_table(rows: Rows) -> list[str]:
    """Whole versions and changes of the same updates, channel by channel."""
    lines = [
        "| weights | changed by an update | channel | MB, full | delta | send, full | delta | receive, full | delta |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for full in (row for row in rows if row["encoding"] == "full"):
        same = ("channel", "parameters", "lr", "hardware")
        delta = next(row for row in rows if row["encoding"] == "delta" and all(row[k] == full[k] for k in same))
        cells = [
            f"{full['parameters'] / 1e6:.1f} M, lr {full['lr']:g}",
            f"{100 * full['changed']:.2f}%",
            full["channel"],
        ]
        cells += [f"{row['bytes'] / row['updates'] / 1e6:,.2f}" for row in (full, delta)]
        cells += [f"{1000 * row[key]:,.1f} ms" for key in ("send_s", "receive_s") for row in (full, delta)]
        lines.append(f"| {' | '.join(cells)} | ")
    return [*(line.rstrip() for line in lines), "", *measured_on(rows)]


def measured_on(rows: Rows) -> list[str]:
    """Machine, versions and dates of the rows, each set once."""
    found = []
    for row in rows:
        versions = ", ".join(f"{name} {value}" for name, value in row["versions"].items())
        found.append(f"{row['hardware']}, {row['date']}: {versions}.")
    return list(dict.fromkeys(found))


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}%"


TABLES: dict[str, tuple[str, Callable[[Rows], list[str]]]] = {
    "trainer": ("h200_trainer.json", trainer_table),
    "parts": ("h200_trainer.json", parts_table),
    "head": ("head_memory.json", head_table),
    "scaling": ("h200_scaling.json", scaling_table),
    "costs": ("h200_trainer_costs.json", costs_table),
    "channels": ("weight_channels.json", channels_table),
    "generation": ("vllm_generation.json", generation_table),
}


def table(name: str, results: Path = RESULTS) -> str:
    """The text between a table's markers."""
    file, make = TABLES[name]
    if not (results / file).exists():
        return "Not measured yet."
    return "\n".join(make(json.loads((results / file).read_text())))


def updated(page: str, results: Path = RESULTS) -> str:
    """The page with its tables replaced.

    Raises:
        ValueError: a table has no place in it.
    """
    for name in TABLES:
        begin, end = f"<!-- benchmarks/table.py: {name} -->", "<!-- end -->"
        pattern = re.compile(rf"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        if len(pattern.findall(page)) != 1:
            raise ValueError(f"the page has no place for {name!r}: {begin} ... {end}")
        whole = f"{begin}\n{table(name, results)}\n{end}"
        page = pattern.sub(lambda _, whole=whole: whole, page)  # type: ignore[misc]
    return page


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
