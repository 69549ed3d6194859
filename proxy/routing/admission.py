"""How much of a cell this proxy may use at once, and which of the waiting calls is next.

A cell's *window* is a number of prompt tokens that this proxy may have there in flight. It has no limit until the
engine shows pressure; then it is halved, and grows again by a fixed step for every look at an engine that has no queue
and KV to spare (additive increase, multiplicative decrease). Tokens are counted as if no prefix were shared and no
turn grew: what that misjudges, the engine's own numbers correct.

Invariants. A cell on which this proxy has no call takes one whatever the window, so a call larger than the window is
served and nothing waits for ever for want of room. Closing the window ends no call: what runs runs on.

*Several proxies* see the same engine and so cut and grow at the same moments, each in proportion to what it has there:
all together they behave as one window. The step is shared among them, so the sum grows as fast however many they are.
A window is cut again only when the last cut has had its effect, so a common overload costs each one halving.

Pure: no clock, no I/O. It knows neither routes nor engines.
"""

from __future__ import annotations

import math

from infra.sglang.client import Loads
from proxy.limits import Limits

STEP = 1 / 64
"""Of the engine's KV pool, by which the windows of all proxies together grow in one look."""


class Window:
    """Of one engine, for one proxy. ``take`` and ``give`` come in pairs.

    Pressure begins where the limits say: above ``kv_high``, or after ``queue_s`` of a queue, a window is halved, and
    a cut gets as long to have effect; below ``kv_low`` it may grow.
    """

    def __init__(self, limits: Limits) -> None:
        self.size = math.inf
        """Tokens that may be in flight."""
        self.used = 0
        """Tokens in flight."""
        self.calls = 0
        self.wanted = False
        """A call was turned away since the last look."""
        self._limits = limits
        self._queued_since: float | None = None
        self._cut_at = -math.inf

    def room(self, tokens: int) -> bool:
        """Whether a call with so many prompt tokens may go to the engine now."""
        return self.calls == 0 or self.used + tokens <= self.size

    def take(self, tokens: int) -> None:
        self.used += tokens
        self.calls += 1

    def give(self, tokens: int) -> None:
        self.used -= tokens
        self.calls -= 1

    def observe(self, load: Loads, now: float, proxies: int = 1) -> None:
        """Look at the engine. ``now``: monotonic seconds. ``proxies``: how many share it, this one included."""
        wanted, self.wanted = self.wanted, False
        if load.max_tokens <= 0:
            return
        share = load.used_tokens / load.max_tokens
        if not load.waiting:
            self._queued_since = None
        elif self._queued_since is None:
            self._queued_since = now
        queued = self._queued_since is not None and now - self._queued_since >= self._limits.queue_s
        step = load.max_tokens * STEP / max(1, proxies)
        if share > self._limits.kv_high or queued:
            if self.used <= self.size and now - self._cut_at >= self._limits.queue_s:
                self.size = max(step, min(self.size, self.used) / 2)
                self._cut_at = now
        elif wanted and not load.waiting and share < self._limits.kv_low:
            self.size += step


def rank(seniority: int, since: float, senior_s: float) -> float:
    """Place in the line, smaller first: a call counts as if it had come ``senior_s`` seconds earlier for each call
    that its episode has made (``seniority``), so long-running episodes go first and equals in the order of arrival.

    ``since``: monotonic seconds at which the call came. Nothing starves: a call is overtaken only by those that come
    less than ``senior_s`` × (the most calls of an episode) after it. The place doesn't change while a call waits.
    """
    return since - seniority * senior_s
