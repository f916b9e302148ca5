"""Claims are judged by leads: in which settings, and in how many seeds."""

import pytest

from paper.leads import CONTESTS, Lead
from paper.results import Results
from paper.tables import TABLES
from paper.verdicts import CLAIMS, find_contest, verdict, verdict_rows
from tests.paper.synthetic import write_gradient_variance, write_results


def lead(points, ahead=3, seeds=3):
    return Lead(0.5 + points / 100, 0.5, ahead, seeds)


@pytest.mark.parametrize(
    ("leads", "text"),
    [
        ([], "–"),
        ([lead(2), lead(1)], "**holds**: +1.0 to +2.0"),
        ([lead(2, 1, 1)], "**holds**: +2.0 (one seed)"),
        ([lead(2), lead(1, ahead=2)], "holds in the mean: +1.0 to +2.0"),
        ([lead(2), lead(-1, ahead=0)], "in part: −1.0 to +2.0"),
        ([lead(0.01), lead(-1)], "no: −1.0 to 0.0"),  # level is not ahead
        ([lead(-2, 0, 1)], "no: −2.0 (one seed)"),
    ],
)
def test_a_claim_holds_where_its_leader_is_ahead_in_every_setting_and_seed(leads, text):
    assert verdict(leads) == text


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.text)
def test_every_claim_is_about_a_contest_in_settings_that_it_has(claim):
    contest = find_contest(claim.contest)
    assert contest in CONTESTS
    assert all(contest.cells("cifar10", setting) for setting in claim.settings)


def test_rows_have_both_data_sets_and_gradients_of_every_seed(tmp_path):
    path = write_results(tmp_path / "small.jsonl", [TABLES["table4"]], (9,))
    write_gradient_variance(path, "cifar10", 9, (3.0, 2.0, 1.0))
    write_gradient_variance(path, "cifar10", 42, (1.0, 2.0, 3.0))
    rows = {row[0]: row[2:4] for row in verdict_rows(Results(path))}
    assert rows["Gradients vary most at the first exit"] == ["in part: in 1 of 2 seeds", "–"]
    seventeen = rows["17 nodes: Serving Rate leads where devices serve"]
    assert "(one seed)" in seventeen[0]
    assert seventeen[1] == "–"
