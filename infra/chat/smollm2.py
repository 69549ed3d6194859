"""SmolLM2: ChatML whose vocabulary has turn marks only; tools, calls, results and thinking are spelled as text.

Invariant: as for Qwen3, but calls are read from the sampled text. What a tool prints is text as well, so it can spell
a mark; it can't end a turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from infra.chat.chatml import ChatML
from infra.chat.reading import ParsedTurn, read_turn
from infra.chat.tokens import Vocabulary


class SmolLM2Renderer(ChatML):
    family = "smollm2"

    def __init__(self, tokenizer_file: Path, *, compact_tools: bool = False) -> None:
        """Raises TokenizerUnfit when the tokenizer lacks the turn marks or isn't byte-level."""
        super().__init__(Vocabulary(tokenizer_file), str, compact_tools=compact_tools)

    def parse(self, output_ids: Sequence[int]) -> ParsedTurn:
        return read_turn(self.vocabulary.pieces(output_ids, self.im_end))
