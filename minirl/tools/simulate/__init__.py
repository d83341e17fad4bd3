"""A run in simulated time: the real buffer, pace and dispatcher, and engines and trainers that only
cost time. No processes, no model, no clock.

costs.py     what generation and training cost, as a few linear constants
lengths.py   how long answers are: drawn from a long-tailed distribution, or a run's own
engine.py    one engine that decodes all its sequences together
simulation.py  the events, in order, and what comes out
"""
