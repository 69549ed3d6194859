"""Whether the KV of a prefix has reached the store: asked of the store's master, by the name of the prefix's last page.

An engine tells nobody when it has written what an aborted request computed. It writes page after page in order, so the
last page's being there says that all are. Whoever asks needs no part in the store: the name follows from the tokens and
the weights, and the master answers over HTTP.
"""

from __future__ import annotations

import asyncio
import time

import aiohttp

from infra.kv_store.pages import PAGE_TOKENS, TokenIds, object_name, page_digests, root_digest

POLL_S = 0.01
ANSWER_S = 1.0


class Arrival:
    """For one event loop. ``http`` is the URL of the master's HTTP side, ``space`` the engines' namespace."""

    def __init__(self, http: str, space: str) -> None:
        self._http, self._space = http, space
        self._session: aiohttp.ClientSession | None = None

    async def wait(self, tokens: TokenIds, salt: str, deadline_s: float) -> bool:
        """Whether every full page of ``tokens`` is in the store; says no after ``deadline_s`` seconds, or at once when
        the master doesn't answer."""
        pages = len(tokens) // PAGE_TOKENS
        if not pages:
            return True
        deadline = time.monotonic() + deadline_s
        digests = await asyncio.to_thread(page_digests, tokens[: pages * PAGE_TOKENS], root_digest(salt))
        name = object_name(self._space, digests[-1])
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S))
        while True:
            try:
                async with self._session.get(f"{self._http}/query_key", params={"key": name}) as answer:
                    if answer.status == 200:
                        return True
            except (aiohttp.ClientError, OSError):  # TimeoutError is an OSError
                return False
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(POLL_S)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None
