"""What a recipe needs and what it would do, on GPUs that need not be there. Loads no torch.

gpus.py      the table of GPUs
shapes.py    the sizes of a model, from its config.json or a small table
memory.py    the bill of a rollout GPU and of a training GPU
roofline.py  a GPU's and a model's costs for the simulator
split.py     every split of the GPUs, simulated, and the one to take
paper.py     the simulator against the AReaL paper's figures
balance.py   what a run's own steps say about its split
"""
