"""Labels beside points, kept off one another, off the points and off their error bars."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.text import Text

# Offsets from the point in typographic points, nearest and most readable first.
OFFSETS = [
    (across * ring, up * ring)
    for ring in (8, 16, 26, 38, 52, 70, 92)
    for across, up in ((1, 0), (-1, 0), (1, 0.8), (1, -0.8), (-1, 0.8), (-1, -0.8), (0, 1.2), (0, -1.2))
]
POINT_RADIUS_PT = 4
BAR_HALF_WIDTH_PT = 2
# A label may lie on an error bar before it lies on a point or on another label, and it moves away by so many
# typographic points before it covers another label wholly.
BAR_WEIGHT = 0.3
FARTHEST_PT = 400


class Box(NamedTuple):
    """A rectangle in pixels."""

    left: float
    bottom: float
    right: float
    top: float

    @property
    def area(self) -> float:
        """In square pixels."""
        return (self.right - self.left) * (self.top - self.bottom)

    def shared_area(self, other: "Box") -> float:
        """Square pixels that both cover."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.top, other.top) - max(self.bottom, other.bottom)
        return max(width, 0.0) * max(height, 0.0)


class Obstacle(NamedTuple):
    """A box that labels keep off, and how much covering it counts."""

    box: Box
    weight: float


@dataclass(frozen=True, slots=True)
class Point:
    """A point in data coordinates with the ends of its error bar, its label and the label's colour."""

    x: float
    y: float
    low: float
    high: float
    text: str
    colour: str


def label_points(axes: Axes, points: Sequence[Point]) -> None:
    """Write a text beside each point, with a thin line back to the point where it had to move away.

    Call it last: the sizes and limits of the axes must be final, and its figure must have been laid out.
    """
    frame = Box(*axes.get_window_extent().extents)
    obstacles = [obstacle for point in points for obstacle in _drawn(axes, point)]
    # From left to right, so that a label moves into room that no later point has claimed yet.
    for point in sorted(points, key=lambda point: (point.x, point.y)):
        obstacles.append(Obstacle(_place(axes, point, frame, obstacles), 1.0))


def _place(axes: Axes, point: Point, frame: Box, obstacles: Sequence[Obstacle]) -> Box:
    """Write one label where it covers little and stays near, and return the box it takes."""
    label = axes.annotate(
        point.text,
        (point.x, point.y),
        xytext=(0, 0),
        textcoords="offset points",
        va="center",
        fontsize=7.5,
        color=point.colour,
        arrowprops={"arrowstyle": "-", "color": point.colour, "lw": 0.6, "alpha": 0.6, "shrinkA": 0},
    )
    # Text's own extent: an annotation's would include the line to its point.
    size = Text.get_window_extent(label)
    scale = _pixels_per_pt(axes)
    x, y = axes.transData.transform((point.x, point.y))

    def box_at(offset: tuple[float, float]) -> Box:
        left = x + offset[0] * scale - size.width * (1 - _sign(offset[0])) / 2
        bottom = y + offset[1] * scale - size.height / 2
        return Box(left, bottom, left + size.width, bottom + size.height)

    def cost(offset: tuple[float, float]) -> float:
        box = box_at(offset)
        covered = sum(obstacle.weight * box.shared_area(obstacle.box) for obstacle in obstacles)
        outside = box.area - box.shared_area(frame)
        return (covered + outside) / box.area + hypot(*offset) / FARTHEST_PT

    best = min(OFFSETS, key=cost)
    label.set_position(best)
    label.set_horizontalalignment("left" if best[0] > 0 else "right" if best[0] < 0 else "center")
    return box_at(best)


def _drawn(axes: Axes, point: Point) -> tuple[Obstacle, Obstacle]:
    """The boxes of a point and of its error bar."""
    radius, half_width = (size * _pixels_per_pt(axes) for size in (POINT_RADIUS_PT, BAR_HALF_WIDTH_PT))
    x, y = axes.transData.transform((point.x, point.y))
    _, low = axes.transData.transform((point.x, point.low))
    _, high = axes.transData.transform((point.x, point.high))
    dot = Box(x - radius, y - radius, x + radius, y + radius)
    return Obstacle(dot, 1.0), Obstacle(Box(x - half_width, low, x + half_width, high), BAR_WEIGHT)


def _pixels_per_pt(axes: Axes) -> float:
    figure = axes.get_figure(root=True)
    assert figure is not None
    return figure.dpi / 72


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)
