"""What an auditor names is opened only if it can be read to an end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from verify.files import open_file
from verify.keys import read_small
from verify.verdict import VerifyError


def test_a_regular_file_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"text")
    with open_file(str(path)) as file:
        assert file.read() == b"text"


@pytest.mark.parametrize("pipe", [False, True])
@pytest.mark.parametrize("name", [".", "/dev/null", "/dev/zero"])
def test_a_folder_and_a_device_are_refused(name: str, pipe: bool, tmp_path: Path) -> None:
    path = str(tmp_path / name)
    with pytest.raises(VerifyError, match="not a regular file") as refused:
        open_file(path, pipe=pipe)
    assert (refused.value.check, refused.value.file) == ("input", path)


def test_a_name_that_is_none_is_refused(tmp_path: Path) -> None:
    for name in (str(tmp_path / "absent"), "with\0nul"):
        with pytest.raises(VerifyError, match="cannot be read"):
            open_file(name)


def test_a_pipe_is_refused_where_a_file_is_read_twice(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(VerifyError, match="not a regular file"):
        open_file(str(tmp_path / "pipe"))


def test_a_pipe_that_nobody_writes_into_is_empty_and_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert read_small(str(tmp_path / "pipe")) == b""


def test_a_pipe_is_read_to_its_end_however_it_comes(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"first")
    os.write(writer, b" second")
    os.close(writer)
    try:
        assert read_small(f"/dev/fd/{reader}") == b"first second"
    finally:
        os.close(reader)
