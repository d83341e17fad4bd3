"""The data plane: bytes that several processes see at once. No model, no vLLM, no policy.

segment.py   anonymous shared memory that travels to a spawned child as a file descriptor
ring.py      trajectories: written once by a rollout worker, read in place by everyone else
weights.py   published weights: two slots, a version counter, readers that never block the writer
board.py     one row per worker: what it does, since when, and its running totals
"""
