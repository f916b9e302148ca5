import math
import re

import numpy as np
import pytest
import torch

from exitflow.data.dataset import Dataset, Preparation, Split
from exitflow.errors import DataError, ExitflowError


def test_preparation_normalises_each_channel():
    inputs = torch.tensor([[[[10]], [[20]]]], dtype=torch.uint8)
    prepared = Preparation((10.0, 0.0), (2.0, 10.0))(inputs)
    assert prepared.flatten().tolist() == [0.0, 2.0]
    assert prepared.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bool, torch.int64, torch.uint16])
def test_whatever_numbers_come_floats_of_the_network_s_kind_go_out(dtype):
    prepared = Preparation((1.0,), (2.0,))(torch.ones(2, 1, 3, 3).to(dtype))
    assert prepared.dtype == torch.float32
    assert prepared.tolist() == torch.zeros(2, 1, 3, 3).tolist()


def test_preparation_leaves_its_input_alone():
    inputs = torch.ones(2, 1, 3, 3)
    Preparation((1.0,), (2.0,))(inputs)
    assert torch.equal(inputs, torch.ones(2, 1, 3, 3))


def literal_augmentation(image, dy, dx, mirrored, padding):
    """Mirror or not, pad with black, cut out a window, one pixel after the other."""
    channels, height, width = image.shape
    out = torch.zeros_like(image)
    for c in range(channels):
        for y in range(height):
            for x in range(width):
                source_y, source_x = y + dy - padding, (width - 1 - x if mirrored else x) + dx - padding
                if 0 <= source_y < height and 0 <= source_x < width:
                    out[c, y, x] = image[c, source_y, source_x]
    return out


def test_every_augmented_image_is_one_of_the_possible_crops_and_all_of_them_occur():
    padding, image = 1, torch.arange(1, 13, dtype=torch.uint8).view(1, 3, 4)
    possible = {
        (dy, dx, mirrored): literal_augmentation(image, dy, dx, mirrored, padding)
        for dy in range(3)
        for dx in range(3)
        for mirrored in (False, True)
    }
    preparation = Preparation((0.0,), (1.0,), crop_padding=padding, flip=True)
    batch = preparation.augment(image.expand(1000, 1, 3, 4), torch.Generator().manual_seed(0))
    found = [next((key for key, value in possible.items() if torch.equal(value, out)), None) for out in batch]
    assert None not in found
    counts = torch.tensor([found.count(key) for key in possible]) / 1000
    assert counts.tolist() == pytest.approx([1 / 18] * 18, abs=0.03)


def test_each_image_of_a_batch_keeps_its_own_pixels():
    inputs = torch.arange(8, dtype=torch.uint8).view(8, 1, 1, 1).expand(8, 1, 2, 2).contiguous()
    out = Preparation((0.0,), (1.0,), flip=True).augment(inputs, torch.Generator().manual_seed(0))
    assert torch.equal(out, inputs)


def test_without_augmentation_nothing_changes():
    inputs = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8)
    assert Preparation((0.0,) * 3, (1.0,) * 3).augment(inputs, torch.Generator()) is inputs


@pytest.mark.parametrize(
    ("inputs", "labels", "sentence"),
    [
        (0, [], "needs as many inputs as labels, got 0 and 0"),
        (3, [0, 1], "needs as many inputs as labels, got 3 and 2"),
        (2, [0, 3], "labels must be from 0 to 2, got 0 to 3"),
        (2, [-1, 2], "labels must be from 0 to 2, got -1 to 2"),
    ],
)
@pytest.mark.parametrize("part", ["train", "validation", "test"])
def test_a_data_set_that_cannot_be_used_is_refused(part, inputs, labels, sentence):
    good = Split(torch.zeros(2, 1, 8, 8), torch.tensor([0, 2]))
    bad = Split(torch.zeros(inputs, 1, 8, 8), torch.tensor(labels, dtype=torch.int64))
    splits = {"train": good, "validation": good, "test": good} | {part: bad}
    with pytest.raises(DataError, match=f"data set 'mine', {part}: {sentence}"):
        Dataset("mine", **splits, num_classes=3, preparation=Preparation((0.0,), (1.0,)))


@pytest.mark.parametrize(
    ("value", "dtype", "sentence"),
    [
        (math.nan, torch.float32, "inputs hold NaN or infinity"),
        (-math.inf, torch.float16, "inputs hold NaN or infinity"),
        (1e39, torch.float64, r"inputs from 0 to 1e\+39 become infinite as 32-bit floats, with mean \[0.0\]"),
    ],
)
def test_a_data_set_of_infinite_inputs_is_refused(value, dtype, sentence):
    inputs = torch.zeros(2, 1, 8, 8, dtype=dtype)
    good = Split(inputs.clone(), torch.tensor([0, 2]))
    inputs[1, 0, 3, 4] = value
    with pytest.raises(DataError, match=f"data set 'mine', validation: {sentence}"):
        Dataset("mine", good, Split(inputs, good.labels), good, 3, Preparation((0.0,), (1.0,)))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_classes": 2**62}, "num_classes: must be from 2 to 1,000,000, got 4611686018427387904"),
        ({"num_classes": "3"}, "num_classes: must be from 2 to 1,000,000, got '3'"),
        ({"num_classes": 1}, "num_classes: must be from 2 to 1,000,000, got 1"),
        ({"train": Split(torch.zeros(2, 1, 8, 8), torch.zeros(2))}, "labels must be one row of whole numbers"),
        ({"train": Split(torch.zeros(2, 1, 8, 8), torch.zeros(2, 1, dtype=torch.int64))}, "of shape (2, 1)"),
        ({"test": Split(np.zeros((2, 1, 8, 8)), torch.tensor([0, 2]))}, "expected a Split of two tensors"),
        ({"test": Split(torch.zeros(2, 1, 8, 8), np.zeros(2, int))}, "expected a Split of two tensors"),
        ({"test": (torch.zeros(2, 1, 8, 8), torch.tensor([0, 2]))}, "expected a Split of two tensors"),
        ({"preparation": Preparation((0.0,), (1.0,), crop_padding=2**63 - 1)}, "images of (8, 8) cannot be shifted by"),
    ],
)
def test_a_data_set_of_what_does_not_fit_is_refused(change, sentence):
    good = Split(torch.zeros(2, 1, 8, 8), torch.tensor([0, 2]))
    parts = {"train": good, "validation": good, "test": good, "num_classes": 3}
    with pytest.raises(ExitflowError, match=re.escape(sentence)):
        Dataset("mine", **(parts | {"preparation": Preparation((0.0,), (1.0,))} | change))


def test_a_preparation_needs_a_mean_for_each_channel():
    good = Split(torch.zeros(2, 3, 8, 8), torch.tensor([0, 2]))
    with pytest.raises(DataError, match="inputs have 3 channels, and their preparation has 2 means"):
        Dataset("mine", good, good, good, 3, Preparation((0.0, 0.0), (1.0, 1.0)))
