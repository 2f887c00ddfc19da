"""A file's number is its own, also when it is gone."""

import os

import pytest

from mpbroker.base.file_id import file_id, has_id


def test_no_later_file_has_the_number_of_a_removed_one(tmp_path):
    path, numbers, inodes = tmp_path / "file", [], []
    for _ in range(20):
        with path.open("w") as file:
            fd = file.fileno()
            numbers.append(file_id(fd))
            inodes.append(os.fstat(fd).st_ino)
            assert file_id(fd) == numbers[-1] and 0 < numbers[-1] < 1 << 63
            assert has_id(fd, numbers[-1]) and has_id(fd, inodes[-1])
            assert not any(has_id(fd, other) for other in numbers[:-1])
        path.unlink()
        if numbers == inodes and len(set(inodes)) < len(inodes):
            pytest.skip("this file system tells no generations, and uses inodes again")
    assert len(set(numbers)) == len(numbers)


def test_a_descriptor_that_is_not_open_has_no_number(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY)
    os.close(fd)
    with pytest.raises(OSError):
        file_id(fd)
