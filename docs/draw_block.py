"""Draws docs/images/block.png: one matmul as a block of devices, with X, W and Y on three faces.

python docs/draw_block.py
"""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Polygon

SIZE = 2  # devices along each direction
RIGHT, UP, BACK = np.array([1.0, 0.0]), np.array([0.0, 1.0]), np.array([0.5, 0.34])  # of n, m and k on paper
COLOURS = {"X": "#4c86c6", "W": "#e0913a", "Y": "#5aa469"}


def face(axes, corner, one, other, colour, label):
    """A face of the block, a tile per device, with the name of its tensor."""
    for i in range(SIZE):
        for j in range(SIZE):
            at = corner + i * one + j * other
            tile = [at, at + one, at + one + other, at + other]
            alpha = 0.75 + 0.2 * ((i + j) % 2)
            axes.add_patch(Polygon(tile, facecolor=colour, edgecolor="white", linewidth=2.5, alpha=alpha))
    middle = corner + SIZE / 2 * (one + other)
    box = {"boxstyle": "circle,pad=0.25", "facecolor": "white", "edgecolor": colour, "linewidth": 1.5}
    axes.text(*middle, label, ha="center", va="center", fontsize=15, color=colour, weight="bold", bbox=box)


def arrow(axes, start, end, label, offset, **how):
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": "#444444", "linewidth": 1.5})
    axes.text(*((np.array(start) + end) / 2 + offset), label, fontsize=11, color="#222222", **how)


def main() -> None:
    figure = Figure(figsize=(9.4, 3.4), layout="constrained")
    axes = figure.subplots()
    origin = np.zeros(2)
    # front face: m × n = Y; right face: m × k = X; top face: k × n = W
    face(axes, origin, RIGHT, UP, COLOURS["Y"], "Y")
    face(axes, SIZE * RIGHT, BACK, UP, COLOURS["X"], "X")
    face(axes, SIZE * UP, RIGHT, BACK, COLOURS["W"], "W")
    arrow(axes, (0, -0.18), (SIZE, -0.18), "n: out-features (axis y)", (0, -0.2), ha="center", va="center")
    arrow(axes, (-0.18, 0), (-0.18, SIZE), "m: tokens (axis x)", (-0.14, 0), ha="center", va="center", rotation=90)
    low = SIZE * RIGHT + np.array([0.14, -0.1])
    arrow(axes, low, low + SIZE * BACK, "k: in-features\n(axis z)", (0.12, -0.2), ha="left", va="center")
    lines = [
        ("Y = X Wᵀ on 2 × 2 × 2 = 8 devices", "#222222", True),
        ("each small cube is the matmul of one device", "#222222", False),
        ("X  [m, k]  gathered over n (axis y)", COLOURS["X"], True),
        ("W  [n, k]  gathered over m (axis x)", COLOURS["W"], True),
        ("Y  [m, n]  summed over k (axis z), and scattered", COLOURS["Y"], True),
        ("at rest each device keeps 1/8 of X, W and Y", "#222222", False),
    ]
    for i, (text, colour, bold) in enumerate(lines):
        weight = "bold" if bold else "normal"
        axes.text(4.75, 2.45 - 0.45 * i, text, fontsize=11, color=colour, weight=weight, va="center")
    axes.set_xlim(-0.5, 8.9)
    axes.set_ylim(-0.55, 2.8)
    axes.set_aspect("equal")
    axes.axis("off")
    figure.savefig(Path(__file__).parent / "images" / "block.png", dpi=140)


if __name__ == "__main__":
    main()
