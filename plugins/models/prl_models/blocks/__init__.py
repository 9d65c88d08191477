"""Building blocks that do not know a model family."""
