"""Names of what only proxies keep in Redis; everything that others read is named in ``infra.keys``."""

from __future__ import annotations


def turns(episode: str) -> str:
    """Hash: call number -> encoded ``proxy.notes.TurnNote``: the messages behind the call record of that number.

    Written in the same script as the record, so a restarted proxy can rebuild the episode's ledger.
    """
    return f"gyre:ep:{episode}:turns"
