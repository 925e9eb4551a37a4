"""chio-confine: run one command confined, and show or check profiles. Parses, calls, prints, exits."""

import errno
import json
import os
import select
import signal
import sys
from dataclasses import asdict
from typing import NoReturn, TextIO

import click

from confine import (
    LAYERS,
    CommandRefused,
    ConfineError,
    Event,
    Exited,
    Launcher,
    LaunchFailed,
    LaunchSpec,
    Observed,
    Profile,
    check_limits,
    claim_identity,
    launch_spec,
    load_profile,
    plan_mounts,
    require_cgroups,
)
from confine.spec import Filter

DEADLINE, REFUSED, NOT_EXECUTABLE, NOT_FOUND = 124, 125, 126, 127


@click.group()
def main() -> None:
    """Confine a program on Linux: own namespaces, read-only folders, no Linux capability, no network."""


@main.command(context_settings={"ignore_unknown_options": True})
@click.option("--profile", default="worker", show_default=True, metavar="P", help="A profile's name, or a path.")
@click.option("--read", multiple=True, metavar="PATH", help="One more file or folder to see, read-only.")
@click.option("--write", multiple=True, metavar="PATH", help="A folder or file that the command may change.")
@click.option("--record", metavar="FILE", help="A new file for what was observed of the launch and how it ended.")
@click.option("--runtime-root", multiple=True, metavar="DIR", help="A folder where interpreters may be looked for.")
@click.option("--limit", multiple=True, metavar="NAME=VALUE", help="A limit in place of the profile's.")
@click.option("--timeout", type=click.IntRange(1, 86_400), default=3_600, show_default=True, metavar="SECONDS")
@click.option(
    "--without",
    multiple=True,
    type=click.Choice(LAYERS),
    metavar="LAYER",
    help=f"Do without a layer that is not to be had here ({', '.join(LAYERS)}); the record says so.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    profile: str,
    read: tuple[str, ...],
    write: tuple[str, ...],
    record: str | None,
    runtime_root: tuple[str, ...],
    limit: tuple[str, ...],
    timeout: int,
    without: tuple[str, ...],
    command: tuple[str, ...],
) -> None:
    """Run COMMAND confined, in this folder, which it sees read-only.

    Exits with the command's status, 128 and a signal's number, 124 at the deadline, 125 if it was refused or could not
    be set up, 126 if the command is not executable, 127 if it is not there.
    """
    try:
        with Launcher.start() as launcher:  # first: it comes up while the rest is read and planned
            chosen = load_profile(profile)
            asked = dict(map(_parse_limit, limit))
            limits = check_limits(asked, chosen.limits)
            require_cgroups(chosen.cgroup, asked, without)
            plan = plan_mounts(
                argv=command, cwd=os.getcwd(), state_dir=None, read=read, write=write, runtime_roots=runtime_root
            )
            recorded = _new_record(record)
            identity = claim_identity(without)
            spec = launch_spec(plan, chosen, limits, timeout * 1000, identity, without)
            status = _run(launcher, spec, identity.fd, recorded)
    except CommandRefused as error:
        _refuse(str(error), error.status)
    except ConfineError as error:
        _refuse(str(error), REFUSED)
    sys.exit(status)


@main.command()
@click.option("--profile", default="worker", show_default=True, metavar="P", help="A profile's name, or a path.")
@click.option("--only", multiple=True, metavar="NAME", help="One probe; may be given more than once.")
@click.option("--without", multiple=True, type=click.Choice(LAYERS), metavar="LAYER", help="As in run.")
@click.option("--json", "as_json", is_flag=True, help="JSON also on a terminal.")
def probe(profile: str, only: tuple[str, ...], without: tuple[str, ...], as_json: bool) -> None:
    """Attack this machine's confinement from inside, and say what came of it. Exits with 1 if anything ESCAPED.

    Each probe is a hostile program in an attempt of its own. None of them runs unless it can prove that it is confined.
    """
    from confine.probe import Outcome, run_probes

    text = sys.stdout.isatty() and not as_json

    def show(outcome: Outcome) -> None:
        if text:
            reason = f"{outcome.detail} [{outcome.cve}]" if outcome.cve else outcome.detail
            click.echo(f"{outcome.result:10}{outcome.group:11}{outcome.name:48}{_printable(reason)}")

    try:
        report = run_probes(profile, only=only, without=without, show=show)
    except ConfineError as error:
        _refuse(str(error), 1)
    counts = report.summary
    if text:
        click.echo("  ".join(f"{name} {count}" for name, count in counts.items()))
    else:
        click.echo(json.dumps(asdict(report)))
    sys.exit(1 if counts["escaped"] else 0)


