"""The Chio kernel: the process that decides every call and the only one that writes the state.

The host starts it as `python -m chio.kernel` with one inherited socket pair; nothing else imports it but
`chio.cli`, for the offline readers of `chio.kernel.reader`.
"""
