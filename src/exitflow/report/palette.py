"""Colours that the colour-blind can tell apart (Okabe and Ito), the same for a weighting wherever it is drawn."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Colour:
    """As drawn on white, and on a dark page."""

    light: str
    dark: str


INK = Colour("#1f2328", "#e6edf3")
MUTED = Colour("#59636f", "#9aa5b1")
LINES = Colour("#d8dee5", "#343c46")
PAPER = Colour("#ffffff", "#12161b")

# Every weighting also has a marker of its own, for print without colour.
_WEIGHTINGS: dict[str, tuple[Colour, str]] = {
    "auto": (Colour("#d55e00", "#ff8a3d"), "*"),
    "equal-weight": (Colour("#6b7480", "#aeb8c2"), "o"),
    "flops-prop": (Colour("#b0568a", "#e08fbd"), "D"),
    "serving-rate": (Colour("#0072b2", "#3f9fe0"), "s"),
    "balanced-adj": (Colour("#009e73", "#2fc79b"), "^"),
    "bound-min": (Colour("#c98a00", "#f0b429"), "v"),
    "adaptive": (Colour("#3ba3dd", "#8fd0ff"), "P"),
}
_OTHER = (Colour("#2f3640", "#d7dee6"), "X")

# The parts of the error bound: one hue, from light to dark, as they belong together.
TERMS = (
    Colour("#35608d", "#c8d7ee"),
    Colour("#6d8fb5", "#8fb0dc"),
    Colour("#a5bdd6", "#5b84bd"),
    Colour("#d6e2ee", "#35598f"),
)

DASHES = ("--", ":", "-.")  # of the variants of a weighting; the plain one is solid


def colour_of(weighting: str) -> Colour:
    """Of its lines."""
    return _WEIGHTINGS.get(weighting, _OTHER)[0]


def marker_of(weighting: str) -> str:
    """Of its points."""
    return _WEIGHTINGS.get(weighting, _OTHER)[1]


def all_colours() -> list[Colour]:
    """Whatever may be drawn."""
    return [INK, MUTED, LINES, PAPER, _OTHER[0], *TERMS, *(colour for colour, _ in _WEIGHTINGS.values())]
