"""The commands of `gradferry`, with their models, processes, tables and pictures."""
