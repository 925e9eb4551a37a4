"""`journal.py FOLDER ORDER…`: writes each order that the book does not hold yet, a line each, and acknowledges it.

A line without its end is a write that was cut off: it is taken away first. Each line is synced before it is
acknowledged, and so is the folder, once, for the book's own name.
"""

import os
import sys


def main() -> None:
    folder, *orders = sys.argv[1:]
    path = f"{folder}/book"
    book = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    above = os.open(folder, os.O_RDONLY)
    os.fsync(above)
    text = os.pread(book, 1 << 20, 0)
    whole = text[: text.rfind(b"\n") + 1]
    if whole != text:
        os.ftruncate(book, len(whole))
        os.fsync(book)
    there = whole.decode().splitlines()
    for order in orders:
        if order not in there:
            line = f"{order}\n".encode()
            while line:
                line = line[os.write(book, line) :]
            os.fsync(book)
        print(f"booked {order}", flush=True)


if __name__ == "__main__":
    main()
