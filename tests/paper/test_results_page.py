"""The page of all results: one file that needs nothing else."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from click.testing import CliRunner

from exitflow.errors import RunError
from exitflow.report.page import Field
from exitflow.report.palette import colour_of, marker_of
from exitflow.report.series import Series
from paper.__main__ import main
from paper.report import build_report
from paper.results import Answers, Results
from paper.results_page import results_page
from paper.tables import TABLES, tables_of
from tests.paper.synthetic import edit, remove, rewrite, write_gradient_variance, write_results
from tests.report.browser import CHROMIUM, PROBE, browse

pytestmark = pytest.mark.heavy


def make_page(path):
    return results_page(Results(path))


def text_of(html: str) -> str:
    return re.sub(r"<[^>]+>", " ", html)


@pytest.fixture(scope="module")
def page(results_file, tmp_path_factory):
    out = tmp_path_factory.mktemp("page")
    path, figures = build_report(results_file, out)
    return path, figures


@pytest.mark.heavy
def test_the_page_and_its_figures_are_written(page):
    path, figures = page
    assert path.name == "index.html"
    names = {file.name for file in (path.parent / "figures").iterdir()}
    assert len(names) == figures
    for name in ("settings", "exits", "learning", "weights"):
        assert f"table1-cifar10-{name}.png" in names
    assert "error-terms-cifar10.png" in names
    assert not any("cifar100" in name for name in names)  # nothing was trained on it


def test_the_page_has_the_tables_beside_the_papers_and_what_is_missing(page):
    html = page[0].read_text()
    text = text_of(html)
    for title in (table.title for table in tables_of("small")):
        assert title.replace("'", "&#39;") in text
    assert "paper 54.2" in text
    assert re.search(r"paper 32\.1, [+−]\d", text)
    assert 'class="missing"' in html
    assert 'class="best"' in html
    assert "No results yet." in text  # of table 5
    assert "2026-01-02" in text
    assert "0123456789ab" in text
    assert "a machine, 2 cores, Linux" in text
    assert "4.00e-03" in text
    assert "auto is ahead by" in text
    assert re.search(r"auto over the paper&#39;s four.*?[+−]\d+\.\d\s+[012] of [12]\s", text, re.DOTALL)


def test_a_result_is_not_invented(tmp_path):
    path = write_results(tmp_path / "r.jsonl", [TABLES["table4"]], (9,), keep=1.0)
    remove(path, "serving-rate")
    page = make_page(path)
    (part,) = next(section for section in page.sections if section.anchor == "table4").parts
    rows = dict(part.tables[0].rows)
    assert [field.text for field in rows["serving-rate"]] == ["–", "–"]
    assert all(field.missing for field in rows["serving-rate"])
    assert not any(field.missing for field in rows["equal-weight"])
    assert "serving-rate" not in part.plots[-1].alt


def test_a_method_with_exits_of_its_own_is_in_the_table_but_not_among_the_exits(tmp_path):
    path = write_results(tmp_path / "r.jsonl", [TABLES["peers"]], (9,), ["cifar10"])
    page = make_page(path)
    part = next(section for section in page.sections if section.anchor == "peers").parts[0]
    assert not any(field.missing for _, fields in part.tables[0].rows for field in fields)
    served, *by_exit = part.plots
    assert "local-only" in served.alt
    assert by_exit
    assert not any("local-only" in plot.alt for plot in by_exit)
    assert "leave out local-only, which has other exits" in " ".join(part.tables[0].notes)


@pytest.mark.parametrize("seeds", [(42,), (9, 42)])
def test_a_result_with_other_exits_than_its_system_is_one_sentence(seeds, tmp_path):
    path = write_results(tmp_path / "r.jsonl", [TABLES["table1"]], seeds, ["cifar10"])
    rewrite(path, "equal_flops-prop_33-33-33_seed-42", answers=Answers((0.5,), {}))
    with pytest.raises(RunError, match=r"flops-prop.*seed-42: exit_accuracy: expected 3 numbers.*got \[0.5\]"):
        build_report(path)


def test_a_row_that_shares_a_training_has_no_learning_curve_of_its_own(tmp_path):
    path = write_results(tmp_path / "r.jsonl", [TABLES["ours"]], (9,), ["cifar10"])
    part = next(section for section in make_page(path).sections if section.anchor == "ours").parts[0]
    shown = {plot.name.rpartition("-")[2]: "auto + own answers" in plot.alt for plot in part.plots}
    assert shown == {"settings": True, "exits": True, "learning": False, "weights": False}


@pytest.mark.heavy
def test_ours_is_drawn_beside_the_best_of_the_papers(tmp_path):
    tables = [TABLES[name] for name in ("table1", "ours", "ours-biased")]
    path = write_results(tmp_path / "r.jsonl", tables, (9,), ["cifar10"])
    sections = {section.anchor: section.parts[0] for section in make_page(path).sections if section.parts}
    assert "best of Table 1" in sections["ours"].plots[0].alt
    assert "best of Table 5" not in sections["ours-biased"].plots[0].alt  # none of which is there
    assert "best of" not in sections["table1"].plots[0].alt


def test_the_overview_counts_seeds_as_they_are(tmp_path):
    path = write_results(tmp_path / "r.jsonl", [TABLES["table1"]], (9,), ["cifar10"])
    overview = dict(make_page(path).sections[0].tables[0].rows)
    assert overview[TABLES["table1"].title][0] == Field("28 of 28", "seed 9")
    write_results(path, [TABLES["table6"]], (9, 42), ["cifar10"])
    remove(path, "highly-biased_equal-weight_33-33-33_seed-9")
    write_gradient_variance(path, "cifar10", 42)
    overview = dict(make_page(path).sections[0].tables[0].rows)
    assert overview[TABLES["table6"].title][0] == Field("9 of 9", "1 to 2 seeds")
    assert overview["Table 3: gradient variance"][0] == Field("measured", "seed 42")
    assert overview["Table 3: gradient variance"][1].missing


@pytest.mark.heavy
def test_the_error_bound_has_all_weightings_of_table_1(tmp_path):
    path = write_results(tmp_path / "r.jsonl", [TABLES["table1"]], (9, 42), ["cifar10"])
    (plot,) = next(section for section in make_page(path).sections if section.anchor == "error-terms").plots
    names = [row.label for row in TABLES["table1"].rows] + ["bound-min"]
    for setting in ("80-15-5", "33-33-33", "5-15-80"):
        assert all(f"{name}, {setting}" in plot.alt for name in names)
    assert "± one standard deviation over seeds" in plot.svg()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "RESULTS: there are no results of `python -m paper reproduce` in 'nowhere'"),
        ([".", "--out", "x"], ".: cannot be read: is a directory"),
        (["nowhere", "--check", "x.md"], "RESULTS: there are no results of `python -m paper reproduce` in 'nowhere'"),
        (["x", "--check", "x.md", "--out", "x"], "--out: writes a page, --update and --check do not"),
    ],
)
def test_what_cannot_be_reported_is_one_sentence(tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["report", *arguments])
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1


def test_results_that_belong_to_no_table_are_told(results_file, tmp_path):
    path = tmp_path / "r.jsonl"
    write_results(path, [replace(TABLES["table1"], num_nodes=17)], (9,), ["cifar10"])
    edit(path, lambda line: replace(line, training=replace(line.training, partition="mine")))
    result = CliRunner().invoke(main, ["report", str(path), "--out", str(tmp_path / "page")])
    assert result.exit_code == 0
    assert result.stderr == f"None of the results in {path} belongs to a table.\n"


@pytest.mark.heavy
@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_without_the_extra_it_says_what_to_install(results_file, package):
    program = (
        f"import sys; sys.modules[{package!r}] = None; from paper.__main__ import main; "
        f"main(['report', {str(results_file)!r}])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    assert "[report]'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_nothing_is_loaded_from_elsewhere(page):
    html = page[0].read_text()
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:|#)""", html)
    assert "url(" not in re.sub(r'src="data:[^"]*"', "", html)
    assert "<script" not in html
    assert "default-src 'none'" in html


