"""The averaging of named tensors over a process group: agreement, engine, numbers, saved state."""
