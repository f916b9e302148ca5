import pytest
import torch

from exitflow.federated.types import Missing, Update
from exitflow.flower.screening import SizeScreen, mismatch
from tests.small import task_of

EXPECTED = {"w": torch.zeros(2, 3), "b": torch.zeros(3)}


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        ({"w": torch.ones(2, 3), "b": torch.ones(3)}, None),
        ({"w": torch.ones(2, 3)}, "tensor 'b' is missing"),
        ({**EXPECTED, "x": torch.ones(1)}, "tensor 'x' was not asked for"),
        ({**EXPECTED, "w": torch.ones(3, 2)}, "tensor 'w' has shape [3, 2] instead of [2, 3]"),
        ({**EXPECTED, "w": torch.ones(2, 3).double()}, "tensor 'w' is torch.float64 instead of torch.float32"),
    ],
)
def test_tensors_must_be_those_asked_for(found, problem):
    assert mismatch(found, EXPECTED) == problem


def updates(*sizes, round=1, buffers=1.0):
    return [
        Update(
            task_of(round, f"n{i}", 1, 1.0, 0),
            {"w": torch.full((4,), size)},
            {"v": torch.full((2,), buffers)},
            1,
            1,
            0.0,
        )
        for i, size in enumerate(sizes)
    ]


def test_in_the_first_round_updates_are_compared_with_one_another():
    screened = list(SizeScreen(10)(updates(1000.0, 1.0, 1.1, 0.9)))
    assert [isinstance(each, Missing) for each in screened] == [True, False, False, False]
    assert screened[0].refused
    assert "times as large as is usual" in screened[0].reason
    assert [each.task.node for each in screened] == ["n0", "n1", "n2", "n3"]


def test_later_they_are_compared_with_earlier_rounds_and_not_held_back():
    screen = SizeScreen(10)
    list(screen(updates(1.0, 1.0, 1.0)))
    lazy = screen(iter([*updates(50.0, round=2), *updates(2.0, round=2)]))
    assert isinstance(next(lazy), Missing)
    assert isinstance(next(lazy), Update)
    assert list(lazy) == []


def test_a_majority_within_the_limit_moves_what_is_usual():
    screen = SizeScreen(10)
    for size in (1.0, 5.0, 25.0):
        assert all(isinstance(each, Update) for each in screen(updates(size, size, size)))


def test_refused_sizes_never_become_usual():
    screen = SizeScreen(10)
    list(screen(updates(1.0, 1.0, 1.0)))
    for _ in range(20):
        (refused,) = screen(updates(1000.0))
        assert isinstance(refused, Missing)


def test_buffers_are_looked_at_too():
    screened = list(SizeScreen(10)([*updates(1.0, 1.0), *updates(1.0, buffers=1e6)]))
    assert [isinstance(each, Missing) for each in screened] == [False, False, True]
    assert "its buffers" in screened[2].reason


def test_what_is_no_number_is_left_to_the_loop():
    nan, fine = updates(float("nan"), 1.0)
    assert list(SizeScreen(10)([nan, fine])) == [nan, fine]


def test_missing_updates_pass():
    gone = Missing(task_of(1, "n", 1, 1.0, 0), "gone")
    assert list(SizeScreen(10)([gone])) == [gone]
