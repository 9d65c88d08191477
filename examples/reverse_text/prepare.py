"""Make everything the example needs, without a download: a tokenizer, an untrained model, supervised data.

    python examples/reverse_text/prepare.py --out build/reverse_text --seed 0

writes `model/` (a Hugging Face folder: byte-level tokenizer with a chat template, Llama configuration, random
weights) and `sft.jsonl`. The data is read in file order: first every answer is the reversed text, then more and more
answers are a plain copy. A model warmed up on it knows both, and seldom reverses; reinforcement learning has to
find out which of the two is asked for.
"""

from __future__ import annotations

import argparse
import json
import random
import string
from collections.abc import Iterator
from pathlib import Path

from transformers.utils import logging as transformers_logging

from prl_envs.reverse_text import ReverseTextConfig, is_held_out

BATCH = 128
"""Examples of one supervised step; `data.batch_size` in sft.toml."""
REVERSE_STEPS, TURNING_STEPS, MIXED_STEPS = 100, 150, 150
"""A sudden turn would cost the model some of what it knew, on some seeds too much."""
STEPS = REVERSE_STEPS + TURNING_STEPS + MIXED_STEPS
"""`data.steps` in sft.toml."""
REVERSE_SHARE = 0.3
"""Share of reversed answers in the end."""

SEPARATOR, END, PAD = "<|answer|>", "<|end|>", "<|pad|>"
TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}{{- message['content'] + '<|end|>' -}}"
    "{%- else -%}{{- message['content'] + '<|answer|>' -}}{%- endif -%}"
    "{%- endfor -%}"
)
"""The least a template can be: the user's text, one separator, the assistant's text, one end token. The separator
is also the generation prompt, so a prompt of n letters costs n + 1 tokens."""


def save_tokenizer(folder: Path) -> None:
    """One token for each of the 256 bytes and three special ones; no merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, END, SEPARATOR])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, model_max_length=128)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def save_model(folder: Path, seed: int) -> int:
    """A Llama of two layers with random float32 weights. Returns its number of parameters."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer) + 1,  # 260: a multiple of 4
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    ).float()
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def examples(seed: int) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Supervised conversations in training order, none of them about a held-out text."""
    rng = random.Random(seed)
    config = ReverseTextConfig()
    for index in range(BATCH * STEPS):
        text = draw(rng, config)
        answer = text[::-1] if rng.random() < reverse_share(index // BATCH) else text
        yield {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]}


def reverse_share(step: int) -> float:
    """1 at first, then falling in a straight line, then `REVERSE_SHARE`."""
    turned = min(1.0, max(0.0, (step - REVERSE_STEPS) / TURNING_STEPS))
    return 1.0 - (1.0 - REVERSE_SHARE) * turned


def draw(rng: random.Random, config: ReverseTextConfig) -> str:
    while True:
        text = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(config.min_length, config.max_length)))
        if not is_held_out(text, config):
            return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/reverse_text"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    transformers_logging.disable_progress_bar()
    model = args.out / "model"
    model.mkdir(parents=True, exist_ok=True)
    save_tokenizer(model)
    parameters = save_model(model, args.seed)
    data = args.out / "sft.jsonl"
    with data.open("w", encoding="utf-8") as file:
        for example in examples(args.seed):
            file.write(json.dumps(example) + "\n")
    print(f"{model}: {parameters:,} parameters, 259 tokens")
    print(f"{data}: {BATCH * STEPS:,} examples, {BATCH} a step")


if __name__ == "__main__":
    main()
