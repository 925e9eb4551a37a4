"""Confinement by an ordinary user: an account made up for the test, in no group, that owns one folder."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from confine.identities import ID_MAPPERS

ROOT = Path(__file__).resolve().parent.parent.parent
UID = 65_100
FIRST_SUBORDINATE = 300_000
ACCEPTED = ("--without", "distinct-uids", "--without", "cgroup")
# What a root of the machine writes for a user, seen in a mount namespace of the test's own.
SUBORDINATE = f"""
set -e
cd "$1" && shift
printf '{UID}:{FIRST_SUBORDINATE}:65536\\n' | tee subgid > subuid
{{ cat /etc/passwd; echo 'somebody:x:{UID}:{UID}::/:/bin/sh'; }} > passwd
{{ cat /etc/group; echo 'somebody:x:{UID}:'; }} > group
chmod 644 subuid subgid passwd group
for file in *; do touch "/etc/$file"; mount --bind "$file" "/etc/$file"; done
cd "$HOME" && exec setpriv --reuid {UID} --regid {UID} --clear-groups "$@"
"""
LAUNCH = """
import json, sys
from pathlib import Path
from confine import Launcher
from tests.confine.launching import Runner
with Launcher.start() as launcher:
    ended = Runner(launcher).run(sys.argv[1:], Path.cwd())
assert ended.observed, ended.event
print(json.dumps({"satisfied": ended.observed.satisfied, "stdout": ended.exited.stdout.decode(),
                  "fields": {f.name: [f.asked, f.value, f.source, f.detail] for f in ended.observed.fields}}))
"""


needs_mappers = pytest.mark.skipif(
    not all(map(os.path.exists, ID_MAPPERS)),
    reason="newuidmap(1) is not installed: apt-get install uidmap",
)


class User:
    """Runs commands as that user in its folder."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.environment = {
            "PATH": f"{Path(sys.executable).parent}:{ROOT}/.node/bin:/usr/bin:/bin",
            "HOME": str(home),
            "TMPDIR": str(home),
            "XDG_RUNTIME_DIR": str(home),
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def run(
        self, *command: str, cwd: Path | None = None, groups: Sequence[int] = (), uid: int = UID
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=cwd or self.home,
            env=self.environment,
            user=uid,
            group=uid,
            extra_groups=groups,
            capture_output=True,
            text=True,
            check=False,
            timeout=180,
        )

    def confine(self, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "confine.cli", "run", *arguments, cwd=cwd)

    def chio(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run("chio", "process", *arguments, cwd=self.home / "project")

    def run_with_subordinate_ids(self, *command: str) -> subprocess.CompletedProcess[str]:
        """As run(), on a machine that gives this user uids and gids of its own to give (subuid(5))."""
        with tempfile.TemporaryDirectory() as etc:
            return subprocess.run(
                ("unshare", "--mount", "sh", "-c", SUBORDINATE, "sh", etc, *command),
                env=self.environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=180,
            )

    def launch(self, *argv: str, groups: Sequence[int] = ()) -> dict[str, object]:
        done = self.run(sys.executable, "-c", LAUNCH, *argv, groups=groups)
        assert done.returncode == 0, done.stderr
        launched: dict[str, object] = json.loads(done.stdout)
        return launched


@pytest.fixture(scope="module")
def user() -> Iterator[User]:
    if os.geteuid() != 0:
        pytest.skip("making an ordinary user up needs root; as an ordinary user the other files test the same")
    # pytest's own folders are closed to everyone else.
    home = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="chio-"))
    os.chown(home, UID, UID)
    home.chmod(0o755)
    made = User(home)
    if made.run(sys.executable, "-c", "import confine").returncode != 0:
        shutil.rmtree(home)
        pytest.skip(f"other users may not read {ROOT}")
    yield made
    shutil.rmtree(home)


def test_what_an_ordinary_user_cannot_have_is_refused_with_the_fix(user: User) -> None:
    for named, accepted, root in (
        ("distinct-uids", "cgroup", "--add-subuids"),
        ("cgroup", "distinct-uids", "Delegate"),
    ):
        refused = user.confine("--without", accepted, "--", "id")
        assert (refused.returncode, refused.stdout) == (125, "")
        assert root in refused.stderr
        assert f"--without {named}" in refused.stderr


def test_a_command_runs_confined_once_that_is_accepted_by_name(user: User) -> None:
    done = user.confine(*ACCEPTED, "--", "sh", "-c", "id -u; cat /proc/self/uid_map; ls /; echo x > made")
    assert done.returncode != 0  # the last of them: its folder is read-only
    uid, mapped, *folders = done.stdout.split("\n")
    assert (uid, mapped.split()) == ("1000", ["1000", str(UID), "1"])
    assert "root" not in folders
    assert "home" not in folders
    assert not (user.home / "made").exists()


def test_the_launch_record_says_what_was_given_up_and_what_holds(user: User) -> None:
    record = user.launch("/bin/sh", "-c", "id -G")
    assert (record["satisfied"], record["stdout"]) == (True, "1000\n")
    fields = record["fields"]
    assert isinstance(fields, dict)
    assert fields["distinct-uids"] == [True, False, "absent", "given up by --without"]
    assert fields["uid"][:3] == [[UID] * 4, [UID] * 4, "observed"]
    assert fields["capabilities"][1] == [0] * 5
    assert set(fields["namespaces"][1].values()) == {"own"}
    assert fields["mounts"][0] == fields["mounts"][1]
    assert "/dev/null" in fields["mounts"][1]


