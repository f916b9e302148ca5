"""When, from which source and on what machine results came about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from paper.results import Results


def origin_facts(results: Results) -> dict[str, str]:
    """What is known of all results, by name; empty without any."""
    found = results.provenances()
    if not found:
        return {}
    dates = sorted({each.date for each in found})
    versions = Counter(f"Python {each.python}, PyTorch {each.torch}" for each in found)
    return {
        "Results": f"{len(found):,}",
        "Dates": dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}",
        "Commits": _listed([each.commit for each in found]),
        "Machines": _listed([each.machine for each in found]),
        "Instructions": _listed([each.instructions for each in found]),
        "Software": _listed(list(versions.elements())),
    }


def origin_sentence(results: Results) -> str:
    """For a document."""
    facts = origin_facts(results)
    if not facts:
        return "No results yet."
    dates = "on" if " to " not in facts["Dates"] else "from"
    commits = "commits" if ", " in facts["Commits"] else "commit"
    return (
        f"{facts['Results']} results, made {dates} {facts['Dates']} with {commits} {facts['Commits']}; "
        f"{facts['Machines']}, instructions {facts['Instructions']}; {facts['Software']}."
    )


def _listed(values: Sequence[str]) -> str:
    """The most frequent first; how often, where they differ."""
    counts = Counter(values).most_common()
    if len(counts) == 1:
        return counts[0][0]
    return ", ".join(f"{value} ({count:,})" for value, count in counts)
