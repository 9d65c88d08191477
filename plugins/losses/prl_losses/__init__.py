"""Per-token losses: `dppo` and `ce`, each in its module; `terms` is what they share.

`plugin` and `config` are the declarations.
"""
