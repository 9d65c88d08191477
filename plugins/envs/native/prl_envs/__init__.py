"""Environments of our own: `reverse_text`, `alphabet_sort` and `jsonl`, each in its module.

`plugin` and `config` are the declarations.
"""
