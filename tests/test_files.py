import errno
import os
from pathlib import Path

import pytest

from exitflow.config import parse_toml, read_toml
from exitflow.errors import ConfigError, one_line
from exitflow.files import append_line, make_folder, read_file, sync_files, write_atomically, write_secret


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_name_is_on_disk_before_anybody_goes_on(tmp_path, monkeypatch):
    """A rename is only safe once its folder is; a line, and a folder, likewise."""
    synced, fsync = [], os.fsync

    def watched(descriptor):
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    folder = tmp_path / "outer" / "inner"
    make_folder(folder)
    assert synced == [tmp_path.name, "outer"]
    write_atomically(folder / "file", b"new")
    assert synced[2:] == [f".file.{os.getpid()}.tmp", "inner"]
    append_line(folder / "lines", b"one")
    append_line(folder / "lines", b"two")
    assert synced[4:] == ["lines", "inner", "lines"]
    assert (folder / "lines").read_bytes() == b"one\ntwo\n"


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


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("pipe", "is no regular file"),
        ("device", "is no regular file"),
        ("large", "has 1,000,000,000,000 bytes, and at most 4,194,304 are read of such a file"),
        ("directory", "is a directory"),
        ("zero byte", "no name of a file holds a zero byte"),
        ("long name", "File name too long"),
    ],
)
def test_only_regular_files_of_a_bounded_size_are_read(kind, problem, tmp_path):
    path = tmp_path / "file.toml"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "large":
        path.touch()
        os.truncate(path, 10**12)
    elif kind == "directory":
        path.mkdir()
    else:
        path = Path({"zero byte": "a\0b", "long name": "x" * 5000}[kind])
    with pytest.raises(OSError, match=problem):
        read_file(path)
    with pytest.raises(ConfigError):
        read_toml(path)


def test_a_file_without_a_size_is_read():
    assert read_file(Path("/proc/self/status")).startswith(b"Name:")


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    "text", ["a." * 50_000 + "a = 1", "[" + "a . " * 50_000 + "a]", "x = {" + "'a'." * 9 + "a = 1}"]
)
def test_a_key_of_endless_parts_is_refused_before_it_fills_the_memory(text):
    with pytest.raises(ConfigError, match="holds a dotted key of more than 8 parts"):
        parse_toml(text)


def test_dots_elsewhere_are_no_parts_of_a_key():
    text = "# 1.2.3.4.5.6.7.8.9.10\na = [1.0, 2.0, 'v1.2.3.4.5.6.7.8.9.10']\nb.c.d.e.f.g.h.i = 'a.b.c.d.e.f.g.h.i.j'"
    assert parse_toml(text)["a"] == [1.0, 2.0, "v1.2.3.4.5.6.7.8.9.10"]


def test_an_error_is_one_line_of_bounded_length():
    assert one_line("runs/x: no such file") == "runs/x: no such file"
    assert one_line("a\nb\x1b[31m \udcff") == r"a b\x1b[31m \udcff"
    text = str(ConfigError(f"must be 0 or more, got {'7' * 10**6}", key="training.seed"))
    assert text.startswith("training.seed: must be 0 or more, got 777")
    assert len(text) < 400
    assert len(one_line("many words " * 10**5)) < 1300


def test_files_that_are_settled_together_are_waited_for_with_their_folders(tmp_path, monkeypatch):
    waited = []
    original = os.fsync

    def fsync(descriptor):
        waited.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        original(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    paths = [tmp_path / str(number) for number in range(3)]
    for path in paths:
        write_atomically(path, b"data", lasting=False)
    assert waited == []
    sync_files(paths)
    assert sorted(waited) == sorted(map(str, [tmp_path, *paths]))
    sync_files([])
