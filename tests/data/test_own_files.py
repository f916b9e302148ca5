import numpy as np
import pytest
import torch

from exitflow.data.sources import load_dataset
from exitflow.errors import ConfigError, DataError

DESCRIPTION = "num_classes = 3\nmean = [1.0]\nstd = [2.0]\nflip = true\n"


def write(folder, description=DESCRIPTION, **parts):
    folder.mkdir(exist_ok=True)
    (folder / "dataset.toml").write_text(description)
    for part, (inputs, labels) in parts.items():
        np.savez(folder / f"{part}.npz", inputs=inputs, labels=labels)
    return folder


def images(count):
    return np.arange(count * 16, dtype=np.float32).reshape(count, 1, 4, 4), np.arange(count) % 3


def test_a_node_needs_only_its_training_part(tmp_path):
    dataset = load_dataset("own", data_dir=str(write(tmp_path, train=images(5))))
    assert (len(dataset.train), len(dataset.validation), len(dataset.test)) == (5, 0, 0)
    assert dataset.num_classes == 3
    assert dataset.input_shape == (1, 4, 4)
    assert dataset.preparation.flip
    assert float(dataset.preparation(dataset.train.inputs[:1])[0, 0, 0, 3]) == 1.0  # (3 - 1) / 2


def test_the_server_needs_only_the_other_parts(tmp_path):
    dataset = load_dataset("own", data_dir=str(write(tmp_path, validation=images(2), test=images(4))))
    assert (len(dataset.train), len(dataset.validation), len(dataset.test)) == (0, 2, 4)
    assert dataset.input_shape == (1, 4, 4)


@pytest.mark.parametrize(
    ("parts", "description", "problem"),
    [
        ({}, DESCRIPTION, "holds none of train.npz, validation.npz, test.npz"),
        (
            {"train": (images(3)[0], np.arange(2))},
            DESCRIPTION,
            "inputs of shape .3, 1, 4, 4. do not fit labels of shape .2,.",
        ),
        ({"train": (images(3)[0], np.array([0, 1, 3]))}, DESCRIPTION, "labels are from 0 to 3, not 0 to 2"),
        ({"train": (np.zeros((2, 3, 4, 4)), np.zeros(2, int))}, DESCRIPTION, "inputs have 3 channels"),
        ({"train": (np.array([[{}]], dtype=object), np.zeros(1, int))}, DESCRIPTION, "cannot be read"),
        ({"train": images(2), "test": (np.zeros((1, 1, 5, 5)), np.zeros(1, int))}, DESCRIPTION, "another shape"),
        ({"train": (images(2)[0], np.array(["a", "b"]))}, DESCRIPTION, "labels whole ones, got float32 and <U1"),
        ({"train": (images(2)[0], np.array([0.9, 1.7]))}, DESCRIPTION, "labels whole ones, got float32 and float64"),
        ({"train": (images(2)[0].astype(complex), np.zeros(2, int))}, DESCRIPTION, "numbers of 64 bits at most"),
        ({"train": (np.array(1.0), np.array(1))}, DESCRIPTION, r"inputs of shape \(\) do not fit"),
        ({"train": (images(2)[0] * np.nan, np.zeros(2, int))}, DESCRIPTION, "hold NaN or infinity"),
        ({"train": (np.zeros((2, 1)), np.zeros(2, int))}, DESCRIPTION, "only images can be shifted or mirrored"),
    ],
)
def test_data_that_do_not_fit_are_refused(parts, description, problem, tmp_path):
    with pytest.raises(DataError, match=problem):
        load_dataset("own", data_dir=str(write(tmp_path, description, **parts)))


@pytest.mark.parametrize(
    ("description", "problem"),
    [
        ("num_classes = 1\nmean=[0.0]\nstd=[1.0]", "dataset.toml: num_classes: must be at least 2, got 1"),
        ("num_classes = 2\nmean=[0.0]\nstd=[0.0]", "std: each must be finite and above 0"),
        ("num_classes = 2\nmean=[0.0, 0.0]\nstd=[1.0, nan]", "std: each must be finite and above 0"),
        ("num_classes = 2\nmean=[nan]\nstd=[1.0]", "mean: each must be a finite number"),
        ("num_classes = 2\nmean=[0.0, 1.0]\nstd=[1.0]", "mean: needs one for each of the 1 channels, got 2"),
        ("num_clases = 2", "unknown key; did you mean 'num_classes'"),
    ],
)
def test_a_wrong_description_is_named(description, problem, tmp_path):
    with pytest.raises(ConfigError, match=problem):
        load_dataset("own", data_dir=str(write(tmp_path, description, train=images(2))))


@pytest.mark.parametrize("content", [b"", b"PK", b"junk", "npy", "cut"])
def test_a_file_that_is_no_npz_is_one_sentence(content, tmp_path):
    path = write(tmp_path, train=images(3)) / "train.npz"
    if content == "npy":
        np.save(tmp_path / "other.npy", np.zeros(3))
        content = (tmp_path / "other.npy").read_bytes()
    elif content == "cut":
        np.savez_compressed(path, inputs=images(30)[0], labels=images(30)[1])
        data = bytearray(path.read_bytes())
        data[60:90] = bytes(30)
        content = bytes(data)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"train.npz: cannot be read as a .npz file with inputs and labels: "):
        load_dataset("own", data_dir=str(tmp_path))


@pytest.mark.parametrize("dtype", [">f4", "float16", "float64", "bool", "uint16", "int64", "uint8"])
def test_numbers_of_all_kinds_are_prepared_as_floats(dtype, tmp_path):
    inputs, labels = np.ones((2, 1, 4, 4)).astype(dtype), np.zeros(2, ">i2")
    dataset = load_dataset("own", data_dir=str(write(tmp_path, train=(inputs, labels))))
    augmented = dataset.preparation.augment(dataset.train.inputs, torch.Generator())
    prepared = dataset.preparation(augmented)
    assert prepared.dtype == torch.float32
    assert prepared.tolist() == np.zeros((2, 1, 4, 4)).tolist()  # (1 - 1) / 2
    assert dataset.train.labels.tolist() == [0, 0]
