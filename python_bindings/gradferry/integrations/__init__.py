"""gradferry in trainers: a module for each, which is loaded when it is imported."""
