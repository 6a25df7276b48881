"""What a training step would take with each codec: costs, measured or assumed, put together.

`simulate` plays a step through the engine, `predict` does so for every hook, `verdict` says which
to use. Costs come from measurements of this machine and network (`doctor`, `codec="auto"`) or from
assumptions about another one (`plan`).
"""
