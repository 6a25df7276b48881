"""Predicts the time of a training step under each hook, from measured or assumed costs.

`simulate` simulates a step, `predict` does so for every hook, `verdict` says which hook to use.
Costs come from measurements of this machine and network (`doctor`, `codec="auto"`) or from
assumptions about others (`plan`).
"""
