"""Chio: runs programs that nobody trusts, keeps their calls across crashes, and signs what was decided.

The public door of the package is the command line (`chio.cli`) and the documents of `chio.schema`.
"""

__version__ = "0.1.0"
__all__ = ["__version__"]
