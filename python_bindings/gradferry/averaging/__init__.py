"""What runs: named tensors are averaged over ranks by an engine that all ranks have agreed on."""
