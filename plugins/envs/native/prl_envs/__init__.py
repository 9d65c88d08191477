"""Environments of our own: `reverse_text`, `alphabet_sort` and `jsonl`. Settings are in `config`."""
