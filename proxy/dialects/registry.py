"""All dialects that the proxy speaks."""

from __future__ import annotations

from proxy.dialects import anthropic, openai_chat, openai_responses
from proxy.dialects.dialect import Dialect

DIALECTS: tuple[Dialect, ...] = (anthropic, openai_chat, openai_responses)
