"""Tables in documents are written from records, and a figure that differs is found."""

import gzip
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from exitflow.errors import ConfigError, RunError, StaleFiguresError
from exitflow.runs.records import Record
from exitflow.topology.settings import parse_setting
from paper.__main__ import main
from paper.documents import check, render, update
from paper.grids import table_grid
from paper.reproduction import Reproduction
from paper.results import Results, records_to_keep
from paper.tables import DATASETS, TABLES, tables_of
from tests.paper.synthetic import remove, write_results

ROOT = Path(__file__).parents[2]
_STRATEGIES = ("serving-rate", "balanced-adj", "flops-prop")
TEXT = """# Some results

<!-- results:table1 cifar10 -->
<!-- end -->

In between.

<!-- results:gradient-variance cifar10 -->
<!-- end -->
<!-- results:origin -->
old
<!-- end -->
"""


@pytest.fixture
def document(tmp_path):
    path = tmp_path / "results.md"
    path.write_text(TEXT)
    return path


def test_what_update_writes_check_accepts(document, results_file):
    results = Results(results_file)
    assert update(document, results) == 3
    assert check(document, results) == 3
    written = document.read_text()
    assert update(document, results) == 0
    assert document.read_text() == written
    assert re.sub(r"(results:.*? -->\n).*?(<!-- end)", r"\1\2", written, flags=re.DOTALL) == TEXT.replace("old\n", "")


def test_the_table_has_measured_and_published_figures(results_file):
    results = Results(results_file)
    lines = render("table1 cifar10", results)
    (row,) = (line for line in lines if line.startswith("| flops-prop |"))
    cells = row.strip("| ").split(" | ")
    assert len(cells) == 8
    cell = TABLES["table1"].cell("cifar10", "flops-prop", "80-15-5")
    found = [result.accuracy("80-15-5") for seed in (9, 42) if (result := results.get(cell.training(seed)))]
    mean = sum(found) / len(found)
    assert f"{100 * mean:.1f}" in cells[1]
    assert cells[1].endswith("(32.1)")
    assert any("–" in line for line in lines)  # some are missing
    assert any("**" in line for line in lines)


def test_without_results_cells_are_empty(tmp_path):
    lines = render("table6 cifar100", Results(tmp_path / "r.jsonl"))
    assert "| serving-rate p=0.2 | – (30.1) | – (30.8) | – (30.9) |" in lines
    assert render("gradient-variance cifar10", Results(tmp_path / "r.jsonl"))[3] == "| measured | – | – | – |"
    assert render("origin", Results(tmp_path / "r.jsonl")) == ["", "No results yet.", ""]


def test_leads_have_the_settings_of_their_table_and_the_seeds_that_agree(tmp_path):
    write_results(tmp_path / "r.jsonl", [TABLES["table4"]], (9, 42))
    assert render("leads cifar100", Results(tmp_path / "r.jsonl")) == ["", "No results yet.", ""]
    lines = [line for line in render("leads cifar10", Results(tmp_path / "r.jsonl")) if "17 nodes" in line]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert [row[0].partition(" over")[0] for row in rows] == [f"17 nodes: {name}" for name in _STRATEGIES]
    for _, *cells in rows:
        assert [bool(cell) for cell in cells] == [False, True, False, False, False, True, False]
        assert re.fullmatch(r"[+−]\d+\.\d \([012] of 2\)", cells[1])


def test_a_lead_that_no_seed_decides_yet_is_missing(tmp_path):
    write_results(tmp_path / "r.jsonl", [TABLES["table4"]], (9,))
    remove(tmp_path / "r.jsonl", "_serving-rate_10-30-60_seed-9")
    (line,) = (
        line for line in render("leads cifar10", Results(tmp_path / "r.jsonl")) if "17 nodes: serving-rate" in line
    )
    assert [cell.strip() for cell in line.split("|")[-4:-1]] == ["", "–", ""]


def test_the_origin_of_results_is_told(results_file):
    sentence = render("origin", Results(results_file))[1]
    assert re.fullmatch(
        r"\d+ results, made on 2026-01-02 with commit 0123456789ab; a machine, 2 cores, Linux, instructions unknown; "
        r"Python 3.11.9, PyTorch 2.13.0\.",
        sentence,
    )


@pytest.mark.parametrize("name", [*TABLES])
def test_every_table_can_be_written(name, results_file):
    table = TABLES[name]
    lines = [line for line in render(f"{name} {table.datasets[0]}", Results(results_file)) if line.startswith("|")]
    assert len(lines) == 2 + len(table.rows) + (2 if name.startswith("ours") else 0)
    assert {line.count("|") for line in lines} == {len(table.settings) + 2 + (2 if table.shows_costs else 0)}


