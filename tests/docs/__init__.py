"""What prints the generated pages under docs/, and draws their plots: `python -m tests.docs.NAME`.

results.py fills docs/results.md, reference.py prints docs/recipe.md, metrics.py docs/metrics.md,
plan.py holds the planner against the paper, lines.py counts lines and files by room.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save(figure: "Figure", path: Path) -> None:
    """As SVG with text that is text; the same figure gives the same file."""
    from matplotlib import rc_context

    for axes in figure.axes:
        axes.legend(frameon=False, fontsize="small")
        axes.spines[["top", "right"]].set_visible(False)
    with rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})
