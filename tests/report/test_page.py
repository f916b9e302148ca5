"""The page: one file that needs nothing else, from results, from one run, and from a comparison."""

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner

from exitflow.cli.main import main
from exitflow.errors import RunError
from exitflow.experiments.figures import Spread
from exitflow.experiments.results import TrainingFolder
from exitflow.experiments.tables import TABLES
from exitflow.report.build import build_report, make_page
from exitflow.report.page import Field, Page, PageTable, Section, render
from exitflow.report.series import by_kind
from exitflow.report.terminal import spread
from exitflow.runs.comparison import compare
from exitflow.runs.training import train
from tests.report.synthetic import write_gradient_variance, write_results
from tests.small import image_dataset, tiny_system

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DATA = image_dataset(96)


@pytest.fixture(scope="module")
def page(results_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("page")
    path, figures = build_report(results_folder, out)
    return path, figures


def text_of(html: str) -> str:
    return re.sub(r"<[^>]+>", " ", html)


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
    for title in (table.title for table in TABLES.values()):
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


def test_nothing_is_loaded_from_elsewhere(page):
    html = page[0].read_text()
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:|#)""", html)
    assert "url(" not in re.sub(r'src="data:[^"]*"', "", html)
    assert "<script" not in html
    assert "default-src 'none'" in html


def test_names_are_escaped():
    table = PageTable("<b>", ["<i>"], [("<u>", [Field("<s>", detail="<q>")])])
    html = render(Page("<script>", "<em>", {"<a>": "<p>"}, [Section("x", "<h1>", tables=[table])]))
    for tag in ("<script>", "<em>", "<i>", "<u>", "<s>", "<q>"):
        assert tag not in html


def test_a_result_is_not_invented(tmp_path):
    folder = write_results(tmp_path / "r", [TABLES["table4"]], (9,), keep=1.0)
    for path in folder.glob("*serving-rate*"):
        shutil.rmtree(path)
    page = make_page(folder)
    (part,) = next(section for section in page.sections if section.anchor == "table4").parts
    rows = dict(part.tables[0].rows)
    assert [field.text for field in rows["serving-rate"]] == ["–", "–"]
    assert all(field.missing for field in rows["serving-rate"])
    assert not any(field.missing for field in rows["equal-weight"])
    assert "serving-rate" not in part.plots[-1].alt


def test_a_method_with_exits_of_its_own_is_in_the_table_but_not_among_the_exits(tmp_path):
    folder = write_results(tmp_path / "r", [TABLES["peers"]], (9,), ["cifar10"])
    page = make_page(folder)
    part = next(section for section in page.sections if section.anchor == "peers").parts[0]
    assert not any(field.missing for _, fields in part.tables[0].rows for field in fields)
    served, *by_exit = part.plots
    assert "local-only" in served.alt
    assert by_exit
    assert not any("local-only" in plot.alt for plot in by_exit)
    assert "leave out local-only, which has other exits" in " ".join(part.tables[0].notes)


@pytest.mark.parametrize("seeds", [(42,), (9, 42)])
def test_a_result_with_other_exits_than_its_system_is_one_sentence(seeds, tmp_path):
    folder = write_results(tmp_path / "r", [TABLES["table1"]], seeds, ["cifar10"])
    path = folder / "cifar10_7-nodes_equal_flops-prop_33-33-33_seed-42" / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"exit_accuracy": [0.5]}))
    with pytest.raises(
        RunError, match=r"flops-prop.*seed-42/result\.json: exit_accuracy: expected 3 numbers.*got \[0.5\]"
    ):
        make_page(folder)


def test_a_row_that_shares_a_training_has_no_learning_curve_of_its_own(tmp_path):
    folder = write_results(tmp_path / "r", [TABLES["ours"]], (9,), ["cifar10"])
    part = next(section for section in make_page(folder).sections if section.anchor == "ours").parts[0]
    shown = {plot.name.rpartition("-")[2]: "auto + own answers" in plot.alt for plot in part.plots}
    assert shown == {"settings": True, "exits": True, "learning": False, "weights": False}


def test_ours_is_drawn_beside_the_best_of_the_papers(tmp_path):
    tables = [TABLES[name] for name in ("table1", "ours", "ours-biased")]
    folder = write_results(tmp_path / "r", tables, (9,), ["cifar10"])
    sections = {section.anchor: section.parts[0] for section in make_page(folder).sections if section.parts}
    assert "best of Table 1" in sections["ours"].plots[0].alt
    assert "best of Table 5" not in sections["ours-biased"].plots[0].alt  # none of which is there
    assert "best of" not in sections["table1"].plots[0].alt


