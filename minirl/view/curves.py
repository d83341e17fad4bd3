"""Plots out of letters: braille curves, sparklines, bars, and the strip of a device's last minute.

Takes numbers, gives strings of the asked width. A braille letter has 2 × 4 dots, so that a plot of
30 letters has 60 columns. Leaves out: colours and titles (dashboard.py).
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

from minirl.view.status import NUM_LETTERS, RARE, Point

BLOCKS, EIGHTHS = " ▁▂▃▄▅▆▇█", " ▏▎▍▌▋▊▉█"
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by row, then column


@lru_cache(maxsize=64)  # a curve changes with a step, the picture every second
def resample(points: tuple[Point, ...], num: int) -> tuple[float, ...]:
    """`num` values at equal distances of x: means where there are more points, else on lines."""
    known = np.array([point for point in points if all(map(math.isfinite, point))])
    if not len(known):
        return ()
    parts = [part.mean(axis=0) for part in np.array_split(known, min(num, len(known)))]
    x, y = np.array(parts).T
    grid = np.linspace(x[0], x[-1], num if x[-1] > x[0] else 1)
    return tuple(np.interp(grid, x, y).tolist())


@lru_cache(maxsize=64)
def braille(values: tuple[float, ...], height: int) -> tuple[list[str], float, float]:
    """A line through two values per letter, top row first; and its range. A flat line is in the
    middle."""
    low, high, most = min(values), max(values), 4 * height - 1
    if high - low <= 1e-9 * abs(high):
        low, high = low - (0.1 * abs(low) or 0.5), high + (0.1 * abs(high) or 0.5)
    levels = [round((value - low) / (high - low) * most) for value in values]
    rows = [[0x2800] * ((len(levels) + 1) // 2) for _ in range(height)]
    for column, (before, level) in enumerate(pairwise([levels[0], *levels])):
        for dot in range(level, before, 1 if before > level else -1) or [level]:
            row, part = divmod(most - dot, 4)
            rows[row][column // 2] |= DOTS[part][column % 2]
    return ["".join(map(chr, row)) for row in rows], low, high


def sparkline(points: Sequence[Point], width: int) -> str:
    values = resample(tuple(points), width)
    top = max(values, default=0.0)
    return "".join(BLOCKS[round(8 * max(0.0, v) / top)] if top > 0 else " " for v in values)


def bar(share: float, width: int) -> str:
    """Filled from the left, to an eighth of a letter; more than nothing is always seen."""
    eighths = max(round(min(1.0, share) * width * 8), int(share > 0))
    return ("█" * (eighths // 8) + EIGHTHS[eighths % 8]).ljust(width)[:width]


def strip(letters: str, width: int) -> str:
    """The last minute, newest right: of each cell a rare letter, else the most frequent one."""
    letters = letters[-NUM_LETTERS:].rjust(NUM_LETTERS)
    bounds = [i * NUM_LETTERS // width for i in range(width + 1)]
    cells = [letters[a : max(a + 1, b)] for a, b in pairwise(bounds)]
    return "".join(max(cell, key=lambda c: (c in RARE, cell.count(c))) for cell in cells)
