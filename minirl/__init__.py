"""minirl: fully asynchronous reinforcement learning for language models, on one box.

Importing the package does no work and loads no torch; `minirl/loop.py` is where to start reading.
"""

__version__ = "0.1.0"