def test_the_overview_counts_seeds_as_they_are(tmp_path):
    folder = write_results(tmp_path / "r", [TABLES["table1"]], (9,), ["cifar10"])
    overview = dict(make_page(folder).sections[0].tables[0].rows)
    assert overview[TABLES["table1"].title][0] == Field("28 of 28", "seed 9")
    write_results(folder, [TABLES["table6"]], (9, 42), ["cifar10"])
    shutil.rmtree(next(folder.glob("*highly-biased_equal-weight*seed-9")))
    write_gradient_variance(folder, "cifar10", 42)
    overview = dict(make_page(folder).sections[0].tables[0].rows)
    assert overview[TABLES["table6"].title][0] == Field("9 of 9", "1 to 2 seeds")
    assert overview["Table 3: gradient variance"][0] == Field("measured", "seed 42")
    assert overview["Table 3: gradient variance"][1].missing


def test_the_error_bound_has_all_weightings_of_table_1(tmp_path):
    folder = write_results(tmp_path / "r", [TABLES["table1"]], (9, 42), ["cifar10"])
    (plot,) = next(section for section in make_page(folder).sections if section.anchor == "error-terms").plots
    names = [row.label for row in TABLES["table1"].rows] + ["bound-min"]
    for setting in ("80-15-5", "33-33-33", "5-15-80"):
        assert all(f"{name}, {setting}" in plot.alt for name in names)
    assert "± one standard deviation over seeds" in plot.svg()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for weighting in ("serving-rate", "balanced-adj"):
        for seed in (1, 2):
            system = tiny_system(f"training.weighting={weighting}", f"training.seed={seed}")
            train(system, folder / f"{weighting}-seed-{seed}", dataset=DATA)
    return folder


def test_one_run_has_a_report(runs, tmp_path):
    path, figures = build_report(runs / "balanced-adj-seed-1", tmp_path)
    assert figures == 3  # learning, weights, the error bound
    text = text_of(path.read_text())
    assert "7 nodes, 3 exits" in text
    assert "80.0 %, 15.0 %, 5.0 %" in text
    assert "Not finished yet" not in text


def test_a_comparison_has_a_report(runs):
    result = CliRunner().invoke(main, ["report", str(runs)])
    assert result.exit_code == 0, result.output
    assert result.output == f"{runs}/report/index.html: written, and 3 figures beside it.\n"
    text = text_of((runs / "report" / "index.html").read_text())
    assert "2 weightings" in text
    assert "±" in text
    assert CliRunner().invoke(main, ["report", str(runs)]).exit_code == 0  # again, over the old one


def test_a_comparison_of_methods_has_a_row_for_each(tmp_path):
    methods = ["all-cloud", "fjord", "fedavg", "local-only"]
    compare(tiny_system(), ["equal-weight"], [1, 2], methods=methods, out=tmp_path, dataset=DATA)
    page = make_page(tmp_path)
    assert page.title == "paper-7:80-15-5: 5 ways to train"
    assert page.facts["System"] == "7 nodes, 3 exits"
    assert page.facts["Exits answer"] == "80.0 %, 15.0 %, 5.0 %"
    assert page.facts["Training"] == "3 rounds, server step coverage, paper, sample-mean"
    rows = dict(page.sections[0].tables[0].rows)
    assert list(rows) == ["equal-weight", "fjord", "fedavg", "local-only", "all-cloud"]
    assert {len(fields) for fields in rows.values()} == {4}
    alone = [TrainingFolder(tmp_path / f"local-only-seed-{seed}") for seed in (1, 2)]
    devices = [np.mean(run.records[-1]["validation"]["exit_accuracy"][:4]) for run in alone]
    assert rows["local-only"][1].text == spread(np.mean(devices), Spread.of(devices).std)
    assert by_kind(alone)[0].exit_weight(1).values[-1].mean == pytest.approx(4 / 7)


def test_a_method_alone_is_described_by_its_layers(tmp_path):
    shares = ("data.layer_shares=[1,2,4]", "data.dirichlet_alpha=0.5")
    compare(tiny_system(*shares), [], [1], methods=["local-only"], out=tmp_path / "a", dataset=DATA)
    facts = make_page(tmp_path / "a").facts
    assert facts["System"] == "7 nodes, 3 exits"
    assert facts["Exits answer"] == "80.0 %, 15.0 %, 5.0 %"
    compare(tiny_system(*shares), ["equal-weight"], [1], out=tmp_path / "b", dataset=DATA)
    assert make_page(tmp_path / "b").facts["Data"] == "digits, 1:2:4 over the layers, labels by Dirichlet(0.5)"


@pytest.mark.parametrize("other", ["model.width=3", "training.rounds=4", "data.partition=biased"])
def test_runs_of_different_systems_are_not_averaged(tmp_path, other):
    for name, changes in (("one", ()), ("two", (other, "training.seed=5"))):
        train(tiny_system(*changes), tmp_path / name, dataset=DATA)
    with pytest.raises(RunError, match=r"one and .*two are runs of different systems; report on one of them"):
        make_page(tmp_path)


