"""chio-confine probe: hostile programs against this machine's confinement, and what came of each.

Every probe of confine.probes runs alone in an attempt of its own, launched as any worker is: observed at its exec,
resumed only if everything asked for holds. What it says about itself is not all that counts: how the attempt ended,
whether anything of it is left, and what changed outside are looked at from here. A probe that ends without a clear
answer counts as ESCAPED.
"""

import json
import os
import pwd
import select
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from confine.cgroups import require_cgroups
from confine.counterparts import NEIGHBOUR, Counterparts
from confine.errors import ConfineError, ExportRefused, LayerMissing, LimitRefused
from confine.exports import collect_exports
from confine.identities import claim_identity
from confine.launch import Launcher, launch_spec
from confine.limits import check_limits
from confine.plan import plan_mounts
from confine.probes import Probe, World, load
from confine.probes.inside import NOT_CONFINED
from confine.profile import Profile, load_profile
from confine.spec import Event, Exited, LaunchFailed, LaunchSpec, MountPlan, Observed

_PACKAGE = Path(__file__).resolve().parent
# -I: the worker's environment decides nothing about what is imported. -B: nothing could be written anyway.
_PROGRAM = f"import sys; sys.path.insert(0, {str(_PACKAGE.parent)!r}); from confine.probes.inside import main; main()"
_NEIGHBOUR_MS = 600_000
RESULTS = ("refused", "contained", "ESCAPED", "skipped")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One line of the report. result: refused | contained | ESCAPED | skipped."""

    name: str
    group: str
    expected: str
    result: str
    detail: str
    cve: str | None


@dataclass(frozen=True, slots=True)
class Report:
    """What `chio-confine probe` prints. summary: how many outcomes of each result, in lower case."""

    profile: str
    kernel: str
    probes: tuple[Outcome, ...]
    summary: dict[str, int]


@dataclass(frozen=True, slots=True)
class Setting:
    """What all probes of one run share."""

    launcher: Launcher
    profile: Profile
    plan: MountPlan
    without: tuple[str, ...]
    parts: Counterparts
    world: World


def run_probes(
    profile_name: str,
    *,
    only: Sequence[str] = (),
    without: Sequence[str] = (),
    show: Callable[[Outcome], None] = lambda _: None,
) -> Report:
    """Every probe, or those of `only`, under one profile; `show` is given each outcome when it is there.

    ConfineError when the profile cannot be met, or a probe's own launch fails: then nothing is known.
    """
    probes = load()
    if unknown := [name for name in only if name not in probes]:
        raise ConfineError(f"no probe is called {unknown[0]}", fix=f"there are {', '.join(probes)}")
    profile = load_profile(profile_name)
    outcomes = []
    with ExitStack() as stack:
        parts = stack.enter_context(Counterparts())
        launcher = stack.enter_context(Launcher.start())
        plan = _plan(parts, parts.kernel_socket, str(parts.exports), [_python(), "-I", "-B", "-c", _PROGRAM])
        setting = Setting(launcher, profile, plan, tuple(without), parts, _world(parts, profile, without))
        _start_neighbour(setting)
        parts.make_late_targets()
        for probe in probes.values():
            if not only or probe.name in only:
                outcomes.append(_run(setting, probe))
                show(outcomes[-1])
    counts = {result.lower(): sum(outcome.result == result for outcome in outcomes) for result in RESULTS}
    return Report(profile.name, os.uname().release, tuple(outcomes), counts)


def _python() -> str:
    """The interpreter without its virtual environment: the probes need the standard library alone."""
    return os.path.realpath(sys.executable)


def _plan(parts: Counterparts, socket: str, exports: str, argv: Sequence[str]) -> MountPlan:
    return plan_mounts(
        argv=argv,
        cwd=str(parts.cwd),
        state_dir=None,
        read=[str(parts.private), str(parts.below_tmp), str(_PACKAGE)],
        socket=socket,
        exports_directory=exports,
    )


def _world(parts: Counterparts, profile: Profile, without: Sequence[str]) -> World:
    known: dict[str, Any] = {
        "hostname": profile.hostname,
        "seccomp": profile.seccomp is not None and "seccomp" not in without,
        "loopback": profile.network == "loopback",
        "host_pid": os.getpid(),
        "host_name": os.uname().nodename,
        "host_accounts": tuple(entry.pw_name for entry in pwd.getpwall()),
        "secret": str(parts.secret / "secret"),
    }
    names = [field.name for field in fields(World)]
    rest = {name: getattr(parts, name) for name in names if name not in known}
    return World(**known | {name: str(v) if isinstance(v, Path) else v for name, v in rest.items()})


def _spec(setting: Setting, plan: MountPlan, limits: Mapping[str, int], timeout_ms: int) -> tuple[LaunchSpec, int]:
    """A spec and the descriptor of its identity's lock, which is the caller's to close."""
    checked = check_limits(limits, setting.profile.limits)
    require_cgroups(setting.profile.cgroup, limits, setting.without)
    identity = claim_identity(setting.without)
    return launch_spec(plan, setting.profile, checked, timeout_ms, identity, setting.without), identity.fd


def _launch(setting: Setting, name: str, spec: LaunchSpec, lock: int, stdin: int) -> None:
    try:
        setting.launcher.launch(name, spec, stdin, [lock] if lock >= 0 else [])
    finally:
        if lock >= 0:
            os.close(lock)


def _start_neighbour(setting: Setting) -> None:
    parts = setting.parts
    argv = [_python(), "-I", "-B", "-c", NEIGHBOUR, parts.neighbour_arguments()]
    plan = _plan(parts, parts.neighbour_socket, str(parts.neighbour_scratch), argv)
    null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _launch(setting, "neighbour", *_spec(setting, plan, {}, _NEIGHBOUR_MS), null)
    finally:
        os.close(null)
    _observed(setting, "neighbour")
    setting.launcher.resume("neighbour")
    parts.await_neighbour()


def _events(setting: Setting) -> Iterator[Event]:
    poll = select.poll()
    poll.register(setting.launcher, select.POLLIN)
    while True:
        poll.poll()
        yield from setting.launcher.receive()


def _observed(setting: Setting, name: str) -> Observed:
    for event in _events(setting):
        if isinstance(event, Observed) and event.attempt == name and event.satisfied:
            return event
        raise ConfineError(f"the launch of {name} did not hold: {_what_failed(event)}", fix="chio-confine doctor")
    raise AssertionError("unreachable")


def _what_failed(event: Event) -> str:
    if isinstance(event, LaunchFailed):
        parts = (event.step, os.strerror(event.errno) if event.errno else None, event.path, event.hint)
        return ", ".join(part for part in parts if part)
    if isinstance(event, Observed):
        missing = [f.name for f in event.fields if f.source == "observed" and f.asked != f.value]
        return f"not enforced: {', '.join(missing)}" if missing else f"{event.attempt} was observed instead"
    return f"{event.attempt} ended ({event.killed_for or event.exit_code})"


def _run(setting: Setting, probe: Probe) -> Outcome:
    def outcome(result: str, detail: str) -> Outcome:
        return Outcome(probe.name, probe.group, probe.expected, result, detail, probe.cve)

    if probe.layer in setting.without:
        return outcome("skipped", f"given up by name: --without {probe.layer}")
    world = json.dumps(asdict(setting.world))
    plan = replace(setting.plan, argv=(*setting.plan.argv, probe.name, world))
    with ExitStack() as stack:
        if probe.terminal:
            stdin = stack.enter_context(setting.parts.terminal())
        else:
            stdin = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, stdin)
        try:
            spec, lock = _spec(setting, plan, probe.limits, probe.timeout_ms)
        except (LimitRefused, LayerMissing) as missing:
            return outcome("skipped", str(missing))
        _launch(setting, probe.name, spec, lock, stdin)
        observed = _observed(setting, probe.name)
        namespace = os.stat(f"/proc/{observed.pid}/ns/pid").st_ino
        with setting.parts.turning(probe.name):
            setting.launcher.resume(probe.name)
            exited = _exited(setting, probe.name)
    result, detail = _judge(probe, exited)
    for look in (setting.parts.damage, lambda: _left(namespace), lambda: _leaked_export(setting.parts, exited)):
        if (found := look()) is not None:
            result, detail = "ESCAPED", found
    if exited.exports_fd is not None:
        os.close(exited.exports_fd)
    return outcome(result, detail)


def _exited(setting: Setting, name: str) -> Exited:
    for event in _events(setting):
        if isinstance(event, Exited) and event.attempt == name:
            return event
        raise ConfineError(f"while {name} ran: {_what_failed(event)}", fix="run the probe alone, with --only")
    raise AssertionError("unreachable")


def _judge(probe: Probe, exited: Exited) -> tuple[str, str]:
    """From how it ended and what it said. Anything unclear is an escape: nothing was shown."""
    if exited.killed_for is not None:
        expected = exited.killed_for == probe.ends_by
        return ("contained" if expected else "ESCAPED"), f"ended by {exited.killed_for}"
    if exited.signal == signal.SIGSYS:
        return "refused", "killed by the filter (SIGSYS)"
    if exited.signal == signal.SIGSEGV and probe.name == "int_0x80":
        return "refused", "this Linux kernel has no such gate (SIGSEGV)"
    if exited.signal is not None:
        return "ESCAPED", f"undecided: it died of {signal.Signals(exited.signal).name}"
    try:
        answer = json.loads(exited.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = exited.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return "ESCAPED", f"undecided: no answer, exit {exited.exit_code} {' '.join(last)}".rstrip()
    if exited.exit_code == NOT_CONFINED:
        return "ESCAPED", f"the probe saw that it is not confined: {'; '.join(answer['refused_to_start'])}"
    if answer["result"] == "contained" and probe.ends_by is not None:
        return "ESCAPED", f"not ended by {probe.ends_by}: {answer['detail']}"
    return answer["result"], answer["detail"]


def _left(namespace: int) -> str | None:
    """A process that is still in the attempt's pid namespace. A killed one may take a moment to be gone."""
    left = []
    for pid in (name for name in os.listdir("/proc") if name.isdigit()):
        try:
            if os.stat(f"/proc/{pid}/ns/pid").st_ino == namespace:
                left.append(pid)
        except OSError:
            continue  # gone, or another user's: the attempt's are ours to look at
    return f"processes are left: {', '.join(left)}" if left else None


def _leaked_export(parts: Counterparts, exited: Exited) -> str | None:
    """Harvests every file of the scratch folder as an export would be, and looks for the secret."""
    if exited.exports_fd is None:
        return None
    for pattern in ("file", "out", "link", "next"):
        try:
            collected = collect_exports(exited.exports_fd, [pattern], 1 << 30)
        except ExportRefused:
            continue
        for file in collected:
            content = os.pread(file.fd, 4096, 0)
            file.close()
            if parts.secret_text.encode() in content:
                return f"the export {file.name} holds the secret"
    return None