def test_groups_that_cannot_be_dropped_are_on_the_record(user: User) -> None:
    record = user.launch("/bin/true", groups=[24, 65_101])
    fields = record["fields"]
    assert isinstance(fields, dict)
    asked, value, source, detail = fields["groups"]
    assert asked == value == [24, 65_101]
    assert (source, record["satisfied"]) == ("observed", True)
    assert "cannot be dropped" in detail


def test_the_tests_of_the_workers_world_hold_for_an_ordinary_user(user: User) -> None:
    names = ("world", "life", "refusals", "exports", "seccomp", "landlock", "loopback", "limits", "programs")
    done = user.run(*_pytest(user.home, *names), cwd=ROOT)
    assert done.returncode == 0, done.stdout[-4_000:] + done.stderr


@needs_mappers
def test_a_user_with_subordinate_ids_gives_every_attempt_its_own(user: User) -> None:
    done = user.run_with_subordinate_ids(sys.executable, "-c", LAUNCH, "/bin/sh", "-c", "id -u; id -G")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert (record["satisfied"], record["stdout"]) == (True, "1000\n1000\n")
    fields = record["fields"]
    assert fields["uid"][1] == fields["gid"][1] == [FIRST_SUBORDINATE] * 4
    assert fields["groups"][:3] == [[], [], "observed"]
    assert "distinct-uids" not in fields


@needs_mappers
def test_exports_and_lives_hold_with_subordinate_ids(user: User) -> None:
    command = _pytest(user.home, "exports", "life", "refusals")
    done = user.run_with_subordinate_ids("sh", "-c", f'cd {ROOT} && exec "$@"', "sh", *command)
    assert done.returncode == 0, done.stdout[-4_000:] + done.stderr


def test_the_first_process_runs_as_an_ordinary_user(user: User) -> None:
    """The report project, from nothing to its result: host, Chio kernel and both workers have one uid."""
    made = user.run(str(ROOT / ".ci/report-env"), str(user.home / "project"))
    assert made.returncode == 0, made.stderr
    begun = user.chio("init", "--config", "host.json", "--state", ".chio")
    assert begun.returncode == 0, begun.stderr
    refused = user.chio("run", "--state", ".chio", "--plan", "process.json")
    assert refused.returncode == 1
    assert "--without" in refused.stderr
    done = user.chio("run", "--state", ".chio", "--plan", "process.json", *ACCEPTED)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["complete"] is True
    assert (user.home / "project/.chio/result.json").exists()
    assert list(user.home.glob("chio/[0-9a-f]*")) == []


def test_a_machine_without_user_namespaces_is_named(user: User) -> None:
    """In a user namespace that may have no further one: as far as the user can tell, such a machine."""
    script = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    done = user.run(*_own_namespaces(), "sh", "-c", script, "sh", *_confine_true())
    assert (done.returncode, done.stdout) == (125, "")
    assert "user namespace: No space left" in done.stderr
    assert "user.max_user_namespaces" in done.stderr


def test_a_covered_proc_as_in_a_container_is_named(user: User) -> None:
    script = 'mount -t tmpfs none /proc/bus && exec "$@"'
    done = user.run(*_own_namespaces(), "sh", "-c", script, "sh", *_confine_true())
    assert (done.returncode, done.stdout) == (125, "")
    assert "/proc is covered" in done.stderr


def test_a_folder_with_a_mount_below_it_is_refused_and_named(user: User) -> None:
    (user.home / "outer/inner").mkdir(parents=True, exist_ok=True)
    (user.home / "elsewhere").mkdir(exist_ok=True)
    script = f'mount -t tmpfs none {user.home}/outer/inner && exec "$@"'
    command = _confine_true("--read", f"{user.home}/outer")
    done = user.run(*_own_namespaces(), "sh", "-c", script, "sh", *command, cwd=user.home / "elsewhere")
    assert (done.returncode, done.stdout) == (125, "")
    assert "another file system is mounted below it" in done.stderr
    assert str(user.home / "outer") in done.stderr


def test_a_folder_in_tmp_that_someone_else_made_is_not_used(user: User) -> None:
    foreign = Path(f"/tmp/chio-{UID + 1}")
    foreign.mkdir()
    try:
        done = user.run("env", "-u", "XDG_RUNTIME_DIR", *_confine_true(), uid=UID + 1)
        assert done.returncode == 125
        assert f"open to others ({foreign};" in done.stderr
    finally:
        foreign.rmdir()


def _pytest(home: Path, *topics: str) -> tuple[str, ...]:
    """Only what is there: a file of a topic may be another's to write."""
    files = [f"tests/confine/test_{topic}.py" for topic in topics if (ROOT / f"tests/confine/test_{topic}.py").exists()]
    # A short place for its folders: the path of a socket in one of them has to fit in 108 bytes (unix(7)).
    return (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={home}/t", *files)


def _own_namespaces() -> tuple[str, ...]:
    return ("unshare", "--user", "--mount", f"--map-user={UID}", f"--map-group={UID}", "--keep-caps")


def _confine_true(*options: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "confine.cli", "run", *ACCEPTED, *options, "--", "true")
