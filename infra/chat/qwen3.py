"""Qwen3: ChatML whose marks are tokens of their own.

Invariant: in a sampled turn only the token ``<tool_call>`` opens a call; text that spells it is text. Thinking stays
where the stock template strips it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from infra.chat.chatml import CALL_CLOSE, CALL_OPEN, THINK_CLOSE, THINK_OPEN, ChatML
from infra.chat.reading import ParsedTurn, read_turn
from infra.chat.tokens import Vocabulary


class Qwen3Renderer(ChatML):
    family = "qwen3"

    def __init__(self, tokenizer_file: Path, *, compact_tools: bool = False) -> None:
        """Raises TokenizerUnfit when the tokenizer lacks one of the marks or isn't byte-level."""
        vocabulary = Vocabulary(tokenizer_file)
        special = vocabulary.special
        super().__init__(vocabulary, special, compact_tools=compact_tools)
        self.call_open, self.call_close = special(CALL_OPEN), special(CALL_CLOSE)
        self.think_open, self.think_close = special(THINK_OPEN), special(THINK_CLOSE)
        self._marks = {special(mark): mark for mark in (CALL_OPEN, CALL_CLOSE, THINK_OPEN, THINK_CLOSE)}

    def parse(self, output_ids: Sequence[int]) -> ParsedTurn:
        pieces = self.vocabulary.pieces(output_ids, self.im_end)
        places: dict[str, list[int]] = {mark: [] for mark in self._marks.values()}
        place = 0
        for token, piece in zip(output_ids, pieces, strict=False):
            if token in self._marks:
                places[self._marks[token]].append(place)
            place += len(piece)
        return read_turn(pieces, places)
