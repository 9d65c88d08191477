"""The loss curve of a small supervised run and the file that holds it: `python tests/golden/sft_loss.py` makes it anew.

Everything is fixed: the model's weights come from numpy's generator, which is the same everywhere, as is the data; own
model family, float32, one thread. A change of the code that changes any number of it shows in
`tests/integration/test_sft_golden.py`, and is either a mistake or said in the commit that writes the file anew.

The last bits of a sum depend on the instructions that a processor has and on the libraries that were compiled for them.
So the file keeps a curve for each environment it was made in, and asks there for the same bits; elsewhere for the same
numbers within `TOLERANCE`, of a run so short that rounding has not grown.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

from prl.config.schema import SftConfig
from prl.rundir import RunDir
from prl_trainer_fsdp.sft.run import main as train

FILE = Path(__file__).with_name("sft_loss.json")
TOLERANCE = 1e-5
"""Relative. torch's kernels for any processor, in place of those for AVX512, change these numbers by 3.5e-7."""
SHOWN = ("train/loss", "train/grad_norm", "train/tokens", "eval/loss")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{%- for m in messages -%}{{- '<|' + m['role'] + '|>' + m['content'] + '<|end|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": 26,
    "torch_dtype": "float32",
}


def curve(folder: Path) -> list[dict[str, float]]:
    """Run it; what each step measured."""
    save_model(folder / "model")
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(0, 40)))
    (folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(1, 10)))
    run = RunDir(folder / "run")
    run.path.mkdir()
    run.config.write_text(config(folder).model_dump_json())
    code = train(str(run.path))
    if code:
        raise RuntimeError(f"the run ended with exit code {code}")
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [{name: line[name] for name in ("step", *SHOWN) if name in line} for line in lines]


def config(folder: Path) -> SftConfig:
    return SftConfig.model_validate(
        {
            "seed": 1,
            "model": {"path": str(folder / "model"), "impl": "custom"},
            "data": {
                "train": str(folder / "train.jsonl"),
                "eval": str(folder / "eval.jsonl"),
                "steps": 16,
                "batch_size": 8,
                "shuffle": True,
                "eval_every": 8,
                "renderer": "template",
            },
            "trainer": {
                "use": "fsdp",
                "threads": 1,
                "device": "cpu",
                "row_tokens": 96,
                "lr": 3e-3,
                "warmup_steps": 4,
                "schedule": "cosine",
                "decay_steps": 16,
                "weight_decay": 0.1,
            },
            "checkpoint": {"at_end": False},
        }
    )


def rows(seed: int, count: int) -> list[dict[str, Any]]:
    """Words to reverse, of the letters that numpy's generator gives."""
    rng = np.random.default_rng(seed)
    words = ["".join(LETTERS[i] for i in rng.integers(0, 26, int(rng.integers(2, 9)))) for _ in range(count)]
    roles = ("user", "assistant")
    return [
        {"messages": [{"role": role, "content": text} for role, text in zip(roles, (word, word[::-1]), strict=True)]}
        for word in words
    ]


def save_model(folder: Path) -> None:
    """Normal weights of deviation 0.2, large enough that distributions are not uniform; norms of 1."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=SPECIAL[0])
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[1:]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(MODEL))
    rng = np.random.default_rng(7)
    tensors = {
        name: np.ones(shape, np.float32) if len(shape) == 1 else rng.normal(0, 0.2, shape).astype(np.float32)
        for name, shape in shapes().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def shapes() -> dict[str, tuple[int, ...]]:
    width, inner, kv = MODEL["hidden_size"], MODEL["intermediate_size"], 16
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (32, width)}
    for layer in range(MODEL["num_hidden_layers"]):
        here = f"model.layers.{layer}."
        for name, shape in (("q", (width, width)), ("k", (kv, width)), ("v", (kv, width)), ("o", (width, width))):
            found[f"{here}self_attn.{name}_proj.weight"] = shape
        for name, shape in (("gate", (inner, width)), ("up", (inner, width)), ("down", (width, inner))):
            found[f"{here}mlp.{name}_proj.weight"] = shape
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{here}{name}.weight"] = (width,)
    return found | {"model.norm.weight": (width,), "lm_head.weight": (32, width)}


def environment() -> dict[str, str]:
    """What the last bits depend on."""
    return {
        "torch": torch.__version__,
        "instructions": str(torch.backends.cpu.get_cpu_capability()),
        "processor": _processor(),
    }


def _processor() -> str:
    """Virtual machines name a whole line of processors alike ("AMD EPYC"); family and model tell them apart."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    first = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    known = [first[key] for key in ("model name", "cpu family", "model", "stepping") if key in first]
    return " / ".join(known) or platform.machine()


def recorded() -> list[dict[str, Any]]:
    """{"environment": ..., "curve": ...} of each environment; the first is that of the latest writing."""
    found: list[dict[str, Any]] = json.loads(FILE.read_text())["made"] if FILE.exists() else []
    return found


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        measured = curve(Path(folder))
    here = environment()
    # A curve of another environment stays only while it is still the same numbers.
    kept = [one for one in recorded() if one["environment"] != here and worst(measured, one["curve"]) <= TOLERANCE]
    made = [{"environment": here, "curve": measured}, *kept]
    text = {"made_by": "python tests/golden/sft_loss.py", "tolerance_elsewhere": TOLERANCE, "made": made}
    FILE.write_text(json.dumps(text, indent=1) + "\n")
    print(f"{FILE}: {len(measured)} lines for {here}; {len(kept)} other environments kept", file=sys.stderr)


def worst(measured: list[dict[str, float]], expected: list[dict[str, float]]) -> float:
    """The largest relative difference; infinite where the curves do not have the same entries."""
    if [sorted(line) for line in measured] != [sorted(line) for line in expected]:
        return float("inf")
    return max(
        abs(a[name] - b[name]) / max(abs(b[name]), 1e-12)
        for a, b in zip(measured, expected, strict=True)
        for name in b
        if name != "step"
    )


if __name__ == "__main__":
    main()
