"""Curves, bars and strips out of letters. Pure: numbers in, strings of exactly the asked width out.

Braille has 2 × 4 dots to a letter, so a plot of 30 letters has 60 columns.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

Points = tuple[float, ...]
BLOCKS = " ▁▂▃▄▅▆▇█"
EIGHTHS = " ▏▎▍▌▋▊▉█"
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by row, then column


def resample(x: Sequence[float], y: Sequence[float], num: int) -> list[float | None]:
    """`num` values at equal distances of x: means where there are more points, else on lines."""
    points = sorted((a, b) for a, b in zip(x, y, strict=False) if math.isfinite(a + b))
    if not points or num <= 0:
        return [None] * max(0, num)
    first, last = points[0][0], points[-1][0]
    if first == last:
        return [*[None] * (num - 1), points[-1][1]]
    width = (last - first) / (num - 1) if num > 1 else last - first
    cells: list[list[float]] = [[] for _ in range(num)]
    for a, b in points:
        cells[min(num - 1, round((a - first) / width))].append(b)
    known = [(i, sum(cell) / len(cell)) for i, cell in enumerate(cells) if cell]
    values: list[float | None] = [None] * num
    values[known[0][0]] = known[0][1]
    for (i, a), (j, b) in pairwise(known):
        for k in range(i, j + 1):
            values[k] = a + (b - a) * (k - i) / (j - i)
    return values


def limits(values: Sequence[float]) -> tuple[float, float]:
    """The range of a plot; a flat line lies in its middle."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    if high - low <= 1e-9 * abs(high):
        if high == 0:
            return 0.0, 1.0
        margin = abs(high) * 0.1
        return low - margin, high + margin
    return low, high


def braille(
    values: Sequence[float | None], width: int, height: int, low: float, high: float
) -> list[str]:
    """A line through 2 · width values, top row first."""
    rows = [[0] * width for _ in range(height)]
    most = 4 * height - 1
    before: int | None = None
    for column, value in enumerate(values[: 2 * width]):
        if value is None:
            before = None
            continue
        share = (value - low) / (high - low) if high > low else 0.5
        level = round(min(1.0, max(0.0, share)) * most)
        start = level if before is None else before
        step = 1 if level >= start else -1
        for dot in range(start + (step if level != start else 0), level + step, step):
            row = most - dot
            rows[row // 4][column // 2] |= DOTS[row % 4][column % 2]
        before = level
    return ["".join(chr(0x2800 + cell) for cell in row) for row in rows]


def sparkline(values: Sequence[float | None], width: int) -> str:
    """One row, from 0 to the largest."""
    shown = [value for value in values if value is not None]
    top = max((value for value in shown if math.isfinite(value)), default=0.0)
    letters = []
    for value in values[:width]:
        is_shown = value is not None and math.isfinite(value) and top > 0
        share = max(0.0, value) / top if is_shown and value is not None else 0.0
        letters.append(BLOCKS[round(share * 8)] if value is not None else " ")
    return "".join(letters).ljust(width)[:width]


@lru_cache(maxsize=64)
def curve(x: Points, y: Points, width: int, height: int) -> tuple[list[str], float, float]:
    """Rows of a plot and its range. Kept: a curve changes with a step, a picture every second."""
    low, high = limits(y)
    return braille(resample(x, y, 2 * width), width, height, low, high), low, high


@lru_cache(maxsize=64)
def small_curve(x: Points, y: Points, width: int) -> str:
    return sparkline(resample(x, y, width), width)


def bar(share: float, width: int) -> str:
    """Filled from the left, to an eighth of a letter; what is more than nothing is seen."""
    share = min(1.0, max(0.0, share)) if math.isfinite(share) else 0.0
    eighths = round(share * width * 8)
    if share > 0:
        eighths = max(1, eighths)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (EIGHTHS[rest] if rest else "")).ljust(width)[:width]


def strip(letters: str, width: int, num_buckets: int, rare: str) -> str:
    """The last `num_buckets` letters in `width` cells, newest right. Of several letters in a cell
    the most frequent is shown, but for `rare` ones, which are too short to ever be that."""
    letters = letters[-num_buckets:].rjust(num_buckets)
    cells = []
    for i in range(width):
        start = i * num_buckets // width
        cell = letters[start : max(start + 1, (i + 1) * num_buckets // width)]
        seen = [letter for letter in cell if letter in rare]
        cells.append(seen[0] if seen else max(dict.fromkeys(cell), key=cell.count))
    return "".join(cells)
