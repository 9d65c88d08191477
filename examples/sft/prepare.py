"""Make what the example trains on, without a download: a tokenizer, an untrained model, two sources and a held-out set.

    python examples/sft/prepare.py --out build/sft --seed 0

writes `model/` (a Hugging Face folder: a byte tokenizer with a chat template, a Llama of 210,000 random weights),
`upper.jsonl` (conversations: write a word in capitals), `next.parquet` (prompts and completions: the letter after each
letter) and `held_out.jsonl`, both tasks on words that the two do not hold.
"""

from __future__ import annotations

import argparse
import json
import random
import string
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WORDS, HELD_OUT = 4000, 200
UPPER, NEXT = "upper: ", "next: "
SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{%- for m in messages -%}{{- '<|' + m['role'] + '|>' + m['content'] + '<|end|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def save_tokenizer(folder: Path) -> None:
    """One token for each of the 256 bytes and four special ones; no merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=SPECIAL[0], eos_token=SPECIAL[1])
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def save_model(folder: Path, seed: int) -> int:
    """Returns its number of parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=256,
        eos_token_id=257,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config).float()
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def is_held_out(word: str) -> bool:
    return zlib.crc32(word.encode()) % 10 == 0


def words(rng: random.Random, held_out: bool) -> Iterator[str]:
    while True:
        word = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 7)))
        if is_held_out(word) == held_out:
            yield word


def following(word: str) -> str:
    return "".join(chr((ord(letter) - 97 + 1) % 26 + 97) for letter in word)


def conversation(word: str) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": UPPER + word},
            {"role": "assistant", "content": word.upper()},
        ]
    }


def pair(word: str) -> dict[str, Any]:
    """A prompt that is messages goes through the chat template too."""
    return {"prompt": [{"role": "user", "content": NEXT + word}], "completion": following(word)}


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/sft"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    model = args.out / "model"
    model.mkdir(parents=True, exist_ok=True)
    save_tokenizer(model)
    parameters = save_model(model, args.seed)
    rng = random.Random(args.seed)
    trained, held_out = words(rng, False), words(rng, True)
    write_jsonl(args.out / "upper.jsonl", [conversation(next(trained)) for _ in range(WORDS)])
    pq.write_table(pa.Table.from_pylist([pair(next(trained)) for _ in range(WORDS)]), args.out / "next.parquet")
    mixed = [row for _ in range(HELD_OUT // 2) for row in (conversation(next(held_out)), pair(next(held_out)))]
    write_jsonl(args.out / "held_out.jsonl", mixed)
    print(f"{model}: {parameters:,} parameters, {256 + len(SPECIAL)} tokens")
    print(f"{args.out}: {WORDS:,} conversations, {WORDS:,} prompts with completions, {len(mixed)} held out")


if __name__ == "__main__":
    main()
