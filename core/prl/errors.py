"""Every exception that prl raises on purpose.

PrlError
|-- UsageError            what the user asked for is wrong            exit code 2
|   |-- ConfigError       a configuration, with every problem at once
|   `-- PluginError       a plugin cannot be used, because it is
|       |-- PluginMissing     not installed
|       |-- PluginConflict    claimed by two distributions
|       |-- PluginBroken      impossible to import, or not what it should be
|       `-- PluginApiMismatch written for another version of the plugin interface
|-- EnvironmentNotFit     this machine cannot do it (doctor explains) exit code 3
|-- RunFailed             the run started and could not go on         exit code 1
|-- Preempted             stopped by its host; resuming continues it  exit code 75
|-- EpisodeFailed         one episode failed; the run goes on
|-- WireError             a message could not be delivered or answered
|-- StoreError            a file of the run directory cannot be read or written
`-- WeightsError          weights are incomplete, corrupted, or refused by the probes

A message says what is wrong, the value, the limit, and the remedy.
"""

from __future__ import annotations


class PrlError(Exception):
    """Base of every deliberate error. `exit_code` is the process's when it ends a command."""

    exit_code = 1


class UsageError(PrlError):
    exit_code = 2


class ConfigError(UsageError):
    """A configuration is wrong. `problems` holds every problem found, not only the first."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class PluginError(UsageError):
    """A plugin cannot be used. Raised where it is asked for, never because it is merely installed."""


class PluginMissing(PluginError):
    """Nothing installed provides a plugin of this name."""


class PluginConflict(PluginError):
    """Two distributions provide a plugin of one kind under one name."""


class PluginBroken(PluginError):
    """A plugin's declaration or factory cannot be imported, or is not what its kind asks for."""


class PluginApiMismatch(PluginError):
    """A plugin was written for another version of the plugin interface."""


class EnvironmentNotFit(PrlError):
    exit_code = 3


class RunFailed(PrlError):
    """The run cannot go on. `log` names the file that shows why, relative to the run directory."""

    def __init__(self, message: str, *, log: str | None = None) -> None:
        super().__init__(message)
        self.log = log


class Preempted(PrlError):
    exit_code = 75


class EpisodeFailed(PrlError):
    """One episode failed for `reason` (a short word that is counted, such as "env_error").

    `retryable` says whether another attempt may succeed: a crashed worker is, a wrong task is not.
    """

    def __init__(self, reason: str, message: str = "", *, retryable: bool = False) -> None:
        super().__init__(message or reason)
        self.reason = reason
        self.retryable = retryable


class WireError(PrlError):
    """A peer is gone, refused a message, or did not answer in time."""


class StoreError(PrlError):
    """A file of the run directory cannot be written (disk full) or is not what it should be."""


class WeightsError(PrlError):
    """A set of weights is incomplete or corrupted, or the probes do not agree after installing it."""
