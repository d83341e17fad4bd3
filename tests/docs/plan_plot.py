"""docs/planning.svg: the simulator against the paper, drawn without a library.

python -m tests.docs.plan_plot > docs/planning.svg
"""

from collections.abc import Sequence

from tests.docs import paper

WIDTH, HEIGHT, MARGIN = 360, 240, 48
PAPER, OURS, OTHER, THIRD = "#888888", "#1f6fb4", "#c8572b", "#7a5195"
Point = tuple[float, float]


class Panel:
    """One pair of axes with its title; x values are given their places by `at`."""

    def __init__(self, left: int, title: str, labels: Sequence[str], top: float, unit: str):
        self.left, self.top = left, top
        self.num = len(labels)
        self.parts = [_text(left + WIDTH / 2, 20, title, 13)]
        bottom, right = HEIGHT - MARGIN, left + WIDTH - 12
        self.parts.append(
            f'<path d="M{left + MARGIN} 32V{bottom}H{right}" fill="none" stroke="#444"/>'
        )
        for i, label in enumerate(labels):
            self.parts.append(_text(self.at(i, 0)[0], bottom + 16, label, 11))
        for share in (0.0, 0.5, 1.0):
            x, y = left + MARGIN - 6, self.at(0, share * top)[1] + 4
            self.parts.append(_text(x, y, f"{share * top:g}{unit}", 11, "end"))

    def at(self, place: float, value: float) -> Point:
        wide, high = WIDTH - MARGIN - 12, HEIGHT - MARGIN - 32
        x = self.left + MARGIN + wide * (place + 0.5) / self.num
        return x, HEIGHT - MARGIN - high * value / self.top

    def line(self, values: Sequence[float], colour: str, name: str, row: int) -> None:
        points = [self.at(i, value) for i, value in enumerate(values)]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self.parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        self.parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in points
        ]
        y = HEIGHT - MARGIN - 12 - 16 * row
        self.parts.append(_text(self.left + WIDTH - 20, y, name, 11, "end", colour))


def _text(
    x: float, y: float, text: str, size: int, anchor: str = "middle", colour: str = "#222"
) -> str:
    style = f'font-size="{size}" text-anchor="{anchor}" fill="{colour}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{text}</text>'


def draw() -> str:
    rows, scales = paper.table_7(), paper.figure_4()
    etas = Panel(0, "tokens/s by η: 1.5B, 8 GPUs, 8k", [f"η={r.eta}" for r in rows], 60, "k")
    etas.line([row.paper / 1000 for row in rows], PAPER, "paper, table 7", 1)
    etas.line([row.simulated / 1000 for row in rows], OURS, "simulated", 0)
    labels = [f"{s.num_gpus}" for s in scales]
    scaling = Panel(WIDTH, "speed-up by GPUs: 1.5B, 16k, 512 × 16", labels, 8, "×")
    ideal = [s.num_gpus / scales[0].num_gpus for s in scales]
    scaling.line(ideal, PAPER, "linear", 3)
    scaling.line([s.asynchronous for s in scales], OURS, "η = 8, simulated", 2)
    scaling.line([s.synchronous for s in scales], OTHER, "η = 0, simulated", 1)
    scaling.line([s.colocated for s in scales], THIRD, "colocated, simulated", 0)
    size = f'viewBox="0 0 {2 * WIDTH} {HEIGHT}" width="{2 * WIDTH}" height="{HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    white = f'<rect width="{2 * WIDTH}" height="{HEIGHT}" fill="white"/>'
    return "\n".join([head, white, *etas.parts, *scaling.parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    print(draw(), end="")
