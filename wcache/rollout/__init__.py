"""How ranks come to the weights that an operator wants: decided first, then done.

``up``, ``warm``, ``restart`` and ``run`` share it: which weights are wanted, what each rank must do
for them and why it can not (``*_plan``), and the doing of it (``*_job``, and what these use).
"""
