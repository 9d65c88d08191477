"""`prl run` and `prl eval` with a launcher that only leaves behind what a run would."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from prl.plan import Plan
from prl.rundir import RunDir
from prl.store import Checkpoints
from prl.store.files import sha256_file
from prl_cli import runs
from prl_cli.launching import note_failure
from prl_cli.summary import lines


@pytest.fixture
def first(project: Path) -> RunDir:
    return RunDir(project / "runs" / "first")


def test_a_run_leaves_its_inputs_and_tells_its_summary(project: Path, first: RunDir, prl: Any) -> None:
    import msgspec

    result = prl("run", "run.toml", "--set", "loop.steps=2")
    assert result.exit_code == 0, result.stderr
    assert "first: completed after 2 steps in 1:15" in result.stdout
    assert "evaluation  0.250 -> 0.875" in result.stdout
    assert "64 dispatched, 60 trained, 3 dropped (no_signal 2, stale 1), 0 failed, 1 pending" in result.stdout
    assert "step 1/2  reward 0.500" in result.stderr
    assert json.loads(first.config.read_text())["loop"]["steps"] == 2
    assert msgspec.json.decode(first.plan.read_bytes(), type=Plan).role("controller").purpose == "main"
    lock = json.loads(first.lock.read_text())
    assert lock["seeds"] == {"run": 0}
    assert str(project / "parts.py") in lock["hashes"]


def test_the_token_is_new_for_every_start_and_private(first: RunDir, prl: Any) -> None:
    prl("run", "run.toml")
    token = first.token.read_text()
    assert len(token) == 64
    assert stat.S_IMODE(first.token.stat().st_mode) == 0o600
    assert prl("run", "run.toml", "--resume").exit_code == 0
    assert first.token.read_text() != token


def test_json_prints_the_summary_and_nothing_else(first: RunDir, prl: Any) -> None:
    answer = json.loads(prl("run", "run.toml", "--json").stdout)
    assert answer["outcome"] == "completed"
    assert (answer["exit_code"], answer["eval_last"], answer["path"]) == (0, 0.875, str(first.path))


def test_the_exit_code_is_the_launchers(project: Path, prl: Any) -> None:
    for code in (1, 3, 75, 130):
        result = prl("run", "run.toml", "--set", f"name=run{code}", "--set", f"launcher.code={code}")
        assert result.exit_code == code


def test_a_preempted_run_says_how_to_go_on(project: Path, prl: Any) -> None:
    assert "--resume" in prl("run", "run.toml", "--set", "launcher.code=75").stderr


def test_one_line_names_the_cause_and_the_log(first: RunDir, prl: Any) -> None:
    result = prl("run", "run.toml", "--set", "launcher.code=1", "--set", "launcher.fail=loss is NaN")
    assert result.exit_code == 1
    assert f"failed: loss is NaN (log: {first.path}/logs/trainer-0.log)" in result.stderr.splitlines()


def test_every_problem_of_a_configuration_at_once_and_nothing_written(project: Path, prl: Any) -> None:
    (project / "run.toml").write_text(
        (project / "run.toml").read_text() + "[sampling]\nmax_tokn = 3\ntemperature = -1\n"
    )
    result = prl("run", "run.toml", "--set", "loop.steps=many")
    assert result.exit_code == 2
    for wrong in ("max_tokn", "temperature", "loop.steps"):
        assert wrong in result.stderr
    assert "(3 problems)" in result.stderr
    assert not (project / "runs").exists()
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", [("run",), ("config", "check")])
def test_a_machine_that_is_not_fit_is_refused_before_anything_is_written(
    project: Path, prl: Any, command: tuple[str, ...]
) -> None:
    result = prl(*command, "run.toml", "--set", "launcher.fail=no gpu")
    assert result.exit_code == 3
    assert "there is no GPU for engine-0" in result.stderr
    assert not (project / "runs").exists()


def test_a_missing_plugin_is_a_problem_of_the_configuration(project: Path, prl: Any) -> None:
    result = prl("run", "run.toml", "--set", "launcher.use=locla")
    assert result.exit_code == 2
    assert "locla" in result.stderr
    assert not (project / "runs").exists()


def test_a_name_that_exists_is_refused(first: RunDir, prl: Any) -> None:
    prl("run", "run.toml")
    kept = first.summary.stat().st_mtime_ns
    result = prl("run", "run.toml")
    assert result.exit_code == 2
    assert "--resume" in result.stderr
    assert "--clean" in result.stderr
    assert first.summary.stat().st_mtime_ns == kept


def test_resume_keeps_what_is_there_and_tells_what_changed(first: RunDir, prl: Any) -> None:
    prl("run", "run.toml")
    (first.path / "kept").write_text("x")
    result = prl("run", "run.toml", "--resume", "--set", "loop.steps=4")
    assert result.exit_code == 0
    assert "loop.steps (3 -> 4)" in result.stderr
    assert (first.path / "kept").exists()


def test_resume_starts_afresh_where_there_is_nothing(first: RunDir, prl: Any) -> None:
    assert prl("run", "run.toml", "--resume").exit_code == 0


def test_clean_removes_the_run_only_when_confirmed(first: RunDir, prl: Any) -> None:
    prl("run", "run.toml")
    (first.path / "old").write_text("x")
    result = prl("run", "run.toml", "--clean")
    assert result.exit_code == 2
    assert "--yes" in result.stderr
    assert (first.path / "old").exists()
    assert prl("run", "run.toml", "--clean", "--yes").exit_code == 0
    assert not (first.path / "old").exists()


@pytest.mark.parametrize("option", ["--clean", "--resume"])
def test_what_is_no_run_directory_is_left_alone(project: Path, first: RunDir, prl: Any, option: str) -> None:
    first.path.mkdir(parents=True)
    (first.path / "thesis.tex").write_text("x")
    result = prl("run", "run.toml", option, "--yes")
    assert result.exit_code == 2
    assert "not a run directory" in result.stderr
    assert (first.path / "thesis.tex").exists()


@pytest.mark.parametrize("options", [(), ("--resume",), ("--clean", "--yes")])
def test_a_run_that_is_going_on_is_refused(first: RunDir, prl: Any, options: tuple[str, ...]) -> None:
    prl("run", "run.toml")
    with runs.held(first):
        result = prl("run", "run.toml", *options)
    assert result.exit_code == 2
    assert "is going on" in result.stderr
    assert first.summary.exists()


def test_the_lock_ends_with_its_process(first: RunDir, prl: Any) -> None:
    prl("run", "run.toml")
    child = os.fork()
    if child == 0:
        runs.held(first).__enter__()
        os._exit(0)
    os.waitpid(child, 0)
    assert not runs.is_alive(first)


def test_dry_run_shows_the_plan_and_writes_nothing(project: Path, prl: Any) -> None:
    shown = json.loads(prl("run", "run.toml", "--dry-run", "--json").stdout)
    assert [role["name"] for role in shown["roles"]][:1] == ["controller"]
    assert prl("run", "run.toml", "--dry-run").exit_code == 0
    assert not (project / "runs").exists()


def test_a_defect_is_one_line_and_its_traceback_goes_to_the_run(first: RunDir, prl: Any) -> None:
    result = prl("run", "run.toml", "--set", "launcher.fail=crash")
    assert result.exit_code == 1
    assert "internal error: RuntimeError: a defect" in result.stderr
    assert "Traceback" not in result.stderr
    assert "raise RuntimeError" in (first.logs / "cli.log").read_text()


def test_debugging_shows_the_traceback_of_a_deliberate_error(
    project: Path, prl: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PRL_DEBUG", "1")
    result = prl("run", "missing.toml")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr


def checkpointed(run: RunDir, *steps: int) -> None:
    for step in steps:
        run.checkpoint(step).mkdir(parents=True)
        (run.checkpoint(step) / "MANIFEST.json").write_text("{}")


def test_eval_of_a_configuration_trains_nothing(project: Path, prl: Any) -> None:
    result = prl("eval", "run.toml", "--tasks", "7")
    assert result.exit_code == 0, result.stderr
    config = json.loads((project / "runs" / "first-eval" / "config.json").read_text())
    assert (config["loop"]["steps"], config["eval"]["tasks"], config["model"]["path"]) == (0, 7, "tiny/model")
    assert prl("eval", "run.toml").exit_code == 0  # beside it, under a name of its own
    assert (project / "runs" / "first-eval-2").is_dir()


def test_eval_of_a_run_takes_its_last_checkpoint_or_the_one_named(project: Path, first: RunDir, prl: Any) -> None:
    prl("run", "run.toml")
    assert "no complete checkpoint" in prl("eval", "first").stderr
    checkpointed(first, 1, 3)
    assert prl("eval", "first").exit_code == 0
    assert prl("eval", "first", "--checkpoint", "1").exit_code == 0
    paths = [
        json.loads((project / "runs" / name / "config.json").read_text())["model"]["path"]
        for name in ("first-eval", "first-eval-1")
    ]
    assert [json.loads((Path(path) / "config.json").read_text())["step"] for path in paths] == [3, 1]
    assert prl("eval", "first", "--checkpoint", "2").exit_code == 2


def test_export_writes_the_checkpoint_asked_for(project: Path, first: RunDir, prl: Any) -> None:
    prl("run", "run.toml")
    checkpointed(first, 1, 3)
    (first.checkpoint(5)).mkdir()  # without a manifest it is no checkpoint
    assert json.loads(prl("export", "first", "out", "--json").stdout)["step"] == 3
    assert json.loads((project / "out" / "config.json").read_text()) == {"step": 3, "dtype": "", "adapter": False}
    assert prl("export", "first", "low", "--dtype", "bfloat16", "--adapter").exit_code == 0
    asked = json.loads((project / "low" / "config.json").read_text())
    assert asked == {"step": 3, "dtype": "bfloat16", "adapter": True}
    assert prl("export", "first", "none", "--dtype", "int3").exit_code == 2
    assert prl("export", "first", "out").exit_code == 2  # it is in use
    assert prl("export", "first", "other", "--step", "5").exit_code == 2


def complete(run: RunDir, step: int) -> None:
    """A checkpoint of two parts, with a manifest that is right."""
    checkpoints = Checkpoints(run)
    draft = checkpoints.begin(step)
    (draft / "trainer").mkdir()
    (draft / "trainer" / "weights").write_text("trained")
    parts = {"trainer": {"weights": sha256_file(draft / "trainer" / "weights")}}
    parts["controller"] = checkpoints.write_part(step, "controller", {"state": b"as it was"})
    checkpoints.commit(step, parts, {"incarnation": 2})


def test_import_replaces_the_trainers_part_and_keeps_what_was_there(project: Path, first: RunDir, prl: Any) -> None:
    prl("run", "run.toml")
    for step in (1, 2, 3):
        complete(first, step)
    refused = prl("import", "other", "first")
    assert refused.exit_code == 2 and "'w' is [2] there, [3] in the run" in refused.stderr
    assert Checkpoints(first).latest()[0].step == 3 and not list(first.checkpoints.glob("*.tmp"))
    told = json.loads(prl("import", "somewhere", "first", "--step", "2", "--json").stdout)
    assert told["step"] == 2
    found, warnings = Checkpoints(first).latest()
    assert found is not None and (found.step, warnings) == (2, [])
    assert found.manifest.facts == {"incarnation": 2}
    assert (found.part("trainer") / "weights").read_text() == "somewhere"
    assert (found.part("controller") / "state").read_bytes() == b"as it was"
    assert sorted(path.name for path in Path(told["replaced"]).iterdir()) == ["step_000002", "step_000003"]
    assert (Path(told["replaced"]) / "step_000002" / "trainer" / "weights").read_text() == "trained"
    assert prl("import", "somewhere", "first", "--step", "7").exit_code == 2
    nowhere = prl("import", "./nowhere", "first")
    assert nowhere.exit_code == 2 and "there is no folder ./nowhere" in nowhere.stderr
    assert "set model.path = 'somewhere'" in prl("import", "somewhere", "run.toml").stderr


SFT = """
name = "warm"
[model]
path = "tiny/model"
[data]
train = "data.jsonl"
steps = 2
[trainer]
use = "./parts.py:Trainer"
[launcher]
use = "./parts.py:Launcher"
"""


def test_a_supervised_run_is_one_process(project: Path, prl: Any) -> None:
    (project / "sft.toml").write_text(SFT)
    (project / "data.jsonl").write_text("{}\n")
    roles = json.loads(prl("sft", "sft.toml", "--dry-run", "--json").stdout)["roles"]
    assert [(role["name"], role["purpose"]) for role in roles] == [("trainer", "main")]
    assert prl("sft", "sft.toml").exit_code == 0
    warm = RunDir(project / "runs" / "warm")
    checkpointed(warm, 2)
    assert prl("export", "warm", "out").exit_code == 0
    assert "supervised" in prl("eval", "warm").stderr


@pytest.mark.parametrize(
    ("setting", "why"),
    [("runs_dir=run.toml", "Not a directory"), (f"name={'a' * 300}", "too long"), ("runs_dir=.", "is a file")],
)
def test_a_run_directory_that_cannot_be_made_is_wrong_usage(project: Path, prl: Any, setting: str, why: str) -> None:
    (project / "first").write_text("not a folder")
    result = prl("run", "run.toml", "--set", setting)
    assert result.exit_code == 2 and why in result.stderr, result.stderr
    assert not (project / "runs").exists() or not any((project / "runs").iterdir())


def test_clean_does_not_follow_a_link(project: Path, first: RunDir, prl: Any) -> None:
    prl("run", "run.toml")
    kept = project / "kept"
    first.path.rename(kept)
    first.path.symlink_to(kept)
    result = prl("run", "run.toml", "--clean", "--yes")
    assert result.exit_code == 2 and "is a link to" in result.stderr
    assert (kept / "config.json").is_file()


def test_the_seconds_of_a_resumed_run_are_those_of_its_last_steps(first: RunDir) -> None:
    summary = {"outcome": "completed", "steps": 120, "resumed_at": 86, "seconds": 12.0}
    assert lines(first, summary)[0] == "first: completed after 120 steps, 34 of them in 12 s since it was resumed"
    assert lines(first, summary | {"resumed_at": None})[0] == "first: completed after 120 steps in 12 s"


def test_a_run_that_another_role_ended_is_a_failed_one(first: RunDir, prl: Any) -> None:
    """Its controller was told to stop and wrote that it was stopped; the launcher knows better."""
    first.control.mkdir(parents=True)
    first.config.write_text("{}")
    first.status.write_text('{"state": "stopped", "step": 0, "steps": 3, "waiting_for": "waiting for trainer"}')
    note_failure(first, "env-x-0 ended with code 2: there is no file x.jsonl")
    shown = prl("runs", "show", "first").stdout
    assert shown.startswith("first: failed at step 0/3") and "no file x.jsonl" in shown
    assert "waits for" not in shown, "nothing waits any more"
    first.summary.write_text('{"outcome": "completed"}')
    note_failure(first, "too late")
    assert runs.read_json(first.summary) == {"outcome": "completed"}


def test_a_supervised_summary_shows_where_the_held_out_loss_came_from(tmp_path: Path) -> None:
    summary = {
        "outcome": "completed",
        "steps": 9,
        "seconds": 3.0,
        "loss": 0.5,
        "eval_loss_first": 5.0,
        "eval_loss": 0.75,
        "left_out": {"bad_row": 2, "too_long": 1},
    }
    told = " ".join("\n".join(lines(RunDir(tmp_path), summary)).split())
    assert "loss 0.500 held-out 5.000 -> 0.750 left out 2 bad_row, 1 too_long" in told


def test_the_mismatch_of_a_run_is_told_of_training_and_of_the_probes(first: RunDir) -> None:
    rows: list[dict[str, Any]] = [{"step": 1, "mismatch/kl": 3e-4}, {"step": 1, "mismatch/probe_kl": 2e-4}]
    rows += [{"step": 2, "reward/mean": 0.5}, {"step": 2, "mismatch/probe_kl": 5e-4, "mismatch/probe_tokens": 300}]
    first.path.mkdir(parents=True, exist_ok=True)
    first.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = lines(first, {"outcome": "completed", "steps": 2})
    assert "  mismatch   KL at most 3.0e-04 in training (steps: 1), 5.0e-04 on probes (versions: 2)" in told
    first.metrics.write_text('{"step": 1, "loss": 0.5}\n')
    assert not [line for line in lines(first, {"outcome": "completed", "steps": 1}) if line.startswith("  mismatch")]
