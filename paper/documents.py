"""Tables in Markdown documents that are written from results, and checked against them.

    <!-- results:table1 cifar10 -->
    ...
    <!-- end -->

What stands between the marks is rewritten by `update`; `check` refuses a document in which it differs. So are figures
in sentences (`paper.values` lists them), and pictures, whose files lie in figures/ beside the document:

    ahead by <!-- value:lead cifar10 80-15-5 auto over the paper's four -->+10.5<!-- end --> points
    <!-- results:figure served -->
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from paper.pictures import PICTURES, describes
from paper.results import Results
from paper.tables import DATASETS, GRADIENT_VARIANCE, TABLES, published_gradient_variance
from paper.values import value
from paper.verdicts import VERDICT_COLUMNS, verdict_rows

_LIKE_A_MARK = re.compile(r"<!--\s*(results?|values?)\b(?=[^\w-])", re.IGNORECASE)
_BEGIN = re.compile(r"<!--\s*results:\s*(.*?)\s*-->")
_END = re.compile(r"<!--\s*end\s*-->")
_INLINE = re.compile(r"(<!-- value:(.*?) -->)(.*?)(<!-- end -->)")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
ORIGIN = "origin"
LEADS = "leads"
VERDICTS = "verdicts"
FIGURE = "figure"
FIGURES = "figures"  # the folder beside a document


@dataclass(frozen=True)
class Block:
    """What stands between two marks."""

    name: str
    first: int  # the line after the opening mark, from 0
    last: int  # the line of the closing mark


def update(path: Path, results: Results) -> int:
    """Write every block and value anew; the number of those that changed. Nothing else changes."""
    lines = _read(path)
    written = list(lines)
    changed = 0
    for block in reversed(_blocks(path, lines)):
        content = _content(block, lines, results)
        changed += _draw(block, path, results) | (lines[block.first : block.last] != content)
        written[block.first : block.last] = content
    for number, line in enumerate(written):
        if (filled := _filled(line, results, f"{path}, line {number + 1}")) != line:
            written[number] = filled
            changed += 1
    if written != lines:
        file = path.resolve()  # a link stays one
        mode = file.stat().st_mode
        write_atomically(file, "\n".join(written).encode())
        file.chmod(mode)
    return changed


def _filled(line: str, results: Results, where: str) -> str:
    """The line with its values as the records have them."""

    def fill(found: re.Match[str]) -> str:
        try:
            return f"{found[1]}{value(found[2], results)}{found[4]}"
        except ConfigError as error:
            raise error.within(source=where) from None

    return _INLINE.sub(fill, line)


def _draw(block: Block, path: Path, results: Results) -> bool:
    """Write the figure that a block shows; whether it is another than before."""
    kind, name = _parse(block.name, str(path))
    if kind != FIGURE:
        return False
    file = path.parent / FIGURES / f"{name}.svg"
    picture = PICTURES[name](results)
    if file.is_file() and describes(file.read_text(), picture.words):
        return False
    file.parent.mkdir(exist_ok=True)
    write_atomically(file, picture.svg().encode())
    return True


def check_marks(path: Path) -> None:
    """Refuse a document that cannot be updated."""
    _blocks(path, _read(path))


def _content(block: Block, lines: Sequence[str], results: Results) -> list[str]:
    """What the records say, with the line ends of the opening mark."""
    end = "\r" if lines[block.first - 1].endswith("\r") else ""
    return [line + end for line in render(block.name, results)]


def check(path: Path, results: Results) -> int:
    """The number of blocks and values, all of which say what the records say."""
    lines = _read(path)
    blocks = _blocks(path, lines)
    for block in blocks:
        written = lines[block.first : block.last]
        content = _content(block, lines, results)
        for number, (found, right) in enumerate(zip_longest(written, content), start=block.first):
            if found != right:
                raise _stale(path, number, f"block {block.name!r} says", found, right, results)
        _check_figure(block, path, results)
    for number, line in enumerate(lines):
        if (filled := _filled(line, results, f"{path}, line {number + 1}")) != line:
            raise _stale(path, number, "says", line, filled, results)
    return len(blocks) + sum(len(_INLINE.findall(line)) for line in lines)


def _stale(
    path: Path, number: int, says: str, found: str | None, right: str | None, results: Results
) -> StaleFiguresError:
    return StaleFiguresError(
        f"{path}, line {number + 1}: {says} {_quoted(found)}, the records say {_quoted(right)}; "
        f"rewrite it with: python -m paper report {results.path} --update {path}"
    )


def _check_figure(block: Block, path: Path, results: Results) -> None:
    kind, name = _parse(block.name, str(path))
    if kind != FIGURE:
        return
    file = path.parent / FIGURES / f"{name}.svg"
    if not file.is_file() or not describes(file.read_text(), PICTURES[name](results).words):
        raise StaleFiguresError(
            f"{file}: shows other figures than the records have; "
            f"draw it anew with: python -m paper report {results.path} --update {path}"
        )


def _quoted(line: str | None) -> str:
    return "nothing" if line is None else repr(line)


def _read(path: Path) -> list[str]:
    try:
        return path.read_bytes().decode().split("\n")
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _blocks(path: Path, lines: Sequence[str]) -> list[Block]:
    """Where there are none, and no values either, whoever asked has named the wrong file."""
    blocks = list(_marked(path, lines))
    if not blocks and not any(map(_INLINE.search, lines)):
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
        elif not fenced and _INLINE.match(line.strip()):
            problem = "a value that begins a line would end the paragraph before it; put a word in front"
            raise ConfigError(f"line {number + 1}: {problem}, got {line.strip()[:60]!r}", source=str(path))
        elif not fenced and _LIKE_A_MARK.search(_INLINE.sub("", line)):
            expected = "expected <!-- results:TABLE DATASET --> on a line of its own, or a value and <!-- end --> on it"
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
    known = [*TABLES, GRADIENT_VARIANCE, LEADS, ORIGIN, VERDICTS, FIGURE]
    if table not in known:
        raise ConfigError(f"there is no table {table!r}{suggestion(table, known)}", source=where)
    others: dict[str, Iterable[str]] = {ORIGIN: ("",), VERDICTS: ("",), FIGURE: PICTURES}
    allowed = TABLES[table].datasets if table in TABLES else others.get(table, DATASETS)
    if dataset not in allowed:
        choice = " or ".join(f"{table} {each}".strip() for each in allowed)
        raise ConfigError(f"there is no block {name!r}; expected {choice}", source=where)
    return table, dataset


def render(name: str, results: Results) -> list[str]:
    """The lines of a block."""
    table, dataset = _parse(name, "block")
    if table == ORIGIN:
        return ["", origin_sentence(results), ""]
    if table == VERDICTS:
        return ["", *_table(VERDICT_COLUMNS, list(verdict_rows(results)), numbers=False), ""]
    if table == FIGURE:
        return ["", f"![{PICTURES[dataset](results).words}]({FIGURES}/{dataset}.svg)", ""]
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


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = True) -> list[str]:
    rule = ["---", *["---:" if numbers else "---"] * (len(columns) - 1)]
    return ["| " + " | ".join(row) + " |" for row in (columns, rule, *rows)]
