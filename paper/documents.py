"""Tables in Markdown documents that are written from results, and checked against them.

    <!-- results:table1 cifar10 -->
    ...
    <!-- end -->

What stands between the marks is rewritten by `update`; `check` refuses a document in which it differs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from exitflow.errors import ConfigError, RunError, StaleFiguresError, suggestion
from exitflow.files import write_atomically
from exitflow.report.page import MISSING
from exitflow.report.terminal import percent, spread
from exitflow.runs.spread import Spread
from paper.grids import (
    LEAD_COLUMNS,
    LEAD_NOTE,
    Entry,
    Grid,
    LeadRow,
    lead_rows,
    signed,
    table_grid,
)
from paper.leads import Lead
from paper.origin import origin_sentence
from paper.results import Results
from paper.tables import DATASETS, GRADIENT_VARIANCE, TABLES, published_gradient_variance

_LIKE_A_MARK = re.compile(r"<!--\s*results?\b(?=[^\w-])", re.IGNORECASE)
_BEGIN = re.compile(r"<!--\s*results:\s*(.*?)\s*-->")
_END = re.compile(r"<!--\s*end\s*-->")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
ORIGIN = "origin"
LEADS = "leads"


@dataclass(frozen=True)
class Block:
    """What stands between two marks."""

    name: str
    first: int  # the line after the opening mark, from 0
    last: int  # the line of the closing mark


def update(path: Path, results: Results) -> int:
    """Write every block anew; the number of blocks that changed. Nothing else changes."""
    lines = _read(path)
    changed = 0
    for block in reversed(_blocks(path, lines)):
        content = _content(block, lines, results)
        changed += lines[block.first : block.last] != content
        lines[block.first : block.last] = content
    if changed:
        file = path.resolve()  # a link stays one
        mode = file.stat().st_mode
        write_atomically(file, "\n".join(lines).encode())
        file.chmod(mode)
    return changed


def check_marks(path: Path) -> None:
    """Refuse a document that cannot be updated."""
    _blocks(path, _read(path))


def _content(block: Block, lines: Sequence[str], results: Results) -> list[str]:
    """What the records say, with the line ends of the opening mark."""
    end = "\r" if lines[block.first - 1].endswith("\r") else ""
    return [line + end for line in render(block.name, results)]


def check(path: Path, results: Results) -> int:
    """The number of blocks, all of which say what the records say."""
    lines = _read(path)
    blocks = _blocks(path, lines)
    for block in blocks:
        written = lines[block.first : block.last]
        for number, (found, right) in enumerate(
            zip_longest(written, _content(block, lines, results)), start=block.first
        ):
            if found != right:
                raise StaleFiguresError(
                    f"{path}, line {number + 1}: block {block.name!r} says {_quoted(found)}, the records say "
                    f"{_quoted(right)}; rewrite it with: python -m paper report {results.path} --update {path}"
                )
    return len(blocks)


def _quoted(line: str | None) -> str:
    return "nothing" if line is None else repr(line)


def _read(path: Path) -> list[str]:
    try:
        return path.read_bytes().decode().split("\n")
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _blocks(path: Path, lines: Sequence[str]) -> list[Block]:
    """At least one, or whoever asked has named the wrong file."""
    blocks = list(_marked(path, lines))
    if not blocks:
        example = "<!-- results:table1 cifar10 --> and <!-- end -->"
        raise ConfigError(f"has no table of results; they stand between {example}", source=str(path))
    return blocks


def _marked(path: Path, lines: Sequence[str]) -> Iterator[Block]:
    begun: Block | None = None
    fence = ""  # that an example stands in
    for number, line in enumerate(lines):
        fence = _fence(line, fence)
        fenced = bool(fence)
        begin = None if fenced else _BEGIN.fullmatch(line.strip())
        if begin and begun:
            raise ConfigError(f"line {begun.first}: block {begun.name!r} has no <!-- end -->", source=str(path))
        if begin:
            begun = Block(begin[1], number + 1, number + 1)
            _parse(begun.name, f"{path}, line {number + 1}")
        elif not fenced and _LIKE_A_MARK.search(line):
            expected = "expected <!-- results:TABLE DATASET --> on a line of its own"
            raise ConfigError(f"line {number + 1}: {expected}, got {line.strip()!r}", source=str(path))
        elif not fenced and _END.fullmatch(line.strip()):
            if not begun:
                problem = "<!-- end --> ends no block: its <!-- results:TABLE DATASET --> is missing"
                raise ConfigError(f"line {number + 1}: {problem}", source=str(path))
            yield Block(begun.name, begun.first, number)
            begun = None
    if begun:
        raise ConfigError(f"line {begun.first}: block {begun.name!r} has no <!-- end -->", source=str(path))


def _fence(line: str, open_fence: str) -> str:
    """The code fence, of Markdown, that is open behind `line`."""
    found = _FENCE.match(line)
    if not open_fence:
        return found[1] if found else ""
    closes = found and found[1].startswith(open_fence) and not line[found.end() :].strip()
    return "" if closes else open_fence


def _parse(name: str, where: str) -> tuple[str, str]:
    """(table, data set)."""
    table, _, dataset = name.partition(" ")
    known = [*TABLES, GRADIENT_VARIANCE, LEADS, ORIGIN]
    if table not in known:
        raise ConfigError(f"there is no table {table!r}{suggestion(table, known)}", source=where)
    allowed = TABLES[table].datasets if table in TABLES else ("",) if table == ORIGIN else DATASETS
    if dataset not in allowed:
        choice = " or ".join(f"{table} {each}".strip() for each in allowed)
        raise ConfigError(f"there is no block {name!r}; expected {choice}", source=where)
    return table, dataset


def render(name: str, results: Results) -> list[str]:
    """The lines of a block."""
    table, dataset = _parse(name, "block")
    if table == ORIGIN:
        return ["", origin_sentence(results), ""]
    if table == GRADIENT_VARIANCE:
        return _variance(dataset, results)
    if table == LEADS:
        return _leads(lead_rows(dataset, results))
    return _grid(table_grid(TABLES[table], dataset, results))


def _grid(grid: Grid) -> list[str]:
    rows = [
        [label, *(_cell(grid, entry) for entry in entries), *grid.costs.get(label, ())]
        for label, entries in grid.rows.items()
    ]
    for label, values in grid.summary.items():
        text = signed if "ahead" in label else percent
        rows.append([f"*{label}*", *(MISSING if value is None else text(value) for value in values)])
    notes = list(grid.notes)
    if grid.has_paper:
        notes.append("In brackets: the paper's figure.")
    if any(entry.best for entry in grid.entries):
        notes.append("Bold: the best of a column.")
    return ["", *_table(grid.columns, rows), "", " ".join(notes), ""]


def _leads(rows: Mapping[str, LeadRow]) -> list[str]:
    if not rows:
        return ["", "No results yet.", ""]
    cells = [[title, *map(_lead, leads)] for title, leads in rows.items()]
    note = f"{LEAD_NOTE} In brackets: in how many of these it is ahead of all of them."
    return ["", *_table(LEAD_COLUMNS, cells), "", note, ""]


def _lead(lead: Lead | str) -> str:
    """+2.0 (3 of 3)."""
    return lead if isinstance(lead, str) else f"{signed(lead.difference)} ({lead.num_ahead} of {lead.num_seeds})"


def _cell(grid: Grid, entry: Entry) -> str:
    text = _spread(entry.measured) + grid.raised(entry)
    text = f"**{text}**" if entry.best else text
    return f"{text} ({percent(entry.paper.mean)})" if entry.paper else text


def _spread(value: Spread | None) -> str:
    return spread(value.mean, value.std) if value else MISSING


def _variance(dataset: str, results: Results) -> list[str]:
    rows = []
    for seed in results.seeds():
        found = results.gradient_variance(dataset, seed)
        rows += [[f"seed {seed}", *(f"{value:.2e}" for value in found)]] if found else []
    rows = rows or [["measured", *[MISSING] * 3]]
    rows.append(["the paper", *(f"{value:.2e}" for value in published_gradient_variance(dataset))])
    return ["", *_table(["", "exit 1", "exit 2", "exit 3"], rows), ""]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---", *["---:"] * (len(columns) - 1)]
    return ["| " + " | ".join(row) + " |" for row in (columns, rule, *rows)]
