"""Strict TOML configuration: schema, composition, positions of errors, explanations."""
