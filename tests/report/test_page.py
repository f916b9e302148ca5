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
from exitflow.report.page import Field, Page, PageTable, Section, render
from exitflow.report.series import by_kind
from exitflow.report.terminal import amount, spread
from exitflow.report.writing import build_report, make_page
from exitflow.runs.comparison import compare
from exitflow.runs.measured_accuracy import keep_accuracy
from exitflow.runs.runs import Run, evaluate
from exitflow.runs.spread import Spread
from exitflow.runs.training import train
from exitflow.runs.training_costs import TrainingCosts
from tests.small import image_dataset, tiny_system

pytestmark = pytest.mark.heavy

DATA = image_dataset(96)


def text_of(html: str) -> str:
    return re.sub(r"<[^>]+>", " ", html)


def test_names_are_escaped():
    table = PageTable("<b>", ["<i>"], [("<u>", [Field("<s>", detail="<q>")])])
    html = render(Page("<script>", "<em>", {"<a>": "<p>"}, [Section("x", "<h1>", tables=[table])]))
    for tag in ("<script>", "<em>", "<i>", "<u>", "<s>", "<q>"):
        assert tag not in html


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for weighting in ("serving-rate", "balanced-adj"):
        for seed in (1, 2):
            system = tiny_system(f"training.weighting={weighting}", f"training.seed={seed}")
            train(system, folder / f"{weighting}-seed-{seed}", dataset=DATA)
    return folder


@pytest.mark.heavy
def test_one_run_has_a_report(runs, tmp_path):
    path, figures = build_report(runs / "balanced-adj-seed-1", tmp_path)
    assert figures == 2  # learning, the error bound; the weights, which never change, are a table
    text = text_of(path.read_text())
    assert "7 nodes, 3 exits" in text
    assert "80.0 %, 15.0 %, 5.0 %" in text
    assert "Not finished yet" not in text


@pytest.mark.heavy
def test_a_comparison_has_a_report(runs):
    result = CliRunner().invoke(main, ["report", str(runs)])
    assert result.exit_code == 0, result.output
    assert result.output == f"{runs}/report/index.html: written, and 2 figures beside it.\n"
    text = text_of((runs / "report" / "index.html").read_text())
    assert "2 weightings" in text
    assert "±" in text
    assert CliRunner().invoke(main, ["report", str(runs)]).exit_code == 0  # again, over the old one


def tables_of(page):
    return {table.caption.partition(",")[0]: table for section in page.sections for table in section.tables}


@pytest.mark.heavy
def test_a_run_shows_its_test_accuracy_its_tree_and_every_node(runs, tmp_path):
    shutil.copytree(runs / "serving-rate-seed-1", tmp_path / "run")
    tables = tables_of(make_page(tmp_path / "run"))
    assert [field.text for field in tables["Accuracy on test data"].rows[0][1]] == ["–"] * 4
    assert "exitflow evaluate RUN" in tables["Accuracy on test data"].notes[0]
    found = evaluate(tmp_path / "run", dataset=DATA)
    keep_accuracy(tmp_path / "run", found)
    page = make_page(tmp_path / "run")
    tables = tables_of(page)
    expected = [f"{100 * each:.1f}" for each in (found.accuracy, *found.exit_accuracy)]
    assert [field.text for field in tables["Accuracy on test data"].rows[0][1]] == expected
    nodes = dict(tables["Nodes"].rows)
    assert len(nodes) == 7
    last = json.loads((tmp_path / "run" / "rounds.jsonl").read_text().splitlines()[-1])
    one_way = last["link_bytes"]["device-0->edge-0"]
    served = 100 * found.nodes["device-0"].accuracy
    texts = [field.text for field in nodes["device-0"]]
    assert texts == ["1", texts[1], "25.00", "80.0", "5.00", f"{served:.1f}", amount(2 * one_way)]
    assert nodes["cloud-0"][-1].missing
    html = render(page)
    assert "<svg class='tree'" in html
    assert "device-0 and 3 alike" in html


@pytest.mark.heavy
def test_what_a_training_took_is_beside_it(runs):
    tables = tables_of(make_page(runs))
    records = Run(runs / "serving-rate-seed-1").records
    costs = TrainingCosts.of(records)
    rounds, sent, work, _ = dict(tables["What a training took"].rows)["serving-rate"]
    assert (rounds.text, sent.text, work.text) == ("3", amount(costs.bytes_sent), amount(costs.multiply_adds))


@pytest.mark.heavy
def test_weights_that_change_are_a_figure_and_those_that_do_not_a_table(tmp_path):
    for weighting, figure in (("serving-rate", False), ("flops-prop", True)):
        train(tiny_system(f"training.weighting={weighting}"), tmp_path / weighting, dataset=DATA)
        page = make_page(tmp_path / weighting)
        assert [plot.name for plot in page.plots] == ["learning", "weights"][: 1 + figure]
        assert ("Weights of the exits" in tables_of(page)) is not figure
    rows = dict(tables_of(make_page(tmp_path / "serving-rate"))["Weights of the exits"].rows)
    assert [field.text for field in rows["serving-rate"]] == ["80.0", "15.0", "5.0"]


@pytest.mark.heavy
@pytest.mark.parametrize("text", ["{", "[]", '{"accuracy": "x"}', '{"accuracy": 1, "exit_accuracy": [1]}'])
def test_a_damaged_accuracy_on_test_data_is_one_sentence(runs, tmp_path, text):
    shutil.copytree(runs / "serving-rate-seed-1", tmp_path / "run")
    (tmp_path / "run" / "test-accuracy.json").write_text(text)
    with pytest.raises(RunError, match=r"test-accuracy\.json: is damaged: .*; delete it, and `exitflow evaluate`"):
        make_page(tmp_path / "run")


@pytest.mark.heavy
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
    alone = [Run(tmp_path / f"local-only-seed-{seed}") for seed in (1, 2)]
    devices = [np.mean(run.records[-1].validation.exit_accuracy[:4]) for run in alone]
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
    assert figures == 1
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


@pytest.mark.parametrize(("runs", "sentence"), [("nowhere", "there is no such folder"), (".", "holds no runs")])
def test_what_cannot_be_reported_is_one_sentence(tmp_path, monkeypatch, runs, sentence):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["report", runs])
    assert result.exit_code == 2
    assert result.stderr == f"exitflow: {runs}: {sentence}\n"


@pytest.mark.heavy
@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_without_the_extra_it_says_what_to_install(runs, package):
    program = (
        f"import sys; sys.modules[{package!r}] = None; from exitflow.cli.main import main; "
        f"main(['report', {str(runs)!r}])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    assert "[report]'" in done.stderr
    assert done.stderr.count("\n") == 1
