"""Per-token losses."""
