"""Tables as values: what is best, what is missing, what was measured with fewer seeds."""

import pytest

from paper.grids import Entry, signed, table_grid
from paper.results import Results
from paper.tables import TABLES
from tests.paper.synthetic import put as put_cell

TABLE = TABLES["table1"]


@pytest.fixture
def put(tmp_path):
    def write(label, setting, seed, accuracy, table=TABLE):
        given = dict.fromkeys(table.settings, accuracy)
        own = dict.fromkeys(table.settings, accuracy / 2)
        put_cell(tmp_path / "small.jsonl", table.cell("cifar10", label, setting), seed, given, own)

    return write


def grid(tmp_path, table=TABLE):
    return table_grid(table, "cifar10", Results(tmp_path / "small.jsonl"))


def test_without_results_every_cell_is_missing_beside_the_papers(tmp_path):
    found = grid(tmp_path)
    assert found.num_found == 0
    assert found.rows["serving-rate"][0].paper.mean == pytest.approx(0.542)
    assert not any(entry.best or entry.measured for entry in found.entries)
    assert found.notes == ["No results yet."]


def test_the_best_of_a_column_is_the_highest_as_printed(tmp_path, put):
    put("equal-weight", "80-15-5", 9, 0.50041)
    put("flops-prop", "80-15-5", 9, 0.50049)
    put("balanced-adj", "80-15-5", 9, 0.4)
    found = grid(tmp_path)
    best = {label: row[0].best for label, row in found.rows.items()}
    assert best == {"equal-weight": True, "flops-prop": True, "serving-rate": False, "balanced-adj": False}


def test_a_single_result_is_not_the_best_of_anything(tmp_path, put):
    put("balanced-adj", "80-15-5", 9, 0.5)
    assert not any(entry.best for entry in grid(tmp_path).entries)


def test_who_answers_everything_at_one_exit_is_not_the_best_of_a_column(tmp_path, put):
    peers = TABLES["peers"]
    put("all-cloud", "33-33-33", 9, 0.9, table=peers)
    put("auto", "80-15-5", 9, 0.6, table=peers)
    put("fedavg", "33-33-33", 9, 0.5, table=peers)
    found = grid(tmp_path, peers)
    assert found.rows["all-cloud"][0].measured.mean == 0.9
    assert [label for label, row in found.rows.items() if row[0].best] == ["auto"]
    assert "all-local and all-cloud answer everything at one exit, so no column is theirs." in " ".join(found.notes)


def test_a_row_of_own_answers_shows_what_exits_say_by_themselves(tmp_path, put):
    put("auto", "80-15-5", 9, 0.75, table=TABLES["ours"])
    rows = grid(tmp_path, TABLES["ours"]).rows
    assert rows["auto"][0].measured.mean == 0.75
    assert rows["auto + own answers"][0].measured.mean == 0.375


def test_fewer_seeds_are_marked(tmp_path, put):
    put("equal-weight", "80-15-5", 9, 0.5)
    put("equal-weight", "80-15-5", 42, 0.6)
    put("balanced-adj", "80-15-5", 9, 0.7)
    found = grid(tmp_path)
    assert found.seeds == (9, 42)
    assert found.raised(found.rows["balanced-adj"][0]) == "¹"
    assert found.raised(found.rows["equal-weight"][0]) == ""
    assert found.raised(found.rows["flops-prop"][0]) == ""
    assert "over the seeds 9 and 42" in found.notes[0]


def test_the_difference_is_from_the_paper(tmp_path, put):
    put("balanced-adj", "80-15-5", 9, 0.5)
    assert grid(tmp_path).rows["balanced-adj"][0].difference == pytest.approx(0.5 - 0.534)
    assert Entry(None, 0, None).difference is None
    assert signed(-0.034) == "−3.4"
    assert signed(0.0134) == "+1.3"
    assert signed(-0.0001) == signed(0.0) == "0.0"


def test_auto_elsewhere_is_set_against_the_paper_s_table_of_the_same_system(tmp_path, put):
    ours, rivals = TABLES["ours-highly-biased"], TABLES["table6"]
    put("auto", "80-15-5", 9, 0.75, table=ours)
    put("auto", "80-15-5", 42, 0.25, table=ours)
    for label in ("equal-weight", "serving-rate", "serving-rate p=0.2"):
        put(label, "80-15-5", 9, 0.5, table=rivals)
    found = grid(tmp_path, ours)
    assert found.summary == {"best of Table 6": (0.5,), "auto is ahead by": (0.25,)}
    put("auto", "80-15-5", 9, 0.75, table=TABLES["ours-biased"])
    put("auto", "80-15-5", 42, 0.75, table=TABLES["ours-biased"])
    put("auto", "5-15-80", 9, 0.75, table=TABLES["ours-biased"])
    notes = grid(tmp_path, TABLES["ours-biased"]).notes
    assert "The last two rows: over the seeds that auto and all of Table 5 have." in notes


def test_ours_is_set_against_the_best_of_table_1_once_all_four_are_there(tmp_path, put):
    ours = TABLES["ours"]
    put("auto", "80-15-5", 9, 0.75, table=ours)
    for label in ("equal-weight", "flops-prop", "balanced-adj"):
        put(label, "80-15-5", 9, 0.5)
    assert grid(tmp_path, ours).summary["auto is ahead by"][0] is None  # serving-rate may be better
    put("serving-rate", "80-15-5", 9, 0.625)
    found = grid(tmp_path, ours).summary
    assert found["best of Table 1"][0] == 0.625
    assert found["auto is ahead by"][0] == 0.125
    assert found["auto is ahead by"][1] is None  # auto has not been trained for it
    put("auto", "80-15-5", 42, 1.0, table=ours)
    put("balanced-adj", "80-15-5", 42, 0.9)
    assert grid(tmp_path, ours).summary == found  # the other seed is not one that all have
    for label in ("equal-weight", "flops-prop", "serving-rate"):
        put(label, "80-15-5", 42, 0.875)
    found = grid(tmp_path, ours).summary
    assert found["best of Table 1"][0] == 0.75
    assert found["auto is ahead by"][0] == 0.125
