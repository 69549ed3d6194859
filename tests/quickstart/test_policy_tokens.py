"""The policy's tokens: exact round trips, words that copy, and demonstrations that are what the proxy records."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.chat.messages import Message
from infra.chat.qwen3 import Qwen3Renderer
from infra.quickstart.demonstrations import TOOLS, demonstrate
from infra.quickstart.tasks import FAMILIES, WORDS, Family, make_task
from infra.quickstart.tokenizer import SPECIAL_TOKENS, train_tokenizer
from infra.quickstart.warm_start import encode


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Qwen3Renderer:
    file: Path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer().save(str(file))
    return Qwen3Renderer(file, compact_tools=True)


@given(text=st.text())
def test_any_text_comes_back_as_it_was(renderer: Qwen3Renderer, text: str) -> None:
    ids = renderer.text(text)
    assert renderer.tokenizer.decode(ids, skip_special_tokens=False) == text
    assert not set(ids) & set(range(len(SPECIAL_TOKENS)))


def test_text_that_spells_special_tokens_has_none(renderer: Qwen3Renderer) -> None:
    assert not set(renderer.text("".join(SPECIAL_TOKENS))) & set(range(len(SPECIAL_TOKENS)))


def test_the_tokenizer_is_reproducible() -> None:
    assert train_tokenizer(transcripts=200).to_str() == train_tokenizer(transcripts=200).to_str()


def test_a_word_has_one_token_wherever_it_stands(renderer: Qwen3Renderer) -> None:
    for word in WORDS:
        (token,) = renderer.text(word)
        for text in (
            f"Create `{word}.txt` with text `{word}`.",
            f'\n{{"name": "bash", "arguments": {{"command": "cat {word}.txt"}}}}\n',
            f'\n{{"name": "bash", "arguments": {{"command": "grep {word} *"}}}}\n',
            f'\n{{"name": "write_file", "arguments": {{"path": "{word}.txt", "content": "{word}"}}}}\n',
            f"next={word}",
            f"step {word}",
            f"oak.cfg:{word}={word}",
        ):
            assert renderer.text(text).count(token) == text.count(word), text


def test_a_turn_is_about_nine_tokens(renderer: Qwen3Renderer) -> None:
    demo = demonstrate(random.Random(0), make_task(random.Random(0), "chain"), mistake_rate=0.0)
    encoded = encode(renderer, demo.messages)
    assert sum(encoded.sampled) / (len(demo.messages) // 2) <= 9


@pytest.mark.parametrize("family", FAMILIES)
def test_a_demonstration_is_encoded_as_the_proxy_records_the_same_conversation(
    renderer: Qwen3Renderer, family: Family
) -> None:
    rng = random.Random(f"encode/{family}")
    for _ in range(20):
        messages = demonstrate(rng, make_task(rng, family), mistake_rate=0.3).messages
        encoded = encode(renderer, messages)
        ids = renderer.root(None, TOOLS)
        sampled = [False] * len(ids)
        previous, closed = Message(role="system"), False
        for message in messages:
            if message.role == "assistant":
                (call,) = message.tool_calls
                context = renderer.generation_prompt(previous, closed=closed)
                body = json.dumps({"name": call.name, "arguments": json.loads(call.arguments)})
                output = [renderer.call_open, *renderer.text(f"\n{body}\n"), renderer.call_close, renderer.im_end]
                parsed = renderer.parse(output)
                assert (parsed.calls[0].name, parsed.calls[0].arguments) == (call.name, call.arguments)
            else:
                context, output = renderer.message(previous, message, closed=closed), []
            ids = ids + context + output
            sampled += [False] * len(context) + [True] * len(output)
            previous, closed = message, bool(output)
        assert list(encoded.ids) == ids
        assert list(encoded.sampled) == sampled
