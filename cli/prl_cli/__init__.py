"""The `prl` command.

main        the application, its table of commands, exit codes
lazy        commands that are imported when they are invoked; commands of other packages
failure     how an error becomes a few lines and an exit code
output      standard output and standard error; tables and JSON
runs        finding run directories, telling whether a run is alive
launching   from a checked configuration to a finished run
progress    live display, or plain lines
control     one request to the controller of a run
summary     the end of a run in a few lines
tail        a JSONL file while it grows
loading     the configuration a command was given
evaluation  the configuration of `prl eval`
serving     what `prl serve` serves, and what a person is told about it
benching    from a configuration to the process that measures
exporting   a checkpoint as a Hugging Face folder, in a process of its own
installing  plugin packages, without harm to this environment
plugincheck one plugin against the contract of its kind
commands/   one module per command
doctor/     what this machine can do
templates/  configurations that `prl init` writes
"""
