"""Whether this process is confined: read from its own /proc, without trusting how it was started.

Every line must hold. They are chosen so that an ordinary process fails most of them, as root or not, and so does one
in a container that only shares some of them.
"""

import os
import socket


def unproved(hostname: str, seccomp: bool) -> list[str]:
    """What is missing for the proof, in words; empty when the process is confined. Never raises OSError."""
    try:
        status = _status()
        maps = [_read(f"/proc/self/{name}").split() for name in ("uid_map", "gid_map")]
        processes = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        interfaces = [line.split(":")[0].strip() for line in _read("/proc/net/dev").splitlines()[2:]]
        root = [line.split(" ") for line in _read("/proc/self/mountinfo").splitlines()]
    except OSError as error:
        return [f"/proc cannot be read: {error}"]
    root_mounts = [(parts[5].split(","), parts[parts.index("-") + 1]) for parts in root if parts[4] == "/"]
    sets = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
    checks = {
        "it runs as root": 0 not in {os.getuid(), os.geteuid(), os.getgid(), os.getegid()},
        "no_new_privs is not set": status.get("NoNewPrivs") == "1",
        "it has Linux capabilities, or could get some": all(int(status.get(name, "1"), 16) == 0 for name in sets),
        "its user namespace maps more than one uid or gid": all(len(m) == 3 and m[2] == "1" for m in maps),
        "it is not the worker of a pid namespace of its own": os.getppid() == 1 and os.getpid() == 2,
        "other processes are visible": processes == {os.getpid()},
        "there is a network interface besides lo": interfaces == ["lo"],
        "the root is not a read-only tmpfs": any("ro" in opts and fs == "tmpfs" for opts, fs in root_mounts),
        "the hostname is not the profile's": socket.gethostname() == hostname,
        "there is no seccomp filter": not seccomp or status.get("Seccomp") == "2",
    }
    return [what for what, holds in checks.items() if not holds]


def _status() -> dict[str, str]:
    lines = (line.partition(":") for line in _read("/proc/self/status").splitlines())
    return {name: value.strip() for name, _, value in lines}


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()