@main.command()
@click.option("--profile", default="worker", show_default=True, metavar="P", help="A profile's name, or a path.")
@click.option("--without", multiple=True, type=click.Choice(LAYERS), metavar="LAYER", help="As in run.")
@click.option("--json", "as_json", is_flag=True, help="JSON also on a terminal.")
def doctor(profile: str, without: tuple[str, ...], as_json: bool) -> None:
    """Say what this machine and user can do, what is missing, and the command that fixes it.

    Exits with 1 if nothing can be launched under the profile.
    """
    from confine.doctor import examine

    try:
        report = examine(profile, without)
    except ConfineError as error:
        _refuse(str(error), 1)
    if sys.stdout.isatty() and not as_json:
        for finding in report.findings:
            click.echo(f"{finding.state:9}{finding.layer:20}{_printable(finding.detail)}")
            if finding.fix is not None:
                click.echo(f"{'':29}fix: {finding.fix}")
    else:
        click.echo(json.dumps(asdict(report)))
    sys.exit(0 if report.ready else 1)


def _printable(text: str) -> str:
    """A worker's words on a terminal: without control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


@main.group()
def profile() -> None:
    """Look at confinement profiles."""


@profile.command()
@click.argument("name")
def show(name: str) -> None:
    """Print what holds under a profile, after `extends`, as JSON: values, and the digests of its texts."""
    loaded, compiled = _profile(name)
    values = {
        "name": loaded.name,
        "digest": loaded.digest,
        "hostname": loaded.hostname,
        "network": loaded.network,
        "seccomp": {"list": compiled.name, "sha256": compiled.sha256},
        "landlock": loaded.landlock,
        "cgroup": loaded.cgroup,
        "environment": dict(loaded.environment),
        "tmpfs": {"tmp_bytes": loaded.tmp_bytes, "shm_bytes": loaded.shm_bytes, "inodes": loaded.inodes},
        "limits": asdict(loaded.limits),
    }
    click.echo(json.dumps(values, indent=2))


@profile.command()
@click.argument("name")
def check(name: str) -> None:
    """Say whether a profile and its system call list can be read, and exit 1 if not."""
    loaded, _ = _profile(name)
    click.echo(f"{loaded.name}: {loaded.digest}")


def _profile(name: str) -> tuple[Profile, Filter]:
    from confine.seccomp import load_filter

    try:
        loaded = load_profile(name)
        return loaded, load_filter(loaded.seccomp)
    except ConfineError as error:
        _refuse(str(error), 1)


def _parse_limit(text: str) -> tuple[str, object]:
    name, _, value = text.partition("=")
    return name, int(value) if value.isdecimal() else value


def _new_record(path: str | None) -> TextIO | None:
    """The record's file, made before anything starts. ConfineError when it cannot be, or is there already."""
    if path is None:
        return None
    try:
        return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w", encoding="utf-8")
    except OSError as error:
        raise ConfineError(
            f"the record cannot be written: {error.strerror}", path=path, fix="name a new file"
        ) from None


def _run(launcher: Launcher, spec: LaunchSpec, lock_fd: int, record: TextIO | None) -> int:
    # A terminal is not handed in: what can read it can often write to it, and what it shows is trusted.
    stdin = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC) if sys.stdin.isatty() else sys.stdin.fileno()
    launcher.launch("run", spec, stdin, [lock_fd], (sys.stdout.fileno(), sys.stderr.fileno()))
    poll = select.poll()
    poll.register(launcher, select.POLLIN)
    seen: dict[str, object] = {"schema": "chio.confine-record.v1", "launch": None, "end": None}
    while True:
        try:
            poll.poll()
        except KeyboardInterrupt:
            launcher.kill("run", "interrupted")
        for event in launcher.receive():
            if isinstance(event, Observed):
                seen["launch"] = asdict(event)
                launcher.resume("run")
                continue
            if record is not None:
                # What the command wrote went to its own streams; the record says how much.
                end = {name: value for name, value in asdict(event).items() if name not in ("stdout", "stderr")}
                with record:
                    json.dump(seen | {"end": end}, record, indent=2)
            return _status(event)


def _status(event: Event) -> int:
    if isinstance(event, LaunchFailed):
        reason = f"{event.step}: {os.strerror(event.errno) if event.errno else 'failed'}"
        details = "; ".join(part for part in (event.path, event.hint) if part)
        click.echo(f"chio-confine: {reason}" + (f" ({details})" if details else ""), err=True)
        if event.step == "exec":
            return NOT_FOUND if event.errno == errno.ENOENT else NOT_EXECUTABLE
        return REFUSED
    assert isinstance(event, Exited)
    if event.killed_for is not None:
        click.echo(f"chio-confine: ended the command: {event.killed_for}", err=True)
    if event.killed_for == "timeout":
        return DEADLINE
    if event.killed_for == "not_enforced":
        return REFUSED
    if event.exit_code is not None:
        return event.exit_code
    return 128 + (event.signal or signal.SIGKILL)


def _refuse(message: str, status: int) -> NoReturn:
    click.echo(f"chio-confine: {message}", err=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
