"""What can go wrong when tensors are read from another process: each is a reason to try another source.

After any of them the endpoint is usable, and nothing that was read has reached the caller.
"""

from __future__ import annotations


class TransferError(RuntimeError):
    """A transfer failed."""


class SourceLost(TransferError):
    """The source's process is gone, or it refuses to be read at that address."""


class TransferStalled(TransferError):
    """Nothing arrived for too long, or the deadline passed: a stopped process, a dead link, an overloaded machine."""


class TornRead(TransferError):
    """The source can be read, but its memory doesn't hold (or no longer holds) what the manifest says."""