def test_only_the_training_may_differ_between_weightings(tmp_path):
    train(tiny_system("training.rounds=2"), tmp_path / "one", dataset=DATA)
    train(tiny_system("training.weighting=equal-weight"), tmp_path / "two", dataset=DATA)
    assert make_page(tmp_path).title == "paper-7:80-15-5: 2 weightings"
    train(tiny_system("training.weighting=flops-prop", "model.width=3"), tmp_path / "three", dataset=DATA)
    with pytest.raises(RunError, match="are runs of different systems"):
        make_page(tmp_path)


def test_a_dollar_in_a_name_is_no_mathematics(tmp_path):
    train(tiny_system(r"name=a$\foo$"), tmp_path / "run", dataset=DATA)
    path, figures = build_report(tmp_path / "run", tmp_path / "page")
    assert figures == 2
    assert r"a$\foo$" in path.read_text()


def test_a_training_of_which_not_all_records_are_kept_is_finished(runs, tmp_path):
    shutil.copytree(runs / "serving-rate-seed-1", tmp_path / "kept")
    records = (tmp_path / "kept" / "rounds.jsonl").read_text().splitlines(keepends=True)
    assert len(records) > 1
    (tmp_path / "kept" / "rounds.jsonl").write_text(records[-1])
    text = text_of(build_report(tmp_path / "kept", tmp_path / "out")[0].read_text())
    assert "Not finished yet" not in text


def test_a_run_that_is_not_finished_is_shown_as_such(runs, tmp_path):
    shutil.copytree(runs / "serving-rate-seed-1", tmp_path / "cut")
    (tmp_path / "cut" / "rounds.jsonl").write_text("")
    text = text_of(build_report(tmp_path / "cut", tmp_path / "out")[0].read_text())
    assert "Not finished yet" in text
    assert "–" in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "nowhere: there is no such folder"),
        ([".", "--out", "x"], "holds no results of `exitflow reproduce` and no runs"),
        (["nowhere", "--check", "x.md"], "RESULTS: there are no results of `exitflow reproduce` in 'nowhere'"),
        ([".", "--check", "x.md", "--out", "x"], "--out: writes a page, --update and --check do not"),
    ],
)
def test_what_cannot_be_reported_is_one_sentence(tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["report", *arguments])
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1


def test_results_that_belong_to_no_table_are_told(results_folder, tmp_path):
    shutil.copytree(next(results_folder.glob("*_seed-9")), tmp_path / "mine_seed-9")
    result = CliRunner().invoke(main, ["report", str(tmp_path), "--out", str(tmp_path / "page")])
    assert result.exit_code == 0
    assert result.stderr == f"None of the results in {tmp_path} belongs to a table.\n"


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_without_the_extra_it_says_what_to_install(results_folder, package):
    program = (
        f"import sys; sys.modules[{package!r}] = None; from exitflow.cli.main import main; "
        f"main(['report', {str(results_folder)!r}])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'exitflow[report]'" in done.stderr
    assert done.stderr.count("\n") == 1


PROBE = """
<script>
addEventListener("load", async () => {
  const broken = [];
  for (const image of document.images) {
    try { await image.decode(); if (!image.naturalWidth) broken.push(image.alt); } catch { broken.push(image.alt); }
  }
  const loaded = performance.getEntriesByType("resource").map(each => each.name).filter(each => !each.startsWith("data:"));
  const wide = document.documentElement.scrollWidth > innerWidth;
  const covered = [...document.querySelectorAll(".scroll")].filter(each =>
    [...each.querySelectorAll("tbody th")].some(label => Math.max(label.offsetWidth, label.scrollWidth) > 0.55 * each.clientWidth)).length;
  document.title = JSON.stringify({images: document.images.length, broken, loaded, wide, covered,
    tables: document.querySelectorAll("table").length});
});
</script>
"""


def browse(path, *options):
    """The page as the browser has it, and what it wrote on its console."""
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
    ]
    command += ["--enable-logging=stderr", "--virtual-time-budget=20000", *options, "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(not CHROMIUM, reason="needs chromium: apt-get install chromium")
@pytest.mark.parametrize("width", [360, 700, 1280])
def test_a_browser_shows_it_without_a_complaint_or_a_request(page, tmp_path, width):
    import json

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


@pytest.mark.skipif(not CHROMIUM, reason="needs chromium: apt-get install chromium")
def test_the_page_as_written_makes_no_complaint_and_one_that_breaks_its_promise_does(page, tmp_path):
    shown, complaints = browse(page[0])
    assert complaints == []
    assert "</html>" in shown
    worse = tmp_path / "worse.html"
    worse.write_text(page[0].read_text().replace("</body>", '<img src="http://127.0.0.1:9/x.png"></body>'))
    _, complaints = browse(worse)
    assert any("Content Security Policy" in line for line in complaints)
