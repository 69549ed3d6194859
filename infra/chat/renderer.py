"""The front door of this room: the protocol that every renderer meets, what it reads a sampled turn as, and Qwen3's.

``infra.chat.families`` chooses a renderer for a policy; the other families are in modules of their own.
"""

from __future__ import annotations

from infra.chat.protocol import Renderer
from infra.chat.qwen3 import ChatMLRenderer
from infra.chat.tokens import TokenizerUnfit
from infra.chat.turns import ParsedCall, ParsedTurn

__all__ = ["ChatMLRenderer", "ParsedCall", "ParsedTurn", "Renderer", "TokenizerUnfit"]
