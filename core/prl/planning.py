"""From a configuration to a `Plan`: which processes a run consists of. Every launcher executes or renders it."""

from __future__ import annotations

import sys

import msgspec

from prl.config.schema import PluginTable, RunConfig, SftConfig
from prl.errors import PluginError
from prl.plan import CONTROLLER, Plan, Role
from prl.rundir import RunDir

ENV_PREFIX = "env-"
"""How the role's name of any environment's workers begins."""


def env_role(label: str) -> str:
    """The role's name of an environment's workers."""
    return f"{ENV_PREFIX}{label}"


def build_plan(config: RunConfig | SftConfig, run_dir: RunDir) -> Plan:
    """The roles of a run, in the order in which they are started: the slow ones first. A supervised run is its trainer.
    A channel's schema may say, as `gpus`, whether it goes from GPU to GPU.

    Raises:
        PluginError: the engine's or the trainer's plugin is missing, or gave no `Role`.
    """
    trainer = _plugin_role(config.trainer, config)
    if isinstance(config, SftConfig):
        return _plan(run_dir, msgspec.structs.replace(trainer, purpose="main"))
    plan = _plan(
        run_dir,
        Role(CONTROLLER, _python("prl.controller", "{run_dir}"), purpose="main"),
        msgspec.structs.replace(_plugin_role(config.engine, config), elastic=True),
        trainer,
        Role("gateway", _python("prl_gateway", "{run_dir}", "{replica}")),
        *(
            Role(
                env_role(env.label),
                _python("prl.envworker", "{run_dir}", env.label, "{replica}"),
                clean_env=True,
                restart="on_failure",
            )
            for env in config.envs
        ),
    )
    need = getattr(config.channel.plugin_config(), "gpus", "optional")
    return msgspec.structs.replace(plan, gpus=need, gpus_for=f'channel.use = "{config.channel.use}"')


def build_serving_plan(config: RunConfig, run_dir: RunDir) -> Plan:
    """The roles of `prl serve`: the engines, and who watches them.

    Raises:
        PluginError: the engine's plugin is missing, or gave no `Role`.
    """
    return _plan(
        run_dir,
        Role(CONTROLLER, _python("prl.controller.serving", "{run_dir}"), purpose="main"),
        _plugin_role(config.engine, config),
    )


def _plan(run_dir: RunDir, *roles: Role) -> Plan:
    return Plan(run_id=run_dir.name, run_dir=str(run_dir.path.absolute()), roles=roles)


def _python(module: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", module, *arguments)


def _plugin_role(table: PluginTable, config: RunConfig | SftConfig) -> Role:
    role = table.build().role(config)
    if not isinstance(role, Role):
        given = type(role).__name__
        raise PluginError(f"prl.{table.kind} plugin {table.use!r}: role(config) returned {given}, not a prl.plan.Role")
    return role
