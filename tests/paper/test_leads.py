"""Who is ahead of whom, over the seeds that all of them have."""

import pytest

from paper.leads import AGAINST_THE_PAPER, CONTESTS, Contest, Lead, find_lead
from paper.results import Results
from paper.tables import TABLES
from tests.paper.synthetic import put

CONTEST = Contest("", "table1", "balanced-adj", ("equal-weight", "serving-rate"))
SETTING = "80-15-5"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "small.jsonl"


def put_all(path, seed, **accuracies):
    for label, accuracy in accuracies.items():
        put(path, TABLES["table1"].cell("cifar10", label.replace("_", "-"), SETTING), seed, {SETTING: accuracy})


def lead(path):
    return lead_of(CONTEST, path)


def lead_of(contest, path):
    return find_lead(contest.cells("cifar10", SETTING), Results(path), (9, 42))


def test_a_lead_is_over_the_rival_that_is_best_in_the_mean(path):
    put_all(path, 9, balanced_adj=0.75, equal_weight=0.5, serving_rate=0.625)
    put_all(path, 42, balanced_adj=0.75, equal_weight=0.8125, serving_rate=0.75)
    found = lead(path)
    assert found == Lead(accuracy=0.75, best_rival=0.6875, num_ahead=1, num_seeds=2)  # serving-rate: (0.625 + 0.75) / 2
    assert found.difference == 0.0625


def test_one_that_is_level_is_not_ahead(path):
    put_all(path, 9, balanced_adj=0.5, equal_weight=0.5, serving_rate=0.25)
    assert lead(path) == Lead(0.5, 0.5, num_ahead=0, num_seeds=1)


def test_seeds_that_lack_any_of_them_do_not_count(path):
    put_all(path, 9, balanced_adj=0.5, equal_weight=0.25)
    assert lead(path) is None
    put_all(path, 42, balanced_adj=0.75, equal_weight=0.25, serving_rate=0.5)
    assert lead(path) == Lead(0.75, 0.5, num_ahead=1, num_seeds=1)


def test_rivals_may_stand_in_another_table(path):
    put(path, TABLES["ours"].cell("cifar10", "auto", SETTING), 9, {SETTING: 1.0})
    put_all(path, 9, balanced_adj=0.75, equal_weight=0.25, serving_rate=0.5, flops_prop=0.5)
    assert lead_of(AGAINST_THE_PAPER["ours"], path) == Lead(1.0, 0.75, 1, 1)


def test_own_answers_are_compared_where_a_row_shows_them(path):
    ours = TABLES["ours"]
    put(path, ours.cell("cifar10", "auto", SETTING), 9, {SETTING: 0.75}, {SETTING: 0.5})
    assert lead_of(Contest("", "ours", "auto", ("auto + own answers",)), path) == Lead(0.75, 0.5, 1, 1)


def test_nothing_is_compared_where_a_table_lacks_the_setting_or_the_data():
    (contest, *_) = (contest for contest in CONTESTS if contest.table == "table4")
    assert contest.cells("cifar10", "80-15-5") == []
    assert contest.cells("cifar100", "60-30-10") == []
    assert len(contest.cells("cifar10", "60-30-10")) == 3
    across = Contest("", "ours", "auto", ("equal-weight",), "table4")
    assert across.cells("cifar10", "80-15-5") == []
    assert len(across.cells("cifar10", "60-30-10")) == 2


def test_nothing_is_compared_with_itself():
    contest = Contest("", "table1", "serving-rate", ("equal-weight", "flops-prop"))
    assert contest.cells("cifar10", "33-33-33") == []
    assert len(contest.cells("cifar10", "45-35-20")) == 3


@pytest.mark.parametrize("contest", CONTESTS, ids=lambda contest: contest.title)
def test_every_contest_is_between_rows_that_are_there(contest):
    setting = TABLES[contest.table].settings[0]
    leader, *rivals = (cell.row.label for cell in contest.cells("cifar10", setting))
    assert leader == contest.leader
    assert tuple(rivals) == contest.rivals
    assert leader not in rivals or contest.rivals_table