def test_a_changed_figure_is_found_with_its_block_and_line(document, results_file):
    results = Results(results_file)
    update(document, results)
    lines = document.read_text().splitlines()
    number = next(index for index, line in enumerate(lines) if line.startswith("| flops-prop"))
    lines[number] = lines[number].replace("(32.1)", "(32.2)")
    document.write_text("\n".join(lines) + "\n")
    with pytest.raises(
        StaleFiguresError, match=rf"results.md, line {number + 1}: block 'table1 cifar10' says '\| flops-prop"
    ):
        check(document, results)
    result = CliRunner().invoke(main, ["report", str(results_file), "--check", str(document)])
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "--update" in result.stderr


@pytest.mark.parametrize("change", ["cut", "add"])
def test_lines_too_few_or_too_many_are_found(document, results_file, change):
    results = Results(results_file)
    update(document, results)
    text = document.read_text()
    end = text.index("<!-- end -->")
    document.write_text(text[: end - 1] + text[end:] if change == "cut" else text[:end] + "more\n" + text[end:])
    with pytest.raises(
        StaleFiguresError, match=r"'table1 cifar10' says (nothing|'more').* the records say (''|nothing)"
    ):
        check(document, results)


def test_a_result_that_changes_makes_the_document_stale(document, tmp_path):
    path = write_results(tmp_path / "r.jsonl", [TABLES["table1"]], (9,), ["cifar10"])
    update(document, Results(path))
    remove(path, "balanced-adj_80")
    with pytest.raises(StaleFiguresError, match=r"block 'table1 cifar10' says '\| (equal|flops|serving|balanced)"):
        check(document, Results(path))


def test_a_document_without_blocks_is_refused(tmp_path):
    path = tmp_path / "plain.md"
    path.write_text("no tables here\n\n```\n<!-- results:table1 cifar10 -->\n```\n")
    for work in (check, update):
        with pytest.raises(ConfigError, match=r"plain.md: has no table of results; they stand between"):
            work(path, Results(tmp_path / "r.jsonl"))


@pytest.mark.parametrize("option", ["--check", "--update"])
@pytest.mark.parametrize("name", ["nothing", "empty"])
def test_a_file_without_results_wipes_no_table(document, results_file, tmp_path, option, name):
    update(document, Results(results_file))
    written = document.read_bytes()
    (tmp_path / "empty").touch()
    result = CliRunner().invoke(main, ["report", str(tmp_path / name), option, str(document)])
    assert result.exit_code == 2
    assert "RESULTS: there are no results of `python -m paper reproduce` in" in result.stderr
    assert document.read_bytes() == written


def test_a_link_stays_a_link_and_a_file_keeps_its_mode(document, results_file, tmp_path):
    document.chmod(0o640)
    link = tmp_path / "link.md"
    link.symlink_to(document)
    assert update(link, Results(results_file)) == 3
    assert link.is_symlink()
    assert document.stat().st_mode & 0o777 == 0o640
    assert check(document, Results(results_file)) == 3


def test_a_document_with_line_ends_of_windows_keeps_them(document, results_file):
    document.write_bytes(TEXT.replace("\n", "\r\n").encode())
    assert update(document, Results(results_file)) == 3
    written = document.read_bytes()
    assert written.count(b"\n") == written.count(b"\r\n") > 20
    assert check(document, Results(results_file)) == 3


def test_a_value_in_a_sentence_is_written_and_checked_like_a_table(tmp_path, results_file):
    results = Results(results_file)
    path = tmp_path / "x.md"
    path.write_text(
        "has <!-- value:accuracy table1 cifar10 80-15-5 flops-prop --><!-- end --> % of <!-- value:trainings -->9<!-- end -->.\n"
    )
    assert update(path, results) == 1
    right = table_grid(TABLES["table1"], "cifar10", results).rows["flops-prop"][0].measured.mean
    assert (
        f"-->{100 * right:.1f}<!-- end --> % of <!-- value:trainings -->{len(results.all())}<!-- end -->."
        in path.read_text()
    )
    assert check(path, results) == 2
    path.write_text(path.read_text().replace(f"{100 * right:.1f}", "99.9"))
    with pytest.raises(StaleFiguresError, match=r"line 1: says 'has .*99\.9.*', the records say"):
        check(path, results)


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("acuracy x", "there is no value 'acuracy'; did you mean 'accuracy'"),
        ("accuracy table1 cifar10", "'accuracy' needs 4 words, got 2"),
        ("accuracy table1 cifar10 80-15-5 serving", "table1 has no 'serving'; did you mean 'serving-rate'"),
        ("accuracy table1 mnist 80-15-5 serving-rate", "table1 has no 'mnist'"),
        ("exit 4 table1 cifar10 80-15-5 serving-rate", "expected exit 1, 2 or 3, got '4'"),
        ("lead cifar10 80-15-5 nobody", "there is no contest 'nobody'"),
    ],
)
def test_a_value_that_does_not_exist_is_named_with_its_line(tmp_path, results_file, query, problem):
    path = tmp_path / "x.md"
    path.write_text(f"\nhas <!-- value:{query} -->1<!-- end -->\n")
    with pytest.raises(ConfigError, match=rf"x\.md, line 2: {problem}"):
        update(path, Results(results_file))


