"""Results on disk: read with care, written with where they come from."""

import json
import shutil
import subprocess
import sys

import pytest

from exitflow.errors import RunError
from exitflow.runs.training_costs import TrainingCosts
from exitflow.system.system import load_system
from paper import results as module
from paper.results import (
    Result,
    Results,
    TrainingFolder,
    commit,
    costs_json,
    provenance,
    read_json,
    records_to_keep,
    write_json,
)
from tests.small import record_of, tiny_system


@pytest.fixture
def result(tmp_path):
    folder = tmp_path / "one_seed-9"
    folder.mkdir()
    (folder / "spec.toml").write_text(tiny_system().to_toml())
    write_json(folder / "result.json", {"exit_accuracy": [0.25, 0.5, 0.75], "accuracy": {"80-15-5": 0.3}})
    return Result(folder)


def test_figures_are_what_was_written(result):
    assert result.accuracy("80-15-5") == 0.3
    assert result.exit_accuracy == [0.25, 0.5, 0.75]
    assert result.name == "one_seed-9"


def test_a_setting_that_was_not_evaluated_is_named(result):
    with pytest.raises(RunError, match="says nothing of the serving setting 1-2-3"):
        result.accuracy("1-2-3")


def test_own_answers_stand_beside_those_that_are_given_together(result):
    own = {"exit_accuracy": [0.25, 0.4, 0.5], "accuracy": {"80-15-5": 0.2}}
    write_json(result.folder / "result.json", {**result.figures, "own_answers": own})
    by_itself = Result(result.folder, own_answers=True)
    assert (by_itself.accuracy("80-15-5"), by_itself.exit_accuracy) == (0.2, [0.25, 0.4, 0.5])
    assert (result.accuracy("80-15-5"), result.exit_accuracy) == (0.3, [0.25, 0.5, 0.75])
    with pytest.raises(RunError, match=r"result\.json: own_answers: says nothing of the serving setting 1-2-3"):
        by_itself.accuracy("1-2-3")


def test_costs_are_those_of_all_rounds_however_many_records_are_kept(result):
    records = [{**record_of(round), "link_bytes": {"a->b": round}, "multiply_adds": 1} for round in range(1, 351)]
    kept = records_to_keep(records)
    (result.folder / "rounds.jsonl").write_text("".join(json.dumps(each) + "\n" for each in kept))
    write_json(result.folder / "result.json", {**result.figures, **costs_json(records)})
    counted = Result(result.folder).costs
    assert (counted.bytes_sent, counted.multiply_adds) == (350 * 351, 350)


def test_costs_that_nobody_counted_are_those_of_the_records_only_if_they_are_of_all_rounds(result):
    (result.folder / "spec.toml").write_text(load_system("paper-7:80-15-5", ["training.rounds=3"]).to_toml())
    lines = [json.dumps(record_of(round, link_bytes={"a->b": 5})) + "\n" for round in (1, 2, 3)]
    (result.folder / "rounds.jsonl").write_text("".join(lines))
    assert Result(result.folder).costs.bytes_sent == 30
    (result.folder / "rounds.jsonl").write_text(lines[0] + lines[2])
    with pytest.raises(
        RunError, match=r"rounds\.jsonl: has 2 of 3 rounds, and without them what the training took is unknown"
    ):
        _ = Result(result.folder).costs


def test_costs_without_multiply_adds_are_read_as_they_were_written(result):
    write_json(result.folder / "result.json", {**result.figures, **costs_json([record_of(1)])})
    assert Result(result.folder).costs == TrainingCosts(0, None)


