"""config.json and lock.json: what a run was made with."""

from __future__ import annotations

import hashlib

import msgspec

from prl.rundir import RunDir
from prl.store import open_run
from prl.store.lock import write_config, write_lock


def test_config_and_lock_come_back(run_dir: RunDir) -> None:
    data = write_config(run_dir, {"name": "demo", "loop": {"steps": 3}})
    write_lock(run_dir, data, {"run": 7}, {"my_env.py": b"class MyEnv: ..."}, {"engine": {"vllm": "0.32.0"}})
    run = open_run(run_dir.path)
    assert run.config == {"name": "demo", "loop": {"steps": 3}}
    lock = run.lock
    assert lock is not None
    assert lock["packages"]["msgspec"] == msgspec.__version__
    assert lock["hashes"]["config.json"] == hashlib.sha256(run_dir.config.read_bytes()).hexdigest()
    assert lock["hashes"]["my_env.py"] == hashlib.sha256(b"class MyEnv: ...").hexdigest()
    assert lock["seeds"] == {"run": 7}
    assert lock["interpreters"] == {"engine": {"vllm": "0.32.0"}}
    assert all({"distribution", "version", "object"} == set(plugin) for plugin in lock["plugins"].values())
