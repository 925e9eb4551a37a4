"""When the disk is nearly full, new intents are the first thing that is refused, so that every outcome finds room."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root"),
    pytest.mark.skipif(shutil.which("mkfs.ext4") is None, reason="mkfs.ext4 (e2fsprogs) is not installed"),
]

ROOT = Path(__file__).resolve().parents[2]
IMAGE_BYTES = 160 * 1024 * 1024
# In a mount namespace of its own: nobody else ever sees the mount, and it ends with its last process (unshare(1)).
SCRIPT = 'mount -o loop "$1" "$2" && exec "$3" -m tests.kernel.full_disk "$2" "$4"'


def test_new_intents_are_refused_before_the_room_for_outcomes_is_gone(tmp_path: Path) -> None:
    image, small = tmp_path / "image", tmp_path / "small"
    small.mkdir()
    with open(image, "wb") as file:
        file.truncate(IMAGE_BYTES)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", image], check=True)
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", SCRIPT, "sh",
         str(image), str(small), sys.executable, str(tmp_path / "bank")],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=90,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert list(small.iterdir()) == []  # it was seen in that namespace alone
