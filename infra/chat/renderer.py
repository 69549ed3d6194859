"""What a renderer is, whatever the model family: messages to token ids block by block, sampled ids to a turn.

Invariant of every implementation: with ``ids(m[:k])`` = root + the blocks of the first k messages, ``ids(m[:k])`` is
a prefix of ``ids(m[:k+1])``. A block depends on the message, the one before it and whether that one is a sampled turn
which ended itself; nothing that was rendered or sampled is rewritten. Text never becomes a special token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from infra.chat.messages import Message, Tool
from infra.chat.reading import ParsedTurn


class Renderer(Protocol):
    @property
    def family(self) -> str: ...

    @property
    def vocab_size(self) -> int:
        """Ids that the tokenizer has."""
        ...

    @property
    def im_end(self) -> int:
        """The id with which the policy ends its turn."""
        ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...

    @property
    def template(self) -> str:
        """Source of the chat template that renders the same conversations elsewhere."""
        ...

    def root(self, system: Message | None, tools: Sequence[Tool]) -> list[int]:
        """The block that opens a conversation. It may be long (tool schemas): callers keep it."""
        ...

    def message(self, previous: Message | None, message: Message, *, closed: bool = False) -> list[int]:
        """The block of ``message`` after ``previous``.

        ``previous`` is None at the very start only; after a root block that isn't empty it is a system message.
        ``closed``: the block before is a sampled turn that already ends with ``im_end``.
        """
        ...

    def generation_prompt(self, previous: Message | None, *, closed: bool = False) -> list[int]:
        """What stands between the last block and the first sampled token."""
        ...

    def text(self, text: str) -> list[int]:
        """Plain text to ids; special spellings included, no special id comes out."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text for people, special tokens spelled out."""
        ...

    def parse(self, output_ids: Sequence[int]) -> ParsedTurn:
        """Read a sampled turn."""
        ...
