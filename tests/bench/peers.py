"""Other sandboxes at settings comparable to the default profile's, as command lines and the files those need.

Each shows /usr read-only, a /proc of its own, a minimal /dev and a tmpfs at /tmp, has every namespace to itself, no
Linux capability, no new privileges and an unprivileged uid outside. None of them records what was enforced.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent.parent / ".peers"  # what `make bench ARGS=launch` installs nsjail into
NSJAIL = FOLDER / "lib" / f"python3.{sys.version_info.minor}" / "site-packages" / "nsjail" / "bin" / "nsjail"
MEMORY_BYTES, PIDS, CPU_PERCENT = 512 << 20, 256, 200
_LINKS = tuple(name for name in ("bin", "lib", "lib64", "sbin") if os.path.islink(f"/{name}"))
_CONTROLLERS = ("memory", "pids", "cpu")
_PREFIX = "chio-bench-nsjail"
_RUNC_ROOT = 1_900_000_000  # what uid 0 of its user namespace is outside


def missing() -> list[str]:
    """The peers that are not here, for the table to say so."""
    found = {"bubblewrap": shutil.which("bwrap"), "runc": shutil.which("runc"), "nsjail": NSJAIL.exists()}
    return [name for name, there in found.items() if not there]


def bubblewrap(argv: Sequence[str], filter_fd: int) -> list[str]:
    links = [part for name in _LINKS for part in ("--symlink", f"usr/{name}", f"/{name}")]
    return [
        *("bwrap", "--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000", "--hostname", "chio"),
        *(
            "--ro-bind",
            "/usr",
            "/usr",
            *links,
            "--proc",
            "/proc",
            "--dev",
            "/dev",
            "--tmpfs",
            "/tmp",
            "--chdir",
            "/usr",
        ),
        *("--clearenv", "--setenv", "PATH", "/usr/bin:/bin", "--cap-drop", "ALL", "--new-session", "--die-with-parent"),
        *("--chdir", "/usr"),
        *("--seccomp", str(filter_fd), "--", *argv),
    ]


def nsjail(argv: Sequence[str], *, cgroups: bool) -> list[str]:
    links = [part for name in _LINKS for part in ("-s", f"/usr/{name}:/{name}")]
    devices = [part for name in ("null", "zero", "random", "urandom") for part in ("-R", f"/dev/{name}")]
    limits = [
        *("--cgroup_mem_max", str(MEMORY_BYTES), "--cgroup_mem_parent", _PREFIX),
        *("--cgroup_pids_max", str(PIDS), "--cgroup_pids_parent", _PREFIX),
        *("--cgroup_cpu_ms_per_sec", str(CPU_PERCENT * 10), "--cgroup_cpu_parent", _PREFIX),
    ]
    return [
        *(str(NSJAIL), "-Mo", "-Q", "-u", "1000:65534", "-g", "1000:65534", "-H", "chio"),
        *("-R", "/usr", *links, *devices, "-T", "/tmp", "-D", "/usr", "-E", "PATH=/usr/bin:/bin"),
        *("--rlimit_as", "hard", "-t", "60", *(limits if cgroups else ()), "--", *argv),
    ]


@contextlib.contextmanager
def nsjail_parents() -> Iterator[bool]:
    """The cgroups that nsjail wants to find, one in each v1 controller; False where there is no such hierarchy."""
    parents = [Path(f"/sys/fs/cgroup/{controller}/{_PREFIX}") for controller in _CONTROLLERS]
    if not all(parent.parent.is_dir() for parent in parents):
        yield False
        return
    for parent in parents:
        parent.mkdir(exist_ok=True)
    try:
        yield True
    finally:
        for parent in parents:
            parent.rmdir()


class Runc:
    """A bundle for one command."""

    def __init__(self, folder: Path, argv: Sequence[str]) -> None:
        self.bundle = folder
        self._state = folder / "state"
        self._number = 0
        (folder / "rootfs").mkdir(parents=True)
        os.chown(folder / "rootfs", _RUNC_ROOT, _RUNC_ROOT)
        subprocess.run(["runc", "spec", "--bundle", str(folder)], check=True)
        config = json.loads((folder / "config.json").read_text())
        config["process"] |= {"terminal": False, "args": list(argv), "cwd": "/usr", "noNewPrivileges": True}
        config["process"]["env"] = ["PATH=/usr/bin:/bin"]
        config["process"]["capabilities"] = {name: [] for name in config["process"]["capabilities"]}
        config["root"] = {"path": "rootfs", "readonly": False}
        binds = ["/usr", *(f"/{name}" for name in ("bin", "lib", "lib64", "sbin") if os.path.exists(f"/{name}"))]
        config["mounts"] = [at for at in config["mounts"] if at["destination"] in {"/proc", "/dev", "/dev/shm"}] + [
            {"destination": path, "source": os.path.realpath(path), "type": "bind", "options": ["bind", "ro", "nosuid"]}
            for path in binds
        ]
        config["mounts"].append({"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid"]})
        config["linux"]["namespaces"].append({"type": "user"})
        for name in ("uidMappings", "gidMappings"):
            config["linux"][name] = [{"containerID": 0, "hostID": _RUNC_ROOT, "size": 1}]
        config["linux"]["cgroupsPath"] = "/chio-bench-runc"
        config["linux"]["resources"] |= {
            "memory": {"limit": MEMORY_BYTES},
            "pids": {"limit": PIDS},
            "cpu": {"period": 100_000, "quota": CPU_PERCENT * 1_000},
        }
        (folder / "config.json").write_text(json.dumps(config))

    def command(self) -> list[str]:
        self._number += 1
        name = f"chio-bench-{os.getpid()}-{self._number}"
        return ["runc", "--root", str(self._state), "run", "--bundle", str(self.bundle), name]
