"""TRL's GRPOTrainer on the recipe of examples/reverse_text. Runs in an environment with TRL and without prl.

    python peer_trl_worker.py MODEL TASKS.json OUT.json

TASKS.json: {"train": [texts], "eval": [texts], "steps", "lr", "min_lr_ratio", "eval_every", "threads", "seed"}.
OUT.json: {"step_s": [...], "evals": [[step, seconds of training, exact match]]}; evaluation takes none of the time.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

GROUPS, GROUP_SIZE, MAX_TOKENS = 32, 8, 8


def score(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
    """1 for the exact answer; of n letters, 0.5 * k / (n + 1) for the first k right."""
    return [
        reward(completion[0]["content"].strip(), target) for completion, target in zip(completions, answer, strict=True)
    ]


def reward(text: str, target: str) -> float:
    if text == target:
        return 1.0
    right = 0
    while right < min(len(text), len(target)) and text[right] == target[right]:
        right += 1
    return 0.5 * right / (len(target) + 1)


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


class Clock(TrainerCallback):  # type: ignore[misc]
    """Times every step and evaluates greedily on the held-out texts, outside the time that is counted."""

    def __init__(self, tokenizer: Any, texts: list[str], every: int) -> None:
        self.tokenizer, self.texts, self.every = tokenizer, texts, every
        self.step_s: list[float] = []
        self.evals: list[tuple[int, float, float]] = []
        self._started = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.evals.append((0, 0.0, self.exact_match(model)))
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.step_s.append(time.perf_counter() - self._started)
        if state.global_step % self.every == 0:
            self.evals.append((state.global_step, sum(self.step_s), self.exact_match(model)))
        self._started = time.perf_counter()

    @torch.inference_mode()
    def exact_match(self, model: Any) -> float:
        model.eval()
        prompts = [
            self.tokenizer.apply_chat_template(chat(text), tokenize=False, add_generation_prompt=True)
            for text in self.texts
        ]
        batch = self.tokenizer(
            prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False
        )
        out = model.generate(**batch, max_new_tokens=MAX_TOKENS, do_sample=False)
        answers = self.tokenizer.batch_decode(out[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
        model.train()
        return sum(a.strip() == text[::-1] for a, text in zip(answers, self.texts, strict=True)) / len(self.texts)


def main(model_path: str, tasks_path: str, out: str) -> None:
    tasks = json.loads(Path(tasks_path).read_text())
    torch.set_num_threads(tasks["threads"])
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    clock = Clock(tokenizer, tasks["eval"], tasks["eval_every"])
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=score,
            train_dataset=Dataset.from_list([{"prompt": chat(text), "answer": text[::-1]} for text in tasks["train"]]),
            callbacks=[clock],
            optimizers=optimizer(model, tasks),
            args=config(folder, tasks),
        )
        trainer.train()
    Path(out).write_text(json.dumps({"step_s": clock.step_s, "evals": clock.evals}))


def optimizer(model: Any, tasks: dict[str, Any]) -> tuple[Any, Any]:
    """AdamW and a learning rate that falls in a straight line to a share of its first value."""
    adamw = torch.optim.AdamW(model.parameters(), lr=tasks["lr"], betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    floor, steps = tasks["min_lr_ratio"], tasks["steps"]
    return adamw, torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: 1 - (1 - floor) * min(1.0, step / steps))


def config(folder: str, tasks: dict[str, Any]) -> GRPOConfig:
    """The recipe; what TRL spends memory to save (gradient checkpointing, on by default) is switched off."""
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=tasks["seed"],
        max_steps=tasks["steps"],
        per_device_train_batch_size=GROUPS * GROUP_SIZE,
        num_generations=GROUP_SIZE,
        steps_per_generation=1,
        max_completion_length=MAX_TOKENS,
        temperature=1.0,
        beta=0.0,
        scale_rewards="none",
        loss_type="dapo",
        max_grad_norm=1.0,
        report_to=[],
        save_strategy="no",
        logging_steps=1_000_000,
        disable_tqdm=True,
    )


if __name__ == "__main__":
    main(*sys.argv[1:4])
