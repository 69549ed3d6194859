"""The policy's tokenizer: byte-level BPE, trained on the quickstart's own transcripts.

Two choices carry the policy. The pre-tokenizer keeps what opens and closes a JSON tool call in one piece, so that a
turn is about nine tokens and the choice of a tool is one token. A word has the same token wherever it stands (no
leading blank where commands name it), so that naming a file is copying a token.

Invariant: any text is encoded and decoded back exactly; special tokens come only from structure.
It knows nothing of models or training.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from infra.chat.chatml import IM_END, IM_START, MARKS
from infra.chat.messages import Message
from infra.quickstart.demonstrations import TOOLS, demonstrate
from infra.quickstart.tasks import FAMILIES, make_task

END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END, *MARKS)

PIECES = (
    r'\n\{"name": "\w+", "arguments": \{(?:\}\}\n|"\w+": ")',  # opens a call, up to its first argument
    r'", "\w+": "',
    r'"\}\}\n',
    r"\b(?:cat|grep|sh|ls|step|want|got) ",  # the blank goes with the verb, not with the word after it
    r"\.\p{L}+",
    r" ?[\p{L}_]+",
    r"\p{N}",
    r' ?[^\s\p{L}\p{N}_"{}.`]+',
    r" ?`",
    r"\s+(?!\S)",
    r"\s",
    r".",
)

VOCABULARY = 640
"""Upper bound; training stops earlier when every pre-token of the transcripts is one token."""

TRANSCRIPTS = 3000


def train_tokenizer(*, transcripts: int = TRANSCRIPTS) -> Tokenizer:
    """Train on seeded transcripts of all task families; the same arguments give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("|".join(PIECES)), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    bpe_trainer: Callable[..., trainers.Trainer] = trainers.BpeTrainer  # untyped in the library
    trainer = bpe_trainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_blocks(transcripts), trainer)
    return tokenizer


def _blocks(transcripts: int) -> Iterator[str]:
    """The texts that the renderer will ask to encode, each on its own."""
    rng = random.Random("tokenizer")
    yield "Tools: " + ", ".join(tool.name for tool in TOOLS) + "."
    for index in range(transcripts):
        yield from ("system\n", "user\n", "user", "assistant\n", "\n")
        task = make_task(rng, FAMILIES[index % len(FAMILIES)])
        for message in demonstrate(rng, task, mistake_rate=0.2).messages:
            yield from _texts(message)


def _texts(message: Message) -> Iterator[str]:
    if message.content:
        yield message.content
    for call in message.tool_calls:
        yield f'\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n'
