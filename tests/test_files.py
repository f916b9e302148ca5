import errno
import os

import pytest

from exitflow.files import write_atomically, write_secret


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_the_old_file_and_names_it(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        write_atomically(path, b"new")
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_in_the_place_of_a_file_is_named_by_its_own_name(tmp_path):
    (tmp_path / "file").mkdir()
    with pytest.raises(OSError, match="Is a directory") as caught:
        write_atomically(tmp_path / "file", b"new")
    assert (caught.value.filename, caught.value.filename2) == (str(tmp_path / "file"), None)


def test_a_secret_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    def cut_off(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", cut_off)
    with pytest.raises(KeyboardInterrupt):
        write_secret(tmp_path / "secret", b"x")
    assert list(tmp_path.iterdir()) == []
