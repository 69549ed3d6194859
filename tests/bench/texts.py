"""Text that looks like what coding agents see, and a tokenizer trained on it: both from Python's own sources.

The tokenizer is a byte-level BPE of 32,768 tokens with the split pattern of current models and the ChatML special
tokens, trained once and kept. Everything is deterministic: the same Python gives the same texts and the same tokenizer.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
VOCABULARY = 32_768
TRAINED_ON_BYTES = 6_000_000
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def sources() -> Iterator[tuple[str, str]]:
    """(name, text) of the standard library's files, without its tests."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library)
        if not {"test", "tests", "site-packages", "idlelib", "lib2to3"}.intersection(name.parts):
            text = path.read_bytes().decode("utf-8", errors="replace")
            if text:
                yield str(name), text


def tokenizer_file(folder: Path) -> Path:
    """The tokenizer's file, in a folder of its own as a policy's is, trained (a few seconds) unless it is there."""
    path = folder / f"tokenizer-{VOCABULARY}" / "tokenizer.json"
    if path.exists():
        return path
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated")
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, whole])
    tokenizer.decoder = decoders.ByteLevel()
    texts, size = [], 0
    for _, text in sources():
        texts.append(text)
        size += len(text)
        if size > TRAINED_ON_BYTES:
            break
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=VOCABULARY - len(SPECIAL) - len(MARKS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKS])
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    tokenizer.save(str(part))
    part.replace(path)
    return path


class ToolOutputs:
    """Endless tool outputs, each of the size that is asked for: files with line numbers, and between them test logs."""

    def __init__(self) -> None:
        self._files = cycle(sources())
        self._number = 0

    def next(self, characters: int) -> str:
        """The next output, of about so many characters."""
        text = ""
        while len(text) < characters:
            text += self._piece(characters - len(text)) + "\n"
        return text

    def _piece(self, characters: int) -> str:
        """Of one file, from its start; the same file comes again only after all others."""
        name, source = next(self._files)
        self._number += 1
        lines = source[:characters].splitlines()
        if self._number % 3 == 0:
            return _log(name, lines, self._number)[:characters]
        numbered = (f"{number + 1:6}\t{line}" for number, line in enumerate(lines))
        return f"$ cat -n {name}\n" + "\n".join(numbered)


def _log(name: str, lines: list[str], seed: int) -> str:
    """The log of a test run over a file."""
    words = [line.strip() for line in lines if line.strip()] or ["pass"]
    out = [f"============ test session starts: {name} ============"]
    for number, word in enumerate(words):
        stamp = (
            f"2024-05-{seed % 28 + 1:02} 12:{number % 60:02}:{(number * 7) % 60:02},{(number * 131 + seed) % 1000:03}"
        )
        out.append(f"{stamp} DEBUG {name}:{number + 1}: {word}")
        if number % 9 == 8:
            out.append(f"FAILED {name}::test_{number} - AssertionError: assert {json.dumps(word)} is None")
    return "\n".join(out)
