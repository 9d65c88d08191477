"""Environments of our own: `reverse_text`, `alphabet_sort`, `instruction_following` and `jsonl`, each in its module.

`plugin` and `config` are the declarations, `constraints` is what `instruction_following` asks for.
"""
