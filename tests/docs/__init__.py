"""What makes the generated pages under docs/: `python -m tests.docs.NAME`.

pages.py writes docs/recipe.md and docs/metrics.md, plan.py prints the table of docs/planning.md,
lines.py counts lines and files by room. tests/bench/results.py fills docs/results.md.
"""
