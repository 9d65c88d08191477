"""The peer of benchmarks/trainer_peer.py computes what transformers does, and the two are measured in turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prl import registry
from prl.config.bench import BenchConfig
from prl.testing.numerics import relative_error, sharpen
from prl_trainer_fsdp.bench.data import denominators, synthetic_rows
from prl_trainer_fsdp.bench.parts import Clock
from prl_trainer_fsdp.config import FsdpConfig

from .benchmarks import loaded
from .helpers import CPU

driver = loaded("trainer_peer")
worker = loaded("trainer_peer_worker")


def asked(*argv: str) -> Any:
    return driver.parsed(argv)


def configured(recompute: str = "none") -> BenchConfig:
    (job, *_) = driver.jobs(asked("--cases", "tiny", "--device", "cpu", "--sides", "peer", "--recompute", recompute))
    return registry.validate_strictly(BenchConfig, driver.request(job, asked("--device", "cpu")))


def peer_of(recompute: str) -> Any:
    config = configured(recompute)
    return worker.Peer(config, FsdpConfig(lr=1e-3, recompute=recompute), "none", "masters", CPU.device)  # type: ignore[arg-type]


def a_row() -> Any:
    (row,) = synthetic_rows(configured().bench, 160, (0, 0))
    return row


def test_the_peer_computes_what_transformers_does() -> None:
    """In float32, each document by itself: what is packed and cut into chunks changes nothing."""
    peer, row = peer_of("none"), a_row()
    peer.model.float()
    sharpen(peer.model, 6.0)
    with torch.no_grad():
        logprobs, entropy = peer.forward(peer.on_device(row), 40)
        peer.model.set_attn_implementation("eager")
        for begin, end in zip(row.cu_seqlens[:-1], row.cu_seqlens[1:], strict=True):
            ids = torch.from_numpy(row.token_ids[begin:end].astype(np.int64))
            log_p = peer.model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
            inside = slice(begin + 1, end)
            assert relative_error(log_p.gather(1, ids[1:, None])[:, 0], logprobs[inside]) < 1e-5
            assert relative_error(-(log_p.exp() * log_p).sum(-1), entropy[inside]) < 1e-5


def test_recomputation_changes_no_bit_and_every_parameter_is_trained() -> None:
    row = a_row()
    found = {}
    for recompute in ("none", "full"):
        peer = peer_of(recompute)
        before = [parameter.detach().clone() for parameter in peer.model.parameters()]
        peer.step(row, denominators([row], 1), Clock(CPU.device))
        found[recompute] = [master.detach() for master in peer.masters.masters]
        assert all(not torch.equal(was.float(), now) for was, now in zip(before, found[recompute], strict=True))
        for master, parameter in zip(found[recompute], peer.model.parameters(), strict=True):
            assert master.dtype == torch.float32 and torch.equal(master.bfloat16(), parameter.detach())
    assert all(torch.equal(one, other) for one, other in zip(found["none"], found["full"], strict=True))


def test_the_operations_gradient_is_that_of_its_definition() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(20, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    bounds, grad = torch.tensor([0, 7, 20], dtype=torch.int32), torch.randn(20, 4, 8)
    out, _ = worker.attend(q, k, v, bounds, 13, 0.35)
    expected = worker._each_document(q, k, v, bounds, 0.35)
    assert torch.equal(out, expected)
    pairs = zip(torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(expected, (q, k, v), grad), strict=True)
    assert all(relative_error(wanted, got) < 1e-5 for got, wanted in pairs)


def test_prl_and_peer_take_turns() -> None:
    found = driver.jobs(asked("--cases", "16k,64k", "--recompute", "none,selective", "--repeats", "2"))
    once = [("prl", "16k", "none"), ("peer", "16k", "none"), ("prl", "16k", "selective")]
    once += [("peer", "64k", "none"), ("prl", "64k", "selective")]
    assert [(job.side, job.name, job.recompute) for job in found] == once * 2


@pytest.mark.parametrize("name", list(driver.CASES))
def test_every_request_is_a_configuration(name: str) -> None:
    options = asked("--cases", name, "--trainer", '{"compile": true}')
    for job in driver.jobs(options):
        config = registry.validate_strictly(BenchConfig, driver.request(job, options))
        own = config.trainer.plugin_config()
        assert isinstance(own, FsdpConfig) and own.compile == (job.side == "prl")
        assert (own.recompute, own.lora is not None) == (job.recompute, name == "4b-lora")


def test_rows_of_the_same_step_are_replaced_and_others_kept() -> None:
    old = [{"trainer": "prl", "case": "16k", "n": 1}, {"trainer": "transformers", "case": "16k", "n": 2}]
    new = [{"trainer": "prl", "case": "16k", "n": 3}, {"trainer": "prl", "case": "16k", "n": 4}]
    assert [row["n"] for row in driver.merge(old, new)] == [2, 3, 4]


def test_both_are_measured_and_recorded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    options = ["--cases", "tiny", "--device", "cpu", "--compile", "none", "--recompute", "none"]
    assert driver.main([*options, "--steps", "1", "--warmup", "1", "--out", str(out)]) == 0, capfd.readouterr()
    prl, peer = json.loads(out.read_text())
    assert (prl["trainer"], peer["trainer"]) == ("prl", "transformers")
    same = ("case", "model", "seq_len", "documents", "recompute", "model_tflops", "hardware", "dtype", "optimizer")
    assert all(prl[key] == peer[key] for key in same)
    assert driver.main([*options, "--seconds", "0", "--out", str(out)]) == 1
    assert "SKIPPED" in capfd.readouterr().out and len(json.loads(out.read_text())) == 2


@pytest.mark.gpu
def test_flash_attention_4_computes_what_the_definition_says() -> None:
    pytest.importorskip("flash_attn.cute")
    torch.manual_seed(0)
    cuda = torch.device("cuda")
    shape = {"dtype": torch.bfloat16, "device": cuda, "requires_grad": True}
    q, k, v = (torch.randn(700, heads, 128, **shape) for heads in (4, 2, 2))
    bounds, grad = torch.tensor([0, 200, 700], dtype=torch.int32, device=cuda), torch.randn_like(q)
    out, _ = worker.attend(q, k, v, bounds, 500, 128**-0.5)
    expected = worker._each_document(q, k, v, bounds, 128**-0.5)
    assert relative_error(expected, out) < 2e-2
    pairs = zip(torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(expected, (q, k, v), grad), strict=True)
    assert all(relative_error(wanted, got) < 2e-2 for got, wanted in pairs)
