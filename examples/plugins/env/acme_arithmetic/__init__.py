"""An environment for prl: sums and products."""
