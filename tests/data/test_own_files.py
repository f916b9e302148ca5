import os
import zipfile

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
        ({"train": (images(2)[0] * np.nan, np.zeros(2, int))}, DESCRIPTION, "hold NaN, infinity, or numbers beyond"),
        ({"train": (np.full((2, 1, 4, 4), 1e39), np.zeros(2, int))}, DESCRIPTION, "numbers beyond ±3.4e.38"),
        ({"test": (np.full((2, 1, 4, 4), -1e300), np.zeros(2, int))}, DESCRIPTION, "numbers beyond ±3.4e.38"),
        ({"train": images(2)}, DESCRIPTION.replace("2.0", "2e-38"), "inputs from 0 to 31 become infinite as 32-bit"),
        ({"train": (np.zeros((2, 1)), np.zeros(2, int))}, DESCRIPTION, "only images can be shifted or mirrored"),
    ],
)
def test_data_that_do_not_fit_are_refused(parts, description, problem, tmp_path):
    with pytest.raises(DataError, match=problem):
        load_dataset("own", data_dir=str(write(tmp_path, description, **parts)))


@pytest.mark.parametrize(
    ("description", "problem"),
    [
        ("num_classes = 1\nmean=[0.0]\nstd=[1.0]", "dataset.toml: num_classes: must be from 2 to 1,000,000, got 1"),
        ("num_classes = 2\nmean=[0.0]\nstd=[0.0]", "std: each must be a finite 32-bit float above 0"),
        ("num_classes = 2\nmean=[0.0, 0.0]\nstd=[1.0, nan]", "std: each must be a finite 32-bit float above 0"),
        ("num_classes = 2\nmean=[nan]\nstd=[1.0]", "mean: each must be a finite 32-bit float"),
        ("num_classes = 2\nmean=[1e308]\nstd=[1.0]", r"mean: each must be a finite 32-bit float, got \[1e.308\]"),
        ("num_classes = 2\nmean=[0.0]\nstd=[1e308]", "std: each must be a finite 32-bit float above 0, got"),
        ("num_classes = 2\nmean=[0.0]\nstd=[1e-46]", "std: each must be a finite 32-bit float above 0, got"),
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


def npy(header, body=b""):
    text = repr(header).encode() if isinstance(header, dict) else header
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + body


def described(shape, descr="<f4"):
    return npy({"descr": descr, "fortran_order": False, "shape": shape})


@pytest.mark.parametrize(
    ("inputs", "problem"),
    [
        (described((2**70, 1)), "'inputs' has the shape .1180591620717411303424, 1., and arrays have at most"),
        (described((0, 2**70)), "'inputs' has the shape"),
        (described((2**31, 2**31)), "'inputs' has the shape"),
        (described((-1, 1)), "'inputs' has the shape"),
        (described((3, 1)), "'inputs' should have 12 bytes for its shape, and has 0"),
        (described((3, 1), "|O"), "'inputs' is no array of numbers"),
        (described((3, 1), "<f0"), "damaged header"),
        (npy(b"(" * 9000), "'inputs' has a damaged header"),
        (npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (3L, 1), }\n"), "should have 12 bytes"),
        (b"\x93NUMPY\x07\x00", "'inputs' has a damaged header"),
        (b"", "'inputs' has a damaged header"),
        (None, "it holds no 'inputs', but 'labels'"),
    ],
)
def test_a_header_that_promises_too_much_is_not_believed(inputs, problem, tmp_path):
    write(tmp_path)
    with zipfile.ZipFile(tmp_path / "train.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        if inputs is not None:
            archive.writestr("inputs.npy", inputs)
        archive.writestr("labels.npy", described((3,), "<i8") + bytes(24))
    with pytest.raises(DataError, match=problem):
        load_dataset("own", data_dir=str(tmp_path))


def test_a_part_that_is_no_regular_file_is_not_taken_for_a_missing_one(tmp_path):
    os.mkfifo(write(tmp_path, test=images(2)) / "train.npz")
    with pytest.raises(DataError, match=r"train.npz: cannot be read as a .npz file .*: is no regular file"):
        load_dataset("own", data_dir=str(tmp_path))


def test_a_zip_bomb_is_not_unpacked(tmp_path):
    write(tmp_path)
    zeros = np.zeros((100, 1, 1000, 1000), np.uint8)
    np.savez_compressed(tmp_path / "train.npz", inputs=zeros, labels=np.zeros(100, int))
    with pytest.raises(DataError, match=r"'inputs' would unpack from 97,[0-9]{3} to 100,000,128 bytes"):
        load_dataset("own", data_dir=str(tmp_path))


def test_arrays_in_the_order_of_fortran_are_read_as_they_are(tmp_path):
    inputs, labels = images(5)
    dataset = load_dataset("own", data_dir=str(write(tmp_path, train=(np.asfortranarray(inputs), labels))))
    assert dataset.train.inputs.tolist() == inputs.tolist()


def test_a_flipped_bit_in_an_array_is_found(tmp_path):
    path = write(tmp_path, train=images(30)) / "train.npz"
    data = bytearray(path.read_bytes())
    data[900] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match="Bad CRC-32"):
        load_dataset("own", data_dir=str(tmp_path))


def test_images_are_shifted_by_no_more_than_their_size(tmp_path):
    description = DESCRIPTION + "crop_padding = 5\n"
    with pytest.raises(DataError, match=r"images of \(4, 4\) cannot be shifted by crop_padding = 5 pixels"):
        load_dataset("own", data_dir=str(write(tmp_path, description, train=images(2))))


@pytest.mark.parametrize("dtype", [">f4", "float16", "float64", "bool", "uint16", "int64", "uint8"])
def test_numbers_of_all_kinds_are_prepared_as_floats(dtype, tmp_path):
    inputs, labels = np.ones((2, 1, 4, 4)).astype(dtype), np.zeros(2, ">i2")
    dataset = load_dataset("own", data_dir=str(write(tmp_path, train=(inputs, labels))))
    augmented = dataset.preparation.augment(dataset.train.inputs, torch.Generator())
    prepared = dataset.preparation(augmented)
    assert prepared.dtype == torch.float32
    assert prepared.tolist() == np.zeros((2, 1, 4, 4)).tolist()  # (1 - 1) / 2
    assert dataset.train.labels.tolist() == [0, 0]
