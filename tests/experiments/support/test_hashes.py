"""By which files are known again."""

import pytest

from experiments.support import checkpoint


@pytest.fixture
def folder(tmp_path):
    for number in range(8):
        (tmp_path / f"{number}.bin").write_bytes(bytes([number]) * 100)
    return tmp_path


def fingerprint(folder):
    files = sorted(path for path in folder.iterdir())
    return checkpoint.fingerprint(folder, [(path.name, path.stat().st_size) for path in files])


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_every_bit_of_a_small_folder_counts_and_its_place_does_not(folder, tmp_path_factory):
    first = fingerprint(folder)
    other = tmp_path_factory.mktemp("elsewhere") / "moved"
    folder.rename(other)
    assert fingerprint(other) == first
    flip(other / "5.bin", 50)
    assert fingerprint(other) != first
    flip(other / "5.bin", 50)
    assert fingerprint(other) == first
    (other / "5.bin").rename(other / "9.bin")
    assert fingerprint(other) != first


def test_of_a_large_folder_the_ends_of_some_files_count(folder, monkeypatch):
    monkeypatch.setattr(checkpoint, "LIMIT", 500)
    monkeypatch.setattr(checkpoint, "SAMPLED", 4)
    monkeypatch.setattr(checkpoint, "END", 10)
    first = fingerprint(folder)
    for name, position, counts in (
        ("2.bin", 0, True), ("2.bin", 99, True), ("2.bin", 50, False), ("3.bin", 0, False),
    ):  # fmt: skip
        flip(folder / name, position)
        assert (fingerprint(folder) != first) is counts
        flip(folder / name, position)
    with (folder / "3.bin").open("ab") as file:
        file.write(b"x")
    assert fingerprint(folder) != first  # all sizes do


def test_a_file_is_read_once_as_long_as_it_is_left_alone(tmp_path, monkeypatch):
    path, read, sha256 = tmp_path / "weights", [], checkpoint.sha256
    path.write_bytes(b"a")
    monkeypatch.setattr(checkpoint, "sha256", lambda path: read.append(path) or sha256(path))
    first = checkpoint.file_hash(path)
    assert (
        checkpoint.file_hash(path) == first and len(read) == 2
    )  # it may be written again any moment
    monkeypatch.setattr(checkpoint, "_SETTLED", 0)
    assert [checkpoint.file_hash(path) for _ in range(3)] == [first] * 3 and len(read) == 3
    (tmp_path / "new").write_bytes(b"b")
    (tmp_path / "new").replace(path)
    assert checkpoint.file_hash(path) != first and len(read) == 4
