"""What an auditor can prove from files alone.

This package reads artifacts and pins and nothing else: no database, no network, no clock, and no code of the host's.
`verify.receipts` checks signed receipts, `verify.log` the Merkle log, `verify.cli` is the command `chio-verify`.
Importing the package is cheap; the cryptography is loaded by the first verification.
"""

from verify.verdict import Exit, VerifyError

__all__ = ["Exit", "VerifyError"]
