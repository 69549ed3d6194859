"""What became of a call's prefix when the call went to another engine than the one that has its KV.

The invariant: a moved token counts once, as taken from the store, as found on the engine, or as computed again; the
rest of the tokens that an engine reports as cached belong to no move. Pure, but for waiting until what the last engine
computed has reached the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from infra.kv_store.arrival import Arrival
from infra.kv_store.pages import cache_salt
from infra.sglang.generation import Generation
from infra.state.keys import Route


@dataclass(frozen=True)
class PolicyKv:
    """What a proxy knows of its policy's KV."""

    token_bytes: int = 0
    """Of one token in all layers; 0 where the model isn't known."""
    arrival: Arrival | None = None
    """None without a store."""
    arrival_s: float = 0.5
    """How long a call that moves waits for the last pages of its prefix."""

    async def close(self) -> None:
        if self.arrival is not None:
            await self.arrival.close()


@dataclass(frozen=True)
class ComputedPrefix:
    """KV of the first ``tokens`` of a call's prompt, where it was computed last."""

    cell: str
    tokens: int
    incarnation: str = ""
    """"" when only the cell is known."""
    salt: str = ""
    writing: bool = False
    """The engine has just given the request up and may still be writing to the store."""

    def elsewhere(self, route: Route) -> bool:
        return self.cell != route.cell or self.incarnation not in ("", route.incarnation)


@dataclass
class MovedPrefixes:
    """Sums over a call's requests, in tokens of the moved prefixes."""

    tokens: int = 0
    from_store: int = 0
    recomputed: int = 0
    at: ComputedPrefix | None = field(default=None, repr=False)

    async def arrive(self, kv: PolicyKv, route: Route, prompt: Sequence[int]) -> None:
        """Give the last engine a moment to finish writing what the next one is to read."""
        at = self.at
        if kv.arrival is None or at is None or not at.writing or not at.elsewhere(route) or at.salt != salt_of(route):
            return
        await kv.arrival.wait(prompt[: at.tokens], at.salt, kv.arrival_s)

    def count(self, route: Route, prompt_tokens: int, generation: Generation) -> None:
        """Take over what an engine said of its request. One that was given up before it began says nothing."""
        if not generation.output_ids and generation.finish == "abort":
            return
        at = self.at
        if at is not None and at.elsewhere(route):
            cached = min(generation.cached_tokens, at.tokens)
            self.tokens += at.tokens
            self.from_store += min(generation.cached_storage, cached)
            self.recomputed += at.tokens - cached
        # The last token's KV is computed only with the token after it.
        computed = prompt_tokens + max(0, len(generation.output_ids) - 1)
        self.at = ComputedPrefix(route.cell, computed, route.incarnation, salt_of(route), generation.finish == "abort")

    def figures(self, token_bytes: int) -> dict[str, int]:
        """As a call record has them. ``token_bytes``: of one token's KV, 0 where the model isn't known."""
        return {
            "moved_tokens": self.tokens,
            "moved_from_store": self.from_store,
            "moved_recomputed": self.recomputed,
            "moved_bytes": self.from_store * token_bytes,
        }


def salt_of(route: Route) -> str:
    return cache_salt(route.version, route.weights)
