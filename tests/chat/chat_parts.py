"""What the renderers' tests share: small tokenizers with the families' special tokens, and conversations of any mix."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from infra.chat.messages import Message, Tool, ToolCall
from infra.chat.renderer import Renderer

TURN_MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "user assistant system tool bash command cat fox.txt name arguments",
    'Let me look.\n\nDone!\n }}\n</tool_call>\n<tool_call>\n{"name": "bash", "arguments": {}}\n.\n\n',
    "the quick brown fox jumps; <|im_end|><think></think><tool_response>\r\n\t  été 漢字\n\n\n",
] * 20
SYSTEM = Message(role="system")


def write_tokenizer(folder: Path, *, qwen: bool) -> Path:
    """A byte-level BPE with Qwen3's pre-tokenizer and marks, or with SmolLM2's."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not qwen)
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level]) if qwen else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    special = TURN_MARKS + (MARKS if qwen else [])
    trainer = trainers.BpeTrainer(
        vocab_size=560,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def blocks(
    renderer: Renderer, system: Message | None, tools: Sequence[Tool], messages: Sequence[Message]
) -> list[list[int]]:
    """Root and messages, each block as the ledger would ask for it."""
    found = [renderer.root(system, tools)]
    previous = SYSTEM if found[0] else None
    for message in messages:
        found.append(renderer.message(previous, message))
        previous = message
    return found


any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
spelling_text = st.lists(
    st.sampled_from([*TURN_MARKS, *MARKS, "\n", "\n\n", " ", ".", "a", '{"', "é"]), max_size=6
).map("".join)
texts = st.one_of(any_text, spelling_text)
names = st.text(st.characters(categories=["L", "N"], include_characters="_-"), min_size=1, max_size=8)
arguments = st.sampled_from(['{"command": "ls\\n"}', "{}", '{"a": [1, {"b": "\\"<x>"}], "é": null}'])
calls = st.builds(ToolCall, id=st.just("c"), name=names, arguments=arguments)
tool_lists = st.lists(
    st.builds(Tool, name=names, description=any_text, parameters=st.just({"type": "object", "properties": {}})),
    max_size=2,
).map(tuple)


def messages_of(text: st.SearchStrategy[str], said: st.SearchStrategy[str] | None = None) -> st.SearchStrategy[Message]:
    """A message of any role. ``said``: what assistants say, if not any ``text``."""
    shown = st.builds(Message, role=st.sampled_from(["system", "user", "tool"]), content=text, joined=st.booleans())
    own = st.builds(
        Message,
        role=st.just("assistant"),
        content=text if said is None else said,
        reasoning=text,
        tool_calls=st.lists(calls, max_size=2).map(tuple),
    )
    return st.one_of(shown, own)