@pytest.mark.parametrize(("num_rounds", "num_kept"), [(1, 1), (4, 4), (100, 100), (101, 51), (350, 88), (800, 100)])
def test_a_hundred_records_are_kept_the_last_and_those_with_a_validation_among_them(num_rounds, num_kept):
    plain = [{**record_of(round), "validation": None} for round in range(1, num_rounds + 1)]
    kept = records_to_keep(plain)
    assert len(kept) == num_kept
    assert kept[-1] is plain[-1]
    validated = [{**record, "validation": {"accuracy": 1.0} if record["round"] == 7 else None} for record in plain]
    assert num_rounds < 7 or validated[6] in records_to_keep(validated)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "expected an object, got list"),
        ("{}", "accuracy: expected a number from 0 to 1 for each serving setting, got null"),
        ('{"accuracy": {"a": "x"}, "exit_accuracy": []}', "accuracy: expected a number from 0 to 1"),
        ('{"accuracy": {"a": 42.4}, "exit_accuracy": []}', "accuracy: expected a number from 0 to 1"),
        ('{"accuracy": {"a": NaN}, "exit_accuracy": []}', "NaN is no number of JSON"),
        ('{"accuracy": {"a": 1}, "exit_accuracy": [null]}', "exit_accuracy: expected a number from 0 to 1"),
        ('{"accuracy": {"a": 1}, "exit_accuracy": [1], "seconds": "x"}', 'seconds: expected a number, got "x"'),
        (
            f'{{"accuracy": {{"a": 1}}, "exit_accuracy": [1], "seconds": 1{"0" * 400}}}',
            "seconds: expected a number, got 10+…",
        ),
        ('{"accuracy": {"a": 1}, "exit_accuracy": [1], "own_answers": 1}', "own_answers: expected the accuracies"),
        ('{"accuracy": {"a": 1}, "exit_accuracy": [1], "costs": {"bytes_sent": 1}}', "costs: expected the numbers"),
        (f'{{"accuracy": {{"a": 1{"0" * 400}}}, "exit_accuracy": []}}', "accuracy: expected a number from 0 to 1"),
        (
            '{"accuracy": {"a": 1}, "exit_accuracy": [1], "own_answers": {}}',
            r"own_answers\.accuracy: expected a number",
        ),
        ('{"accuracy": {"a": 1}, "exit_accuracy": [1], "date": 5}', "date: expected a text, got 5"),
        ('{"accuracy": {"a": 1}, "exit_accuracy": [1], "commit": {"a": 1}}', "commit: expected a text, got"),
        ('{"accuracy": {"a": 1}, "exit_accuracy": [1]}', "says nothing of the serving setting 80-15-5"),
    ],
)
def test_a_damaged_result_is_one_sentence(result, text, problem):
    (result.folder / "result.json").write_text(text)
    with pytest.raises(RunError, match=rf"result\.json: .*{problem}.*; delete it, and it will be made again$"):
        result.accuracy("80-15-5")


def test_what_was_given_is_cut_short_and_says_so(result):
    (result.folder / "result.json").write_text(json.dumps({"accuracy": {"a": "x" * 200}, "exit_accuracy": []}))
    with pytest.raises(RunError, match=r'got \{"a": "x+…; delete it'):
        result.accuracy("80-15-5")


def test_records_of_a_result_that_end_too_early_are_one_sentence(result):
    (result.folder / "spec.toml").write_text(load_system("paper-7:80-15-5", ["training.rounds=3"]).to_toml())
    lines = [json.dumps(record_of(round)) + "\n" for round in (1, 3)]
    (result.folder / "rounds.jsonl").write_text("".join(lines))
    assert [record["round"] for record in Result(result.folder).records] == [1, 3]
    for kept, last in ((lines[:1], 1), ([], 0)):
        (result.folder / "rounds.jsonl").write_text("".join(kept))
        with pytest.raises(
            RunError, match=rf"expected records up to round 3, got them up to {last}; restore it, or delete"
        ):
            _ = Result(result.folder).records


def test_records_with_other_exits_than_the_system_are_one_sentence(result):
    (result.folder / "spec.toml").write_text(load_system("paper-7:80-15-5", ["training.rounds=2"]).to_toml())
    lines = [json.dumps(record_of(1)), json.dumps(record_of(2, exit_weights=[0.25] * 4))]
    (result.folder / "rounds.jsonl").write_text("".join(line + "\n" for line in lines))
    with pytest.raises(RunError, match=r"rounds\.jsonl: round 2: exit_weights: expected 3 numbers, got 4; restore it"):
        _ = Result(result.folder).records


@pytest.mark.parametrize("terms", [1, {"bias": 1}, {"generalisation": 1, "bias": 1, "noise": 1, "sampling": "x"}])
def test_damaged_error_terms_are_one_sentence(tmp_path, terms):
    write_json(tmp_path / "profile.json", {"error_terms": terms})
    with pytest.raises(
        RunError, match=r"profile\.json: error_terms: expected the terms of the error bound, got .*; restore it"
    ):
        _ = TrainingFolder(tmp_path).profile


@pytest.mark.parametrize("values", [1, ["a", 1, 1], [1.0], None, [1, 1, -1], [1, 1, 10**400]])
def test_damaged_gradient_variances_are_one_sentence(tmp_path, values):
    results = Results(tmp_path)
    write_json(results.gradient_variance_file("cifar10", 9), {"gradient_variance": values})
    with pytest.raises(
        RunError, match=r"seed-9\.json: gradient_variance: expected 3 numbers from 0 on, one for each exit, got"
    ):
        results.gradient_variance("cifar10", 9)


