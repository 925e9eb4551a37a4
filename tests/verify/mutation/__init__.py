"""Every artifact that the verifier reads, changed in every way that fits into a table: what catches each change?

    changes    how an artifact is changed: members of JSON, lines of text, regions of bytes
    subjects   one good artifact of each kind, who judges it, and its counterpart of another run
    bundles    the same for a whole run, also signed anew by all the right keys
    harmless   what nothing catches, and why it means nothing
    matrix     makes the changes, judges them, counts which check caught how many

`python -m tests.verify.mutation` makes every change and prints the table; the suite draws from them by a fixed seed
(`CHIO_MUTATIONS=all` for every one, a number for at most so many of each way).
"""
