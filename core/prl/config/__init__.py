"""From TOML to a configuration that may be run.

schema     the tables and their keys; a docstring under each is its documentation
data       the tables of supervised data
bench      the tables of a measurement
tables     what every table is: strict and frozen
positions  where every key and value of a TOML text stands
compose    files and `--set` laid over one another, with every value's origin
problems   what pydantic found wrong, in the words of somebody who writes TOML
checks     rules across tables
load       all of it, every problem at once; and config.json read back
explain    what a key means, for `prl config explain`
"""
