"""127.0.0.1 and ::1 in an attempt's own network namespace, for a program that talks to itself.

The launcher imports this before its first launch that needs it, and no other: pyroute2 takes 0.2 s and 20 MB, which
every later fork pays for. Init calls bring_up() before it gives its capabilities up.
"""

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

_LO = 1  # the first interface of every network namespace (network_namespaces(7))


def bring_up() -> None:
    """OSError with netlink's errno. Starts no thread and leaves no descriptor."""
    try:
        with IPRoute() as route:
            route.link("set", index=_LO, state="up")
    except NetlinkError as error:
        raise OSError(error.code, str(error)) from None