def test_a_figure_is_drawn_beside_the_document_and_one_of_other_results_is_found(tmp_path, results_file):
    path = tmp_path / "x.md"
    path.write_text("<!-- results:figure served -->\n<!-- end -->\n")
    assert update(path, Results(results_file)) == 1
    file = tmp_path / "figures" / "served.svg"
    drawn = file.read_text()
    assert update(path, Results(results_file)) == 0
    assert check(path, Results(results_file)) == 1
    assert re.search(r"!\[Accuracy as served.*flops-prop \d\d\.\d.*\]\(figures/served\.svg\)", path.read_text())
    file.write_text(re.sub(r"flops-prop \d", "flops-prop 0", drawn))
    with pytest.raises(StaleFiguresError, match=r"served\.svg: shows other figures than the records have"):
        check(path, Results(results_file))
    assert update(path, Results(results_file)) == 1
    assert file.read_text() == drawn


@pytest.mark.parametrize("fence", ["```", "~~~", "  ```", "````markdown\n```"])
def test_an_example_in_a_fence_is_left_alone(document, results_file, fence):
    example = f"{fence}\n<!-- results:table1 cifar10 -->\nas it is\n<!-- end -->\n"
    closing = fence.partition("markdown")[0]
    document.write_text(f"{example}{closing}\n\n{TEXT}")
    assert update(document, Results(results_file)) == 3
    assert document.read_text().startswith(example)


def test_of_several_documents_none_is_written_where_one_cannot_be(document, results_file, tmp_path):
    (tmp_path / "plain.md").write_text("no tables here")
    options = ["--update", str(document), "--update", str(tmp_path / "plain.md")]
    assert CliRunner().invoke(main, ["report", str(results_file), *options]).exit_code == 2
    assert document.read_text() == TEXT


@pytest.mark.parametrize("ending", ["", "\n", "\r\n", "\u2028\n"])
def test_what_is_outside_of_the_blocks_stays_as_it_is(document, results_file, ending):
    document.write_bytes(f"a\x0cb\r\nc\n{TEXT}\nlast{ending}".encode())
    update(document, Results(results_file))
    written = document.read_bytes().decode()
    assert written.startswith("a\x0cb\r\nc\n# Some results\n")
    assert written.endswith(f"<!-- end -->\n\nlast{ending}")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<!-- results:tabel1 cifar10 -->\n<!-- end -->", "line 1: there is no table 'tabel1'; did you mean 'table1'"),
        ("\n<!-- results:table4 cifar100 -->\n<!-- end -->", "line 2: .*expected table4 cifar10"),
        ("<!-- results:table1 -->\n<!-- end -->", "expected table1 cifar10 or table1 cifar100"),
        ("<!-- results:origin x -->\n<!-- end -->", "expected origin"),
        ("<!-- results:table1 cifar10 -->\ntext", "line 1: block 'table1 cifar10' has no <!-- end -->"),
        (
            "<!-- result:origin -->\n<!-- end -->",
            "line 1: expected <!-- results:TABLE DATASET --> on a line of its own",
        ),
        ("<!-- Results: origin -->\n<!-- end -->", "line 1: expected <!-- results:TABLE"),
        ("<!-- results table1 cifar10 -->\n<!-- end -->", "line 1: expected <!-- results:TABLE"),
        ("see <!-- results:origin -->\n<!-- end -->", "line 1: expected <!-- results:TABLE"),
        ("<!-- results:origin -->\n<!-- results:origin -->\n<!-- end -->", "line 1: block 'origin' has no"),
        ("<!-- results:figure x -->\n<!-- end -->", "there is no block 'figure x'; expected figure served or"),
        (
            "has\n<!-- value:trainings -->1<!-- end --> of them",
            "line 2: a value that begins a line would end the paragraph",
        ),
        ("has <!-- value:trainings --> of them", "line 1: expected <!-- results:TABLE"),
        ("<!-- results:origin -->\n<!-- end -->\n<!-- end -->", "line 3: <!-- end --> ends no block"),
    ],
)
def test_marks_that_make_no_sense_are_refused(tmp_path, text, problem):
    path = tmp_path / "bad.md"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        check(path, Results(tmp_path / "r.jsonl"))


