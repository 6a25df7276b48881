"""Where the ranks of a command run: on this machine, on hosts joined by a link, under torchrun."""
