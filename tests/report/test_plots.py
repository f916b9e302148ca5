"""Figures: every weighting has one colour, and a drawing follows light and dark."""

import re

import pytest

from exitflow.federated.weighting import WEIGHTINGS
from exitflow.report.palette import all_colours, colour_of, marker_of
from exitflow.report.plots import Line, curves_plot, exits_plot, settings_plot
from exitflow.report.series import Curve, Series
from exitflow.runs.methods import METHODS
from exitflow.runs.spread import Spread


def luminance(colour: str) -> float:
    channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_every_weighting_has_a_colour_and_a_marker_of_its_own():
    assert len({colour_of(name) for name in WEIGHTINGS}) == len(WEIGHTINGS)
    assert len({marker_of(name) for name in WEIGHTINGS}) == len(WEIGHTINGS)


def test_no_colour_is_drawn_for_two_things():
    colours = [colour.light for colour in all_colours()]
    assert len(set(colours)) == len(colours)


def test_no_two_methods_and_weightings_look_the_same():
    looks = [(colour_of(name), marker_of(name)) for name in (*WEIGHTINGS, *METHODS)]
    assert len(set(looks)) == len(looks)


@pytest.mark.parametrize("name", [*WEIGHTINGS, *METHODS])
def test_lines_stand_out_from_light_and_dark_pages(name):
    assert contrast(colour_of(name).light, "#ffffff") > 2.5
    assert contrast(colour_of(name).dark, "#12161b") > 4.5


@pytest.fixture
def plot():
    series = [Series("serving-rate", "serving-rate", ()), Series("serving-rate p=0.2", "serving-rate", ())]
    values = [[Spread(0.5, 0.01), None, Spread(0.7, None)], [Spread(0.4, None), Spread(0.45, None), None]]
    lines = [Line(each, value) for each, value in zip(series, values, strict=True)]
    return settings_plot("x", "A title", ["80-15-5", "33-33-33", "5-15-80"], {"here": lines})


def test_a_drawing_explains_itself(plot):
    drawn = plot.svg()
    for text in (
        "A title",
        "80-15-5",
        "requests answered by exits 1-2-3, %",
        "accuracy as served, %",
        "whiskers: ± one standard deviation over seeds",
        "serving-rate p=0.2",
    ):
        assert text in drawn
    assert "serving-rate p=0.2" in plot.alt


def test_a_drawing_has_no_colour_but_those_that_follow_the_readers_mode(plot):
    drawn = plot.svg()
    style, rest = drawn.split("</style>", 1)
    assert "prefers-color-scheme:dark" in style
    assert colour_of("serving-rate").dark in style
    assert set(re.findall(r"#[0-9a-f]{6}", rest)) == set()
    assert "var(--c" in rest


def test_the_same_weighting_has_the_same_colour_and_variants_differ_by_their_dashes(plot):
    lines = [line for line in plot.figure.axes[0].get_lines() if line.get_marker() == "s"]
    assert {line.get_color() for line in lines} == {colour_of("serving-rate").light}
    assert {line.get_linestyle() for line in lines} == {"-", "--"}


def test_a_png_is_an_image(plot):
    from PIL import Image

    image = Image.open(__import__("io").BytesIO(plot.png()))
    assert image.format == "PNG"
    assert image.width > 700
    assert image.getpixel((0, 0))[:3] == (255, 255, 255)


def test_what_is_missing_leaves_a_gap(plot):
    line = next(each for each in plot.figure.axes[0].get_lines() if len(each.get_ydata()) == 3)
    assert [str(value) for value in line.get_ydata()] == ["50.0", "nan", "70.0"]


def test_a_long_title_is_never_cut_off():
    long = "Beyond the paper: what each part gives, CIFAR-100: weights of the exits, trained for 80-15-5"
    figure = exits_plot("x", long, {"one": [Line(Series("auto", "auto", ()), [Spread(0.2, None)])]}).figure
    figure.draw_without_rendering()
    title = figure.get_suptitle()
    assert title.replace("\n", " ") == long
    (drawn,) = (text for text in figure.texts if text.get_text() == title)
    assert drawn.get_window_extent().x1 < figure.bbox.x1


def test_a_variant_has_the_same_dashes_whatever_is_drawn_beside_it():
    own, ours = (Series(f"auto + {variant}", "auto", ()) for variant in ("own answers", "grid + coverage"))
    values = [Spread(0.2, None), Spread(0.9, None)]
    drawn = [
        settings_plot("x", "t", ["a", "b"], {"p": [Line(each, values) for each in shown]})
        for shown in ([ours], [own, ours])
    ]
    alone, beside = (plot.figure.axes[0].get_lines()[-1].get_linestyle() for plot in drawn)
    assert alone == beside == ":"


def test_panels_of_exits_share_a_scale():
    line = Line(Series("auto", "auto", ()), [Spread(0.2, None), Spread(0.9, None)])
    low = Line(Series("auto", "auto", ()), [Spread(0.1, None), Spread(0.2, None)])
    figure = exits_plot("x", "t", {"one": [line], "two": [low]}).figure
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim()


@pytest.mark.parametrize(("rounds", "apart"), [((4,), True), ((2, 4, 6), True), (tuple(range(1, 101)), False)])
def test_few_points_of_one_round_stand_beside_each_other(rounds, apart):
    series = [Series(name, name, ()) for name in ("auto", "flops-prop", "serving-rate")]
    curve = Curve(rounds, tuple(Spread(0.5, None) for _ in rounds))
    drawn = curves_plot("x", "A title", "accuracy, %", {"exit 1": lambda _: curve}, series)
    (axes,) = drawn.figure.axes
    places = {tuple(line.get_xdata()) for line in axes.get_lines()}
    assert len(places) == (3 if apart else 1)
    for line in places:
        assert all(abs(place - round) < 0.5 for place, round in zip(line, rounds, strict=True))
