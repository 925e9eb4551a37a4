"""chio-confine: run one command confined, and show or check profiles. Parses, calls, prints, exits."""

import errno
import json
import os
import select
import signal
import sys
from dataclasses import asdict
from typing import NoReturn

import click

from confine import (
    CommandRefused,
    ConfineError,
    Event,
    Exited,
    Launcher,
    LaunchFailed,
    LaunchSpec,
    Observed,
    check_limits,
    claim_identity,
    launch_spec,
    load_profile,
    plan_mounts,
)

DEADLINE, REFUSED, NOT_EXECUTABLE, NOT_FOUND = 124, 125, 126, 127


@click.group()
def main() -> None:
    """Confine a program on Linux: own namespaces, read-only folders, no Linux capability, no network."""


@main.command(context_settings={"ignore_unknown_options": True})
@click.option("--profile", default="worker", show_default=True, metavar="P", help="A profile's name, or a path.")
@click.option("--read", multiple=True, metavar="PATH", help="One more file or folder to see, read-only.")
@click.option("--runtime-root", multiple=True, metavar="DIR", help="A folder where interpreters may be looked for.")
@click.option("--limit", multiple=True, metavar="NAME=VALUE", help="A limit in place of the profile's.")
@click.option("--timeout", type=click.IntRange(1, 86_400), default=3_600, show_default=True, metavar="SECONDS")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    profile: str,
    read: tuple[str, ...],
    runtime_root: tuple[str, ...],
    limit: tuple[str, ...],
    timeout: int,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND confined, in this folder, which it sees read-only.

    Exits with the command's status, 128 and a signal's number, 124 at the deadline, 125 if it was refused or could not
    be set up, 126 if the command is not executable, 127 if it is not there.
    """
    try:
        chosen = load_profile(profile)
        limits = check_limits(dict(map(_parse_limit, limit)), chosen.limits)
        plan = plan_mounts(argv=command, cwd=os.getcwd(), state_dir=None, read=read, runtime_roots=runtime_root)
        with Launcher.start() as launcher:
            identity = claim_identity()
            spec = launch_spec(plan, chosen, limits, timeout * 1000, identity)
            status = _run(launcher, spec, identity.fd)
    except CommandRefused as error:
        _refuse(str(error), error.status)
    except ConfineError as error:
        _refuse(str(error), REFUSED)
    sys.exit(status)


@main.group()
def profile() -> None:
    """Look at confinement profiles."""


@profile.command()
@click.argument("name")
def show(name: str) -> None:
    """Print what holds under a profile, after `extends`, as JSON."""
    try:
        loaded = load_profile(name)
    except ConfineError as error:
        _refuse(str(error), 1)
    values = {
        "name": loaded.name,
        "digest": loaded.digest,
        "hostname": loaded.hostname,
        "environment": dict(loaded.environment),
        "tmpfs": {"tmp_bytes": loaded.tmp_bytes, "shm_bytes": loaded.shm_bytes, "inodes": loaded.inodes},
        "limits": asdict(loaded.limits),
    }
    click.echo(json.dumps(values, indent=2))


@profile.command()
@click.argument("name")
def check(name: str) -> None:
    """Say whether a profile can be read, and exit 1 if not."""
    try:
        loaded = load_profile(name)
    except ConfineError as error:
        _refuse(str(error), 1)
    click.echo(f"{loaded.name}: {loaded.digest}")


def _parse_limit(text: str) -> tuple[str, object]:
    name, _, value = text.partition("=")
    return name, int(value) if value.isdecimal() else value


def _run(launcher: Launcher, spec: LaunchSpec, lock_fd: int) -> int:
    # A terminal is not handed in: what can read it can often write to it, and what it shows is trusted.
    stdin = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC) if sys.stdin.isatty() else sys.stdin.fileno()
    launcher.launch("run", spec, stdin, [lock_fd], (sys.stdout.fileno(), sys.stderr.fileno()))
    poll = select.poll()
    poll.register(launcher, select.POLLIN)
    while True:
        try:
            poll.poll()
        except KeyboardInterrupt:
            launcher.kill("run", "interrupted")
        for event in launcher.receive():
            if isinstance(event, Observed):
                launcher.resume("run")
            else:
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
