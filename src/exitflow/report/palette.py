"""Colours that the colour-blind can tell apart (Okabe and Ito), the same for a weighting wherever it is drawn."""

from __future__ import annotations

from dataclasses import dataclass

from exitflow.federated.training_spec import GIVEN
from exitflow.runs.methods import METHODS


@dataclass(frozen=True)
class Colour:
    """As drawn on white, and on a dark page."""

    light: str
    dark: str


INK = Colour("#1f2328", "#e6edf3")
MUTED = Colour("#59636f", "#9aa5b1")
LINES = Colour("#d8dee5", "#343c46")
PAPER = Colour("#ffffff", "#12161b")

REFERENCE = "best of"  # what begins the label of a line that others are set against

# Every weighting also has a marker of its own, for print without colour.
_WEIGHTINGS: dict[str, tuple[Colour, str]] = {
    "auto": (Colour("#d55e00", "#ff8a3d"), "*"),
    "equal-weight": (Colour("#6b7480", "#aeb8c2"), "o"),
    "flops-prop": (Colour("#b0568a", "#e08fbd"), "D"),
    "serving-rate": (Colour("#0072b2", "#3f9fe0"), "s"),
    "balanced-adj": (Colour("#009e73", "#2fc79b"), "^"),
    "bound-min": (Colour("#c98a00", "#f0b429"), "v"),
    GIVEN: (Colour("#1f6f8b", "#62b6d2"), "|"),
    "linear-depth": (Colour("#7a3b8f", "#c48fe0"), "4"),
}
_OWN = (Colour("#3ba3dd", "#8fd0ff"), "P")  # of whoever's weighting that is not ours
# The peers' methods, in the order of their table (the muted colours of Paul Tol).
_OTHERS: tuple[tuple[Colour, str], ...] = (
    (Colour("#332288", "#9d8fe8"), "<"),
    (Colour("#117733", "#5fc47f"), ">"),
    (Colour("#882255", "#d9719f"), "p"),
    (Colour("#8a8a2a", "#cfcf6b"), "h"),
    (Colour("#cc6677", "#f09aa8"), "d"),
    (Colour("#2a8f80", "#6fd6c6"), "8"),
    (Colour("#aa4499", "#df8ad0"), "H"),
    (Colour("#7a5230", "#cfa57f"), "X"),
    (Colour("#2f3640", "#d7dee6"), "."),
    (Colour("#5b6fb8", "#a3b4f5"), "1"),
    (Colour("#a05a2c", "#e3a070"), "2"),
    (Colour("#4d7a1f", "#9ccb6a"), "3"),
    (Colour("#b03a48", "#ff9aa2"), "+"),
)

# The parts of the error bound: one hue, from light to dark, as they belong together.
TERMS = (
    Colour("#35608d", "#c8d7ee"),
    Colour("#6d8fb5", "#8fb0dc"),
    Colour("#a5bdd6", "#5b84bd"),
    Colour("#d6e2ee", "#35598f"),
)

# Of the variants of a weighting, the same in every figure; the plain one is solid.
_DASHES = {"": "-", "grid + coverage": ":", "own answers": "--", "p=0.2": "--", "grid": "--", "blended": "--"}


def colour_of(kind: str) -> Colour:
    """The colour of the lines of a weighting or a method."""
    return _look(kind)[0]


def marker_of(kind: str) -> str:
    """The marker of the points of a weighting or a method."""
    return _look(kind)[1]


def dashes_of(variant: str) -> str:
    """The dashes of the lines of a variant."""
    return _DASHES.get(variant, "-.")


def _look(kind: str) -> tuple[Colour, str]:
    if kind == REFERENCE:
        return INK, "x"
    if kind in _WEIGHTINGS:
        return _WEIGHTINGS[kind]
    return dict(zip(METHODS, _OTHERS, strict=True)).get(kind, _OWN)


def all_colours() -> list[Colour]:
    """Every colour that may be drawn."""
    return [INK, MUTED, LINES, PAPER, *TERMS, *(colour for colour, _ in (*_WEIGHTINGS.values(), *_OTHERS, _OWN))]
