"""The entry of the command `chio`. It answers `--version` itself: parsing a command line costs four bare starts."""

from __future__ import annotations

import sys

from chio import __version__


def main() -> None:
    if sys.argv[1:] == ["--version"]:
        print(f"chio {__version__}")
        return
    from chio.cli import main as command_line

    command_line(prog_name="chio")


if __name__ == "__main__":
    main()
