"""A policy loss for prl: REINFORCE with truncated importance sampling."""
