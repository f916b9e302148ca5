"""Whatever a program gives the functions of the Python API that makes no sense is one sentence, at once."""

import math

import pytest

from exitflow import DataSpec, TrainingSpec, compare, evaluate, explain, load_system, resume, train
from exitflow.errors import ExitflowError, RunError
from exitflow.runs.runs import Run
from tests.runs.cut_off import DATA, unfinished
from tests.small import tiny_system

SYSTEM = tiny_system()
NOWHERE = "no such folder"  # nothing is to be written

WRONG = {
    "backend None": (lambda: train(SYSTEM, NOWHERE, dataset=DATA, backend=None), "backend: there is no backend None"),
    "backend as list": (lambda: train(SYSTEM, NOWHERE, dataset=DATA, backend=["serial"]), "there is no backend"),
    "no workers": (
        lambda: train(SYSTEM, NOWHERE, dataset=DATA, backend="processes", workers=-1),
        "workers: must be a whole number, at least 1, got -1",
    ),
    "workers as text": (lambda: train(SYSTEM, NOWHERE, dataset=DATA, workers="2"), "at least 1, got '2'"),
    "half a worker": (lambda: train(SYSTEM, NOWHERE, dataset=DATA, workers=1.5), "at least 1, got 1.5"),
    "address": (lambda: train(SYSTEM, NOWHERE, dataset=DATA, backend="ray", address=3), "expected HOST:PORT"),
    "unknown device": (lambda: train(SYSTEM, NOWHERE, dataset=DATA, device="x"), "device: PyTorch cannot compute on"),
    "device of no memory": (lambda: train(SYSTEM, NOWHERE, dataset=DATA, device="meta"), "device: PyTorch cannot"),
    "device as number": (lambda: train(SYSTEM, NOWHERE, dataset=DATA, device=3.5), "device: PyTorch cannot"),
    "system as text": (lambda: train("paper-7", NOWHERE, dataset=DATA), "system: expected a System, such as load_sys"),
    "no path": (lambda: train(SYSTEM, None, dataset=DATA), "run: expected the path of a run directory, got None"),
    "path with a NUL": (lambda: train(SYSTEM, "a\0b", dataset=DATA), "run: expected the path of a run directory"),
    "start": (
        lambda: train(SYSTEM, NOWHERE, dataset=DATA, start=5),
        "run: expected the path of a run directory, got 5",
    ),
    "one callback": (lambda: train(SYSTEM, NOWHERE, dataset=DATA, callbacks=print), "callbacks: expected a list of"),
    "callback": (lambda: train(SYSTEM, NOWHERE, dataset=DATA, callbacks=[3]), "or of their names, got [3]"),
    "dataset as text": (lambda: train(SYSTEM, NOWHERE, dataset="cifar10"), "dataset: expected a Dataset, or None"),
    "observer": (lambda: train(SYSTEM, NOWHERE, dataset=DATA, observer=3), "observer: expected a function, got 3"),
    "resume": (lambda: resume(3), "run: expected the path of a run directory, got 3"),
    "seeds as text": (lambda: compare(SYSTEM, ["auto"], ["a"], dataset=DATA), "seeds: expected whole numbers"),
    "one seed": (lambda: compare(SYSTEM, ["auto"], 3, dataset=DATA), "seeds: expected whole numbers from 0 on"),
    "no seed": (lambda: compare(SYSTEM, ["auto"], [], dataset=DATA), "seeds: expected whole numbers from 0 on"),
    "compared by text": (lambda: compare("x", ["auto"], [1]), "system: expected a System"),
    "evaluate": (lambda: evaluate(3), "run: expected the path of a run directory, got 3"),
    "explain": (lambda: explain("x"), "system: expected a System"),
    "override": (lambda: load_system("paper-7", [3]), "expected key=value"),
    "rounds as text": (lambda: TrainingSpec(rounds="3"), "rounds: expected a whole number, got '3'"),
    "rounds as fraction": (lambda: TrainingSpec(rounds=3.5), "rounds: expected a whole number, got 3.5"),
    "steps as truth": (lambda: TrainingSpec(local_steps=True), "local_steps: expected a whole number, got True"),
    "weights as number": (lambda: TrainingSpec(exit_weights=1.0), "exit_weights: expected a tuple, got 1.0"),
    "data as number": (lambda: DataSpec(name=3), "name: expected a name or a function, got 3"),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_argument_that_makes_no_sense_is_one_sentence(what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, problem = WRONG[what]
    with pytest.raises(ExitflowError) as caught:
        call()
    assert problem in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_arguments_of_an_evaluation_are_looked_at_too(tmp_path):
    run = unfinished(tmp_path / "run")
    for arguments, problem in (
        ({"dataset": 3}, "dataset: expected a Dataset"),
        ({"dataset": DATA, "serving": 3}, "setting 3 has 1 parts, the system has 3 exits"),
        ({"dataset": DATA, "confidence": math.nan}, "confidence: expected a name or a function, got nan"),
    ):
        with pytest.raises(ExitflowError, match=problem):
            evaluate(run, **arguments)
    with pytest.raises(ExitflowError, match="device: PyTorch cannot compute on 'x' here"):
        run.outputs(DATA, device="x")


@pytest.mark.parametrize("content", [b"", bytes(9)])
def test_an_empty_model_is_no_finished_run(tmp_path, content):
    run = unfinished(tmp_path / "run")
    run.model_file.write_bytes(content)
    with pytest.raises(RunError, match=r"model.safetensors: cannot be read"):
        resume(run.path, dataset=DATA)


def test_a_deeply_nested_profile_is_one_sentence(tmp_path):
    run = Run.create(tmp_path / "run", SYSTEM.to_toml())
    (run.path / "profile.json").write_text("[" * 100_000)
    with pytest.raises(RunError, match=r"profile.json: is damaged, or was not written by exitflow"):
        resume(run.path, dataset=DATA)
