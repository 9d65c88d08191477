"""Weight channels."""