def test_a_document_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(RunError, match="cannot be read: No such file"):
        check(tmp_path / "x.md", Results(tmp_path / "r.jsonl"))


DOCS = ROOT / "docs"
TINY = sorted(DOCS.glob("tables/tiny-*.md"))
OWN_DOCUMENTS = {
    "tiny": TINY,
    "small": [DOCS / "results.md", ROOT / "README.md", *sorted({*DOCS.glob("tables/*.md")} - {*TINY})],
}


def store(scale):
    return Results(ROOT / "paper" / "results" / f"{scale}.jsonl")


@pytest.mark.parametrize("scale", OWN_DOCUMENTS)
def test_our_own_documents_have_a_block_for_every_table_whose_rows_have_results(scale):
    results = store(scale)
    grids = [table_grid(table, dataset, results) for table in tables_of(scale) for dataset in table.datasets]
    needed = {f"{grid.table.name} {grid.dataset}" for grid in grids if all(map(has_results, grid.rows.values()))}
    needed |= {"gradient-variance cifar10", "gradient-variance cifar100", "leads cifar10", "leads cifar100"}
    text = "".join(path.read_text() for path in OWN_DOCUMENTS[scale])
    assert set(re.findall(r"<!-- results:(.*?) -->", text)) >= needed


def has_results(row):
    return any(entry.measured for entry in row)


@pytest.mark.parametrize("scale", OWN_DOCUMENTS)
def test_our_own_documents_say_what_the_records_say(scale):
    results = store(scale)
    for path in OWN_DOCUMENTS[scale]:
        assert check(path, results) > 0


def test_no_figure_of_the_page_of_results_is_typed_by_hand():
    """But for settings, shapes of networks and numbers of what is trained, which are no results."""
    text = re.sub(
        r"<!-- results:.*?<!-- end -->|<!-- value:.*?<!-- end -->",
        "",
        OWN_DOCUMENTS["small"][0].read_text(),
        flags=re.S,
    )
    assert re.findall(r"\d+\.\d+|\d+ %", text) == []


@pytest.mark.heavy
@pytest.mark.parametrize("scale", OWN_DOCUMENTS)
def test_our_own_results_are_whole_and_of_what_the_tables_ask_for(scale):
    results = store(scale)
    Reproduction(results.path, scale).missing(list(TABLES.values()), results.seeds(), DATASETS)  # refuses none of them
    for result in results.all():
        if result.line.retired:
            assert result.training not in results.jobs
            continue
        job = results.jobs[result.training]
        check_records(result)
        for answers in (result.line.answers, result.line.own_answers):
            if answers:
                check_accuracies(result, job, answers)


def check_records(training):
    """They are of all rounds, or those to keep of them."""
    rounds = range(1, training.system.training.rounds + 1)
    kept = records_to_keep([Record(round, ()) for round in rounds])
    assert [record.round for record in training.records] == [record.round for record in kept]


def check_accuracies(result, job, answers):
    """That of the system is the sum of what its exits serve."""
    served = answers.served_accuracy
    assert len(answers.exit_accuracy) == result.system.topology.num_exits
    assert set(answers.accuracy) == set(job.served_as)
    for setting, accuracy in answers.accuracy.items():
        shares = parse_setting(job.served_as[setting])
        if len(served[setting]) == len(shares):  # local-only has a network for each node
            answered = sum(share * (own or 0) for share, own in zip(shares, served[setting], strict=True))
            assert accuracy == pytest.approx(answered), result.name


def read_trials():
    """What each left behind, by its name."""
    text = gzip.decompress((ROOT / "paper" / "results" / "trials.jsonl.gz").read_bytes())
    return {trial["trial"]: trial for trial in map(json.loads, text.splitlines())}


def test_our_own_trials_are_told_as_their_records_have_them():
    trials = read_trials()
    rows = re.findall(r"^\| `(.+?)` \| (.+) \|$", (DOCS / "log" / "2026-11-17-trials.md").read_text(), re.MULTILINE)
    assert {name for name, _ in rows} == set(trials)
    for name, text in rows:
        trial = trials[name]
        assert not trial["system"]["data"].get("dir"), f"{name} names a directory of the machine it was trained on"
        assert trial["rounds"][-1] == trial["system"]["training"]["rounds"]
        final = trial.get("result") or trial["validation"][-1]
        exits, served = final["exit_accuracy"], final["accuracy"]
        served = [served["80-15-5"], served["5-15-80"]] if isinstance(served, dict) else [served]
        figures = [" / ".join(f"{100 * exit:.1f}" for exit in exits), *(f"{100 * each:.1f}" for each in served)]
        assert text.split(" | ")[-1 - len(figures) : -1] == figures, name