@pytest.mark.system
@pytest.mark.skipif(not CHROMIUM, reason="needs chromium: apt-get install chromium")
@pytest.mark.parametrize("width", [360, 700, 1280])
def test_a_browser_shows_it_without_a_complaint_or_a_request(page, tmp_path, width):
    html = page[0].read_text()
    probed = tmp_path / "probed.html"
    allowed = html.replace("default-src 'none'", "default-src 'none'; script-src 'unsafe-inline'")
    probed.write_text(allowed.replace("</body>", PROBE + "</body>"))
    shown, complaints = browse(probed, f"--window-size={width},900")
    assert complaints == []
    found = json.loads(re.search(r"<title>(.*?)</title>", shown)[1].replace("&amp;", "&"))
    assert found["broken"] == []
    assert found["loaded"] == []
    assert found["images"] == page[1]
    assert found["tables"] == html.count("<table>") > 10
    assert found["covered"] == 0  # the labels of rows stay where they are, and must leave room for the figures
    assert not found["wide"]  # tables scroll within the page, the page itself does not


@pytest.mark.system
@pytest.mark.skipif(not CHROMIUM, reason="needs chromium: apt-get install chromium")
def test_the_page_as_written_makes_no_complaint_and_one_that_breaks_its_promise_does(page, tmp_path):
    shown, complaints = browse(page[0])
    assert complaints == []
    assert "</html>" in shown
    worse = tmp_path / "worse.html"
    worse.write_text(page[0].read_text().replace("</body>", '<img src="http://127.0.0.1:9/x.png"></body>'))
    _, complaints = browse(worse)
    assert any("Content Security Policy" in line for line in complaints)


def test_no_two_peers_of_a_table_look_the_same():
    looks = [Series(row.label, row.weighting, ()) for row in TABLES["peers"].rows]
    kinds = [each.kind for each in looks if not each.variant]
    assert len(kinds) > 10
    assert {each.kind for each in looks if each.variant} <= set(kinds)  # these are dashed
    assert len({colour_of(kind) for kind in kinds}) == len(kinds)
    assert len({marker_of(kind) for kind in kinds}) == len(kinds)
