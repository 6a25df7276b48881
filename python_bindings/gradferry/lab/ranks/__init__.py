"""Where the ranks of a command run: on this machine, on a network of its own, or under torchrun."""
