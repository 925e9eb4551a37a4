"""Hostile probes: what a worker that wants out would try. This package is the part that runs inside.

Each probe is one function of one of the modules below, and runs alone in an attempt of its own, started by
confine.probe through the same launcher as every worker. It does the forbidden thing for real, in a way that would
harm nothing if it worked. Only the standard library is imported: the worker sees this folder and a Python.

    raises OSError       refused, with that errno
    returns a text       it happened, as the text says: contained if that is what is expected, ESCAPED if not
    raises Escaped       it reached something outside, or a part of the Linux kernel that the profile closes
    raises Skipped       this machine has not got what the probe is about

confine.probes.inside refuses to run any of them unless confine.probes.proof shows that the process is confined.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Expected = Literal["refused", "contained"]


class Escaped(Exception):
    """Says what was reached."""


class Skipped(Exception):
    """Says what is missing for the probe to mean anything."""


@dataclass(frozen=True, slots=True)
class World:
    """What the command set up for the probes to attack, and what it knows about outside. Plain values, as JSON.

    hostname, seccomp    what the profile promises, part of the proof of confinement
    secret, secret_text  a file that is given to nobody, and what is in it; `secret_text` stands in every target
    cwd, private         two folders that are given read-only: of mode 0755, and of mode 0700
    below_tmp            one more, below /tmp, which is writable
    exports              the private scratch folder at that path
    inherited            a descriptor that the command holds open: 7, or the next that was free
    loopback             whether AF_INET may be used inside an empty network namespace
    """

    hostname: str
    seccomp: bool
    loopback: bool
    host_pid: int
    inherited: int
    host_name: str
    host_accounts: tuple[str, ...]
    tcp4: int
    tcp6: int
    udp: int
    abstract: str
    secret: str
    secret_text: str
    cwd: str
    private: str
    below_tmp: str
    exports: str
    neighbour_scratch: str
    neighbour_socket: str
    neighbour_abstract: str
    neighbour_shm_key: int


@dataclass(frozen=True, slots=True)
class Probe:
    """ends_by: how the launcher is expected to end the attempt (a name such as "timeout"), None if it answers.

    limits are put over the profile's for this attempt; a probe whose limit has no layer here is skipped. With
    `terminal` its standard input is a terminal of the command's own. `layer` is one that, given up by name, takes away
    what the probe is about.
    """

    name: str
    group: str
    expected: Expected
    act: Callable[[World], str]
    cve: str | None = None
    ends_by: str | None = None
    limits: Mapping[str, int] = field(default_factory=dict)
    timeout_ms: int = 15_000
    terminal: bool = False
    layer: str | None = None


PROBES: dict[str, Probe] = {}


class Group:
    """The decorator of one group's probes; a probe's name is its function's."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(
        self,
        expected: Expected,
        *,
        cve: str | None = None,
        ends_by: str | None = None,
        limits: Mapping[str, int] | None = None,
        timeout_ms: int = 15_000,
        terminal: bool = False,
        layer: str | None = None,
    ) -> Callable[[Callable[[World], str]], Callable[[World], str]]:
        def register(act: Callable[[World], str]) -> Callable[[World], str]:
            name = act.__name__
            assert name not in PROBES, name
            PROBES[name] = Probe(
                name, self.name, expected, act, cve, ends_by, dict(limits or {}), timeout_ms, terminal, layer
            )
            return act

        return register


def load() -> dict[str, Probe]:
    """Every probe by name, in the order in which they are shown."""
    from confine.probes import abi, files, leaks, network, privilege, processes, resources  # noqa: F401

    groups = ("network", "files", "processes", "privilege", "abi", "resources", "leaks")
    return dict(sorted(PROBES.items(), key=lambda item: groups.index(item[1].group)))
