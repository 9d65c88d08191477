"""Credit assignment."""
