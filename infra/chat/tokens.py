"""A tokenizer file as renderers need it: text that stays text, special ids by name, the bytes behind each id.

Invariant: ``text`` never yields the id of an added token, whatever the text spells; adjacent texts of one block are
encoded in one piece, as a tokenizer that gets the whole string would. It knows nothing of messages or templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

Part = str | int
"""Of a block: text, or the id of a special token."""


class TokenizerUnfit(ValueError):
    """The tokenizer lacks something that the renderer needs."""


class Vocabulary:
    def __init__(self, tokenizer_file: Path) -> None:
        """Raises TokenizerUnfit when text that spells an added token can't be kept apart from the token."""
        text = tokenizer_file.read_text(encoding="utf-8")
        described = json.loads(text)
        self.tokenizer = Tokenizer.from_str(text)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.added: dict[str, int] = {token["content"]: token["id"] for token in described["added_tokens"]}
        self._plain = Tokenizer.from_str(json.dumps(_without_added(described)))
        self.size = int(self.tokenizer.get_vocab_size(with_added_tokens=True))
        ids = set(self.added.values())
        leaking = next((token for token in self.added if ids.intersection(self.text(token))), None)
        if leaking is not None:
            raise TokenizerUnfit(f"text that spells {leaking!r} can't be told from the token in {tokenizer_file}")

    def text(self, text: str) -> list[int]:
        """Plain text to ids."""
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids

    def ids(self, parts: Iterable[Part]) -> list[int]:
        """A block to ids; texts that meet are encoded together."""
        ids: list[int] = []
        run: list[str] = []
        for part in parts:
            if isinstance(part, str):
                run.append(part)
                continue
            if run:
                ids += self.text("".join(run))
                run.clear()
            ids.append(part)
        return ids + self.text("".join(run)) if run else ids

    def structure(self, text: str) -> list[Part]:
        """Text of a template's own to parts: what spells an added token there is the token."""
        pieces = self._spellings.split(text)
        return [self.added.get(piece, piece) for piece in pieces if piece]

    def special(self, token: str) -> int:
        """Id of an added token. Raises TokenizerUnfit when there is none."""
        if token not in self.added:
            raise TokenizerUnfit(f"the tokenizer has no token {token!r}; the renderer needs it")
        return self.added[token]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def bytes_of(self, token_id: int) -> bytes:
        """What an id contributes to the decoded text; b"" for an id that the tokenizer doesn't have.

        Raises TokenizerUnfit for tokenizers that aren't byte-level.
        """
        known = self._bytes.get(token_id)
        if known is None:
            token = self.tokenizer.id_to_token(token_id) if token_id < self.size else None
            known = self._bytes[token_id] = b"" if token is None else bytes(map(self._byte_of.__getitem__, token))
        return known

    def pieces(self, output_ids: Sequence[int], end: int) -> list[bytes]:
        """The bytes of each sampled id, without the id that ends the turn."""
        sampled = output_ids[:-1] if output_ids and output_ids[-1] == end else output_ids
        return [self.bytes_of(token) for token in sampled]

    @cached_property
    def _spellings(self) -> re.Pattern[str]:
        longest_first = sorted(self.added, key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else re.compile("(?!)")

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        decoder = json.loads(self.tokenizer.to_str())["decoder"] or {}
        kinds = {decoder.get("type"), *(step.get("type") for step in decoder.get("decoders", ()))}
        if "ByteLevel" not in kinds:
            raise TokenizerUnfit("the tokenizer isn't byte-level; turns can't be cut at token boundaries with it")
        return _byte_characters()

    @cached_property
    def _bytes(self) -> dict[int, bytes]:
        return {token_id: token.encode() for token, token_id in self.added.items()}


def _without_added(described: dict[str, Any]) -> dict[str, Any]:
    plain = {**described, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    added = {token["content"] for token in described["added_tokens"]}
    if plain["model"].get("type") == "BPE":  # some models look whole words up before they merge
        vocabulary = {token: token_id for token, token_id in plain["model"]["vocab"].items() if token not in added}
        plain["model"] = {**plain["model"], "vocab": vocabulary}
    return plain


def _byte_characters() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 stands for itself, the rest for 256 and up, in order."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    return {chr(byte): byte for byte in visible} | {chr(256 + place): byte for place, byte in enumerate(hidden)}