def test_a_gradient_variance_of_no_date_is_one_sentence(tmp_path):
    results = Results(tmp_path)
    write_json(results.gradient_variance_file("cifar10", 9), {"gradient_variance": [1, 1, 1], "date": None})
    with pytest.raises(RunError, match=r"seed-9\.json: date: expected a text, got null; delete it"):
        results.provenances()


def test_a_folder_in_the_place_of_a_result_is_one_sentence(tmp_path):
    (tmp_path / "one" / "result.json").mkdir(parents=True)
    result = Results(tmp_path).get("one")
    assert result
    with pytest.raises(RunError, match=r"one/result\.json: cannot be read: .*Is a directory"):
        result.accuracy("80-15-5")


def test_records_are_read_up_to_a_line_that_a_kill_cut_off(tmp_path):
    (tmp_path / "rounds.jsonl").write_text("".join(json.dumps(record_of(round)) + "\n" for round in (1, 2)) + '{"rou')
    assert [record["round"] for record in TrainingFolder(tmp_path).records] == [1, 2]
    assert TrainingFolder(tmp_path / "nothing").records == []


@pytest.mark.parametrize(
    "line",
    [
        *("x", "[]", "{}", "null", '{"round": 5}'),
        *(
            json.dumps(record_of(2) | change)
            for change in (
                {"round": "2"},
                {"exit_weights": ["a"]},
                {"exit_weights": float("nan")},
                {"exit_weights": [10**400]},
                {"link_bytes": {"a->b": None}},
                {"multiply_adds": "many"},
                {"validation": [1]},
                {"validation": {"accuracy": "x"}},
                {"validation": {"accuracy": 0.5, "exit_accuracy": [True]}},
            )
        ),
    ],
)
def test_a_damaged_record_is_named_with_its_line(tmp_path, line):
    (tmp_path / "rounds.jsonl").write_text(json.dumps(record_of(1)) + "\n" + line + "\n")
    with pytest.raises(RunError, match=r"rounds.jsonl: line 2 is no record"):
        _ = TrainingFolder(tmp_path).records


def test_a_folder_knows_its_results_and_seeds(tmp_path, result):
    (tmp_path / "begun_seed-7").mkdir()  # no result.json yet
    results = Results(tmp_path)
    assert [each.name for each in results.all()] == ["one_seed-9"]
    assert results.get("begun_seed-7") is None
    assert results.get("one_seed-9") == result
    assert results.seeds() == (9,)
    variance = {"gradient_variance": [3.0, 2.0, 1.0]}
    write_json(results.gradient_variance_file("cifar10", 42), variance)
    assert results.seeds() == (9, 42)
    assert results.gradient_variance("cifar10", 42) == variance
    assert results.gradient_variance("cifar100", 42) is None


def test_nothing_that_is_no_number_is_written(tmp_path):
    with pytest.raises(ValueError, match="Out of range"):
        write_json(tmp_path / "x.json", {"a": float("nan")})
    assert not (tmp_path / "x.json").exists()


def test_a_file_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(RunError, match="cannot be read"):
        read_json(tmp_path / "x.json")


def test_provenance_says_when_what_and_where():
    found = provenance()
    assert set(found) == {"date", "commit", "machine", "instructions", "python", "torch"}
    assert "cores" in found["machine"]
    assert "/" not in found["machine"].replace("/s", "")  # no paths
    assert found["commit"]
    assert json.dumps(found)


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_the_commit_is_that_of_exitflow_not_of_whatever_repository_it_is_installed_in(tmp_path, monkeypatch):
    def git(*arguments):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=tmp_path, check=True)

    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message", "another project")
    (tmp_path / "results.py").write_text("")
    monkeypatch.setattr(module, "__file__", str(tmp_path / "results.py"))
    commit.cache_clear()
    try:
        assert commit() == "unknown"
        git("add", "results.py")
        git("commit", "--quiet", "--message", "ours")
        commit.cache_clear()
        clean = commit()
        assert len(clean) >= 12
        (tmp_path / "results.py").write_text("changed")
        commit.cache_clear()
        assert commit() == f"{clean}-changed"
    finally:
        commit.cache_clear()


def test_reading_results_needs_no_pytorch():
    program = "import sys, paper.documents; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
