"""A virtual machine whose cgroups are version 2 only: Debian's cloud kernel, emulated in software, with one processor.

Its whole disk is an initial ram file system made here from what this machine has: the interpreter, a shell and some
tools, pytest, confine and its tests. The first program in it copies everything to a tmpfs and changes its root to that,
since the first root of all can be left by nobody (pivot_root(2)).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
KERNEL, OVERLAY = ROOT / ".vm/vmlinuz", ROOT / ".vm/overlay.ko"  # .ci/vm-kernel puts them there
PYTHON = Path("/usr/bin/python3.11")
_TOOLS = """
awk cat chmod chown cp cut dd echo env false find findmnt grep head id ln ls mkdir mkfifo mount mv printf rm rmdir sed
seq setpriv sh sleep sort stat switch_root tail tee timeout touch tr true umount uname unshare wc xargs
""".split()  # noqa: SIM905 (a list of one name a line would be a page)
_LIBRARIES = ("libseccomp.so.2", "libgcc_s.so.1", "libnss_files.so.2")  # what is opened by name, and not linked
_PACKAGES = """
_prctl*.so _pytest _yaml click iniconfig packaging pluggy prctl.py py.py pygments pyroute2 pytest pytest-*.dist-info
pytest_timeout-*.dist-info pytest_timeout.py yaml
""".split()  # noqa: SIM905
_LEFT_OUT = ("test", "idlelib", "tkinter", "lib2to3", "ensurepip", "config-3*", "pydoc_data")
_SECONDS = 500  # a minute where nothing else runs

_FIRST = """#!/bin/sh
export PATH=/usr/bin:/usr/sbin
mount -t tmpfs -o size=80% root /new
cp -a /usr /bin /sbin /lib /lib64 /etc /chio /second /overlay.ko /new
mkdir /new/proc /new/sys /new/dev /new/run /new/root /new/tmp /new/home /new/var
exec switch_root /new /second 2>/dev/null
"""
_SECOND = """#!/bin/sh
exec 2>&1
export PATH=/usr/bin:/usr/sbin:/bin HOME=/root LANG=C.UTF-8 PYTHONPATH=/chio PYTHONDONTWRITEBYTECODE=1
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev; chmod 1777 /tmp
mount -t cgroup2 cgroup2 /sys/fs/cgroup
echo '+cpu +memory +pids' > /sys/fs/cgroup/cgroup.subtree_control
python3 -c 'import ctypes, os; ctypes.CDLL(None).syscall(313, os.open("/overlay.ko", 0), b"", 0)'  # finit_module(2)
cd /chio && python3 -m pytest -q -p no:cacheprovider --color=no {arguments}
echo "VM-EXIT=$?"
echo o > /proc/sysrq-trigger
while :; do sleep 1; done
"""


def missing() -> str | None:
    """What is not here, and how it comes here; None when a machine can be made."""
    if shutil.which("qemu-system-x86_64") is None or shutil.which("cpio") is None:
        return "apt-get install --no-install-recommends qemu-system-x86 cpio"
    if not KERNEL.exists() or not OVERLAY.exists():
        return "no Linux kernel to boot: .ci/vm-kernel fetches one"
    if not PYTHON.exists():
        return f"the machine is made with {PYTHON}, which is not here"
    return None


def run_tests(folder: Path, arguments: Sequence[str]) -> tuple[int, str]:
    """Boots a machine that runs pytest with these arguments. (pytest's exit status, or 99; the console's text)"""
    disk = folder / "root"
    _make_root(disk, arguments)
    image = folder / "initramfs.gz"
    pack = f"find . | cpio --quiet -o -H newc -R 0:0 | gzip -1 > {image}"
    subprocess.run(pack, shell=True, cwd=disk, check=True)
    done = subprocess.run(
        [
            *("qemu-system-x86_64", "-accel", "tcg", "-M", "q35", "-cpu", "max", "-smp", "1", "-m", "1536"),
            *("-kernel", str(KERNEL), "-initrd", str(image), "-nodefaults", "-nographic", "-no-reboot"),
            *("-serial", "stdio", "-append", "console=ttyS0 quiet panic=-1 cgroup_no_v1=all rdinit=/init"),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=_SECONDS,
        check=False,
    )
    console = done.stdout.decode(errors="replace").replace("\r", "") + done.stderr.decode(errors="replace")
    ended = re.search(r"VM-EXIT=(\d+)", console)
    return int(ended[1]) if ended else 99, console


def _make_root(disk: Path, arguments: Sequence[str]) -> None:
    for name in ("bin", "sbin", "lib", "lib64"):
        (disk / "usr" / name).mkdir(parents=True)
        (disk / name).symlink_to(f"usr/{name}")
    for name in ("new", "etc", "usr/lib/python3/dist-packages", "chio/tests"):
        (disk / name).mkdir(parents=True)
    (disk / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n")
    (disk / "etc/group").write_text("root:x:0:\nnogroup:x:65534:\n")
    shutil.copy(OVERLAY, disk / "overlay.ko")
    _copy_programs(disk)
    site = Path(sysconfig.get_path("platlib"))
    for pattern in _PACKAGES:
        for entry in site.glob(pattern):
            _copy(entry, disk / "usr/lib/python3/dist-packages" / entry.name)
    for name in ("confine", "policies", "tests/confine", "pyproject.toml", "tests/__init__.py"):
        _copy(ROOT / name, disk / "chio" / name)
    for name, script in (("init", _FIRST), ("second", _SECOND.format(arguments=" ".join(arguments)))):
        (disk / name).write_text(script)
        (disk / name).chmod(0o755)


def _copy_programs(disk: Path) -> None:
    """The tools, the interpreter with its library, and every shared library that one of these is linked to."""
    programs = [Path(found) for name in _TOOLS if (found := shutil.which(name, path="/usr/bin:/usr/sbin"))]
    for program in programs:
        shutil.copy(program, disk / str(program.parent).lstrip("/") / program.name)
    shutil.copy(PYTHON, disk / "usr/bin/python3")
    standard, site = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("platlib"))
    _copy(standard, disk / str(standard).lstrip("/"))
    linked = [*programs, PYTHON, *standard.glob("lib-dynload/*.so"), *site.glob("_prctl*")]
    listed = subprocess.run(["ldd", *map(str, linked)], capture_output=True, text=True, check=False).stdout
    known = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    libraries = set(re.findall(r"(?:=> |^\t)(/\S+)", listed, re.MULTILINE))
    libraries |= {path for path in re.findall(r"x86-64.* => (/\S+)", known) if Path(path).name in _LIBRARIES}
    for library in libraries:
        if library.startswith(("/lib", "/usr")):
            target = disk / (library if library.startswith("/usr") else f"/usr{library}").lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, target)


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns(*_LEFT_OUT), dirs_exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        status, text = run_tests(Path(folder), sys.argv[1:])
    print(text)
    sys.exit(status)
