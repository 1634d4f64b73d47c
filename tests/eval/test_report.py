"""Tables and plots of arms."""

from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text

from eval.errors import EvalError
from eval.report.labels import Point, label_points
from eval.report.plots import TTFT_MS, TTFT_SHARE, plot_fidelity
from eval.report.summary import ArmSummary
from eval.report.table import fidelity_table, markdown_table, time_table
from eval.statistics import Interval


def arm(name: str, agreement: float, divergence: float, ratio: float, share: float) -> ArmSummary:
    return ArmSummary(
        name=name,
        f1=Interval(0.18, 0.135, 0.225),
        em=Interval(0.1, 0.06, 0.14),
        token_f1=Interval(0.2, 0.15, 0.25),
        agreement=Interval(agreement, agreement - 0.05, min(1.0, agreement + 0.05)),
        kl_first=Interval(divergence, divergence * 0.8, divergence * 1.2),
        kl_answer=Interval(divergence / 2, divergence * 0.4, divergence * 0.6),
        recomputed_ratio=ratio,
        ttft_ms_p50=150 * share,
        ttft_ms_p95=180 * share,
        parts_ms={"load": 6.0, "recompute": 150 * ratio},
        full_ttft_share=share,
        questions=110,
    )


ARMS = [
    arm("none", 0.17, 1.4, 0.0, 0.13),
    arm("chunk_head 16", 0.26, 0.9, 0.024, 0.14),
    arm("chunk_head 32", 0.29, 0.85, 0.048, 0.16),
    arm("deviation 15 %", 0.35, 0.55, 0.15, 0.25),
    arm("query 15 %", 0.43, 0.479, 0.15, 0.3),
    arm("chunk_head 16 + query 15 %", 0.45, 0.492, 0.15, 0.31),
    arm("query 30 %", 0.56, 0.293, 0.3, 0.45),
    arm("full", 1.0, 0.0, 1.0, 1.0),
]
NOISE_FLOOR = arm("full again", 0.99, 0.001, 1.0, 1.0)


def svg_texts(path: Path) -> list[str]:
    """The comments of an SVG, in which matplotlib states each text that it draws as outlines."""
    return [line.strip() for line in path.read_text().splitlines() if line.strip().startswith("<!--")]


def test_a_markdown_table_aligns_numbers_and_escapes_bars() -> None:
    assert markdown_table(["arm", "KL(p|q)"], [["a|b", "1"]]) == (
        "| arm | KL(p\\|q) |\n| --- | ---: |\n| a\\|b | 1 |\n"
    )


def test_a_row_that_does_not_fit_the_table_is_refused() -> None:
    with pytest.raises(EvalError, match="A table of 2 columns cannot hold"):
        markdown_table(["a", "b"], [["1"]])


def test_the_fidelity_table_states_means_with_intervals() -> None:
    lines = fidelity_table(ARMS).splitlines()
    assert len(lines) == 2 + len(ARMS)
    assert lines[5] == (
        "| deviation 15 % | 15.0% | 0.350 [0.300, 0.400] | 0.550 [0.440, 0.660] | 0.275 [0.220, 0.330] "
        "| 0.180 [0.135, 0.225] | 0.100 [0.060, 0.140] | 0.200 [0.150, 0.250] | 110 |"
    )


def test_a_cpus_time_table_states_ratios_only() -> None:
    table = time_table([ARMS[3]], absolute=False)
    assert "ms" not in table
    assert table.splitlines()[2] == "| deviation 15 % | 0.250 | 0.16 | 0.60 |"


def test_a_gpus_time_table_states_milliseconds_too() -> None:
    lines = time_table([ARMS[3]], absolute=True).splitlines()
    assert lines[0] == ("| arm | TTFT over full prefill's | TTFT p50, ms | TTFT p95, ms | load, ms | recompute, ms |")
    assert lines[2] == "| deviation 15 % | 0.250 | 37.5 | 45.0 | 6.0 | 22.5 |"


def test_the_plot_names_every_arm_in_every_panel_and_draws_the_noise_floor(tmp_path: Path) -> None:
    path = tmp_path / "fidelity.svg"
    plot_fidelity(ARMS, NOISE_FLOOR, path, TTFT_SHARE)
    ElementTree.parse(path)
    texts = svg_texts(path)
    for name in (arm.name for arm in ARMS):
        assert texts.count(f"<!-- {name} -->") == 6, name
    assert texts.count("<!-- noise floor (full again) -->") == 6
    assert "<!-- time to first token over full prefill's, p50 -->" in texts


def test_void_times_are_not_drawn(tmp_path: Path) -> None:
    path = tmp_path / "fidelity.svg"
    plot_fidelity(ARMS, None, path, None)
    texts = svg_texts(path)
    for name in (arm.name for arm in ARMS):
        assert texts.count(f"<!-- {name} -->") == 3, name
    assert "<!-- recomputed share of reusable rows -->" in texts
    assert not any("time to first token" in text for text in texts)


def test_the_same_numbers_give_the_same_svg(tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg"):
        plot_fidelity(ARMS[:3], None, tmp_path / name, TTFT_MS)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_a_png_is_written_for_a_single_arm(tmp_path: Path) -> None:
    plot_fidelity(ARMS[:1], None, tmp_path / "one.png", TTFT_SHARE)
    picture = imread(tmp_path / "one.png")
    assert picture.shape[0] > 1000
    assert picture.std() > 0.01


def test_labels_of_crowded_points_do_not_cover_one_another() -> None:
    figure = Figure(figsize=(6, 4))
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set(xlim=(0, 1), ylim=(0, 1))
    points = [Point(0.5 + 0.01 * i, 0.5, 0.4, 0.6, f"deviation {i} %", "black") for i in range(8)]
    figure.draw_without_rendering()
    label_points(axes, points)
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in axes.texts]
    assert len(boxes) == 8
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


@pytest.mark.parametrize(
    ("arms", "name", "complaint"), [([], "a.png", "at least one arm"), (ARMS, "a.pdf", r"\.png or \.svg")]
)
def test_a_plot_that_cannot_be_drawn_is_one_sentence(arms, name: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(EvalError, match=complaint):
        plot_fidelity(arms, None, tmp_path / name, TTFT_SHARE)
    assert not any(tmp_path.iterdir())
