"""What prints the generated pages under docs/: `python -m tests.docs.NAME`.

results.py fills docs/results.md, reference.py prints docs/recipe.md, metrics.py docs/metrics.md,
plan.py holds the planner against the paper, lines.py counts lines and files by room.
"""
