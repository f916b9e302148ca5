"""What became of claims, the paper's and ours: each a contest in some settings, judged by results on disk.

A claim holds where its leader is ahead in the mean in all of its settings and in every seed. Where it is ahead in all
of them in the mean only, or in some settings only, the verdict says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from exitflow.report.page import MISSING
from paper.grids import DATASET_TITLES, signed
from paper.leads import CONTESTS, Contest, Lead, find_lead
from paper.results import Results
from paper.tables import DATASETS, TABLES

DEVICES_SERVE = ("80-15-5", "60-30-10", "45-35-20")
CLOUD_SERVES = ("20-35-45", "10-30-60", "5-15-80")
VERDICT_COLUMNS = ("claim", "whose", *(DATASET_TITLES[name] for name in DATASETS), "evidence")


@dataclass(frozen=True)
class Claim:
    """That the leader of a contest is ahead in these settings."""

    text: str
    whose: str
    contest: str  # its title
    settings: tuple[str, ...]
    evidence: str  # a link, from the page of results


def _paper(text: str, contest: str, settings: tuple[str, ...]) -> Claim:
    return Claim(text, "the paper", contest, settings, "[leads](tables/leads.md)")


def _ours(text: str, contest: str, settings: tuple[str, ...], page: str = "tables/ours.md") -> Claim:
    return Claim(text, "ours", contest, settings, f"[table]({page})")


CLAIMS = (
    _paper(
        "Serving Rate leads where devices serve",
        "equal partition: serving-rate over equal-weight and flops-prop",
        DEVICES_SERVE,
    ),
    _paper(
        "Balanced Adj leads where devices serve",
        "equal partition: balanced-adj over equal-weight and flops-prop",
        DEVICES_SERVE,
    ),
    _paper(
        "Serving Rate leads where the cloud serves",
        "equal partition: serving-rate over equal-weight and flops-prop",
        CLOUD_SERVES,
    ),
    _paper(
        "Balanced Adj leads where the cloud serves",
        "equal partition: balanced-adj over equal-weight and flops-prop",
        CLOUD_SERVES,
    ),
    _paper(
        "FLOPS Prop leads where the cloud serves nearly all",
        "equal partition: flops-prop over the other three",
        ("5-15-80",),
    ),
    _paper(
        "17 nodes: Serving Rate leads where devices serve",
        "17 nodes: serving-rate over equal-weight and flops-prop",
        ("60-30-10",),
    ),
    _paper(
        "Biased partition: Serving Rate leads where devices serve",
        "biased partition: serving-rate over equal-weight and flops-prop",
        DEVICES_SERVE,
    ),
    _paper(
        "Devices with little data: Serving Rate over Equal Weight",
        "highly biased partition: serving-rate over equal-weight",
        DEVICES_SERVE,
    ),
    _paper("Devices with little data: p helps", "highly biased partition: p = 0.2 over p = 0", DEVICES_SERVE),
    _ours("`auto` over the paper's four", "auto over the paper's four", TABLES["table1"].settings),
    _ours(
        "`auto` over the four with our heads and step",
        "auto over the four with our heads and step",
        TABLES["ours"].settings,
    ),
    _ours(
        "`auto` over the four with answers together too",
        "auto over the four with our heads, step and answers together",
        TABLES["blended"].settings,
    ),
    _ours(
        "`auto` over every neighbouring method",
        "auto over the neighbouring methods",
        TABLES["peers"].settings,
        "tables/peers.md",
    ),
)


def verdict_rows(results: Results) -> Iterator[list[str]]:
    """A row for each claim, and one for the gradients."""
    for claim in CLAIMS:
        verdicts = [verdict(_leads(claim, dataset, results)) for dataset in DATASETS]
        yield [claim.text, claim.whose, *verdicts, claim.evidence]
    variance = [_variance_verdict(dataset, results) for dataset in DATASETS]
    yield ["Gradients vary most at the first exit", "the paper", *variance, "[Table 3](tables/paper.md)"]


def find_contest(title: str) -> Contest:
    """By its title; a StopIteration where there is none."""
    return next(contest for contest in CONTESTS if contest.title == title)


def _leads(claim: Claim, dataset: str, results: Results) -> list[Lead]:
    contest = find_contest(claim.contest)
    cells = [contest.cells(dataset, setting) for setting in claim.settings]
    found = [find_lead(each, results, results.seeds()) for each in cells if each]
    return [lead for lead in found if lead]


def verdict(leads: Sequence[Lead]) -> str:
    """In words, and by how many points in the worst and in the best setting."""
    if not leads:
        return MISSING
    differences = sorted(lead.difference for lead in leads)
    ahead = [signed(each).startswith("+") for each in differences]
    worst, best = signed(differences[0]), signed(differences[-1])
    points = worst if worst == best else f"{worst} to {best}"
    if max(lead.num_seeds for lead in leads) == 1:
        points += " (one seed)"
    if not any(ahead):
        return f"no: {points}"
    if not all(ahead):
        return f"in part: {points}"
    if all(lead.num_ahead == lead.num_seeds for lead in leads):
        return f"**holds**: {points}"
    return f"holds in the mean: {points}"


def _variance_verdict(dataset: str, results: Results) -> str:
    found = [each.variance for each in results.gradient_variances() if each.gradients_of == dataset]
    highest = sum(variance[0] == max(variance) for variance in found)
    if not found:
        return MISSING
    word = "**holds**" if highest == len(found) else "in part" if highest else "no"
    return f"{word}: in {highest} of {len(found)} seeds"
