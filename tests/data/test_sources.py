"""Data files are made here in the published formats; the real ones are needed nowhere."""

import gzip

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from exitflow.data.sources import load_dataset
from exitflow.errors import DataError


def test_digits_are_those_of_scikit_learn():
    ours, theirs = load_dataset("digits"), load_digits()
    parts = (ours.train, ours.validation, ours.test)
    assert [len(part) for part in parts] == [1200, 197, 400]
    rows = np.concatenate([part.inputs.numpy().reshape(-1, 64) for part in parts])
    labels = np.concatenate([part.labels.numpy() for part in parts])
    found = {(*row, label) for row, label in zip(rows.tolist(), labels.tolist(), strict=True)}
    expected = {
        (*row, label) for row, label in zip(theirs.data.astype(int).tolist(), theirs.target.tolist(), strict=True)
    }
    assert found == expected
    assert len(rows) == len(theirs.data)


def test_prepared_digits_have_mean_0_and_deviation_1():
    digits = load_dataset("digits")
    prepared = digits.preparation(digits.train.inputs)
    assert float(prepared.mean()) == pytest.approx(0, abs=0.01)
    assert float(prepared.std()) == pytest.approx(1, abs=0.01)


def cifar_records(count: int, label_bytes: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    records = rng.integers(256, size=(count, label_bytes + 3072), dtype=np.uint8)
    records[:, :label_bytes] = rng.integers(10, size=(count, label_bytes))
    return records


@pytest.fixture
def cifar10(tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
    records = {name: cifar_records(20, 1, seed) for seed, name in enumerate(names)}
    for name, rows in records.items():
        (folder / name).write_bytes(rows.tobytes())
    return tmp_path, records


def test_cifar10_is_read_from_its_original_files(cifar10):
    root, records = cifar10
    dataset = load_dataset("cifar10", data_dir=str(root), verify=False)
    assert dataset.input_shape == (3, 32, 32)
    assert [len(part) for part in (dataset.train, dataset.validation, dataset.test)] == [90, 10, 20]
    first = records["test_batch.bin"][0]
    assert int(dataset.test.labels[0]) == first[0]
    assert torch.equal(dataset.test.inputs[0].flatten(), torch.from_numpy(first[1:].copy()))


def test_training_and_validation_data_never_meet(cifar10):
    root, _ = cifar10
    dataset = load_dataset("cifar10", data_dir=str(root), verify=False)
    train = {row.numpy().tobytes() for row in dataset.train.inputs}
    validation = {row.numpy().tobytes() for row in dataset.validation.inputs}
    assert not train & validation
    assert len(train | validation) == 100


def test_the_folder_itself_may_be_named_too(cifar10):
    root, _ = cifar10
    assert len(load_dataset("cifar10", data_dir=str(root / "cifar-10-batches-bin"), verify=False).test) == 20


def test_the_environment_variable_says_where_data_lies(cifar10, monkeypatch):
    monkeypatch.setenv("EXITFLOW_DATA_DIR", str(cifar10[0]))
    assert len(load_dataset("cifar10", verify=False).test) == 20


def test_a_file_with_another_checksum_is_refused(cifar10):
    with pytest.raises(DataError, match=r"data_batch_1.bin: md5 is \w+, the published file has 5dd7e06a"):
        load_dataset("cifar10", data_dir=str(cifar10[0]))


def test_a_truncated_file_is_refused(cifar10):
    path = cifar10[0] / "cifar-10-batches-bin" / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"data_batch_3.bin: 61459 bytes are no whole number of 3073-byte records"):
        load_dataset("cifar10", data_dir=str(cifar10[0]), verify=False)


def test_a_missing_file_is_named(cifar10):
    (cifar10[0] / "cifar-10-batches-bin" / "test_batch.bin").unlink()
    with pytest.raises(DataError, match=r"test_batch.bin: cannot be read"):
        load_dataset("cifar10", data_dir=str(cifar10[0]), verify=False)


def test_cifar100_uses_the_fine_label(tmp_path):
    for seed, name in enumerate(("train.bin", "test.bin")):
        (tmp_path / name).write_bytes(cifar_records(20, 2, seed).tobytes())
    dataset = load_dataset("cifar100", data_dir=str(tmp_path), verify=False)
    assert dataset.num_classes == 100
    assert dataset.test.labels.tolist() == cifar_records(20, 2, 1)[:, 1].tolist()


def idx(array: np.ndarray) -> bytes:
    header = bytes((0, 0, 8, array.ndim)) + np.array(array.shape, dtype=">u4").tobytes()
    return header + array.astype(np.uint8).tobytes()


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
@pytest.mark.parametrize("packed", [True, False])
def test_idx_files_are_read_packed_or_not(tmp_path, name, packed):
    rng = np.random.default_rng(0)
    for part, count in (("train", 30), ("t10k", 10)):
        for kind, array in (
            ("images-idx3", rng.integers(256, size=(count, 28, 28))),
            ("labels-idx1", np.arange(count) % 10),
        ):
            data = idx(array)
            path = tmp_path / f"{part}-{kind}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(data) if packed else data)
    dataset = load_dataset(name, data_dir=str(tmp_path), verify=False)
    assert dataset.input_shape == (1, 28, 28)
    assert [len(part) for part in (dataset.train, dataset.validation, dataset.test)] == [27, 3, 10]
    assert dataset.test.labels.tolist() == list(range(10))


def test_an_idx_file_of_another_kind_is_refused(tmp_path):
    for part in ("train", "t10k"):
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(idx(np.zeros((2, 4))))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(idx(np.zeros(2)))
    with pytest.raises(DataError, match="train-images-idx3-ubyte: is not an idx file of bytes in 3 dimensions"):
        load_dataset("mnist", data_dir=str(tmp_path), verify=False)


@pytest.mark.parametrize("length", [0, 3, 4, 7, 15, 16, 47])
def test_an_idx_file_that_was_cut_off_is_refused(tmp_path, length):
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(np.zeros((2, 4, 4)))[:length])
    with pytest.raises(DataError, match="train-images-idx3-ubyte: is not an idx file of bytes in 3 dimensions"):
        load_dataset("mnist", data_dir=str(tmp_path))


def test_a_gzip_bomb_is_not_unpacked(tmp_path):
    header = bytes((0, 0, 8, 3)) + (2**31).to_bytes(4, "big") + (1).to_bytes(4, "big") * 2
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + bytes(10**6)))
    with pytest.raises(DataError, match="is not an idx file of bytes in 3 dimensions"):
        load_dataset("mnist", data_dir=str(tmp_path), verify=False)


def test_half_a_gzip_file_is_refused(tmp_path):
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(np.arange(96).reshape(2, 6, 8)))[:-20])
    with pytest.raises(DataError, match="is not a whole gzip file"):
        load_dataset("mnist", data_dir=str(tmp_path), verify=False)


def test_without_a_directory_the_error_says_how_to_name_one_and_where_to_get_the_data():
    with pytest.raises(DataError) as caught:
        load_dataset("cifar10")
    assert "--data-dir" in str(caught.value)
    assert "$EXITFLOW_DATA_DIR" in str(caught.value)
    assert "cifar-10-binary.tar.gz" in str(caught.value)


def test_a_directory_without_the_data_set_is_named(tmp_path):
    with pytest.raises(DataError, match=r"'cifar100' is not there: looked for train.bin in .*cifar-100-binary and"):
        load_dataset("cifar100", data_dir=str(tmp_path))
