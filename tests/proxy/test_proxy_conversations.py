"""Conversations through a real proxy: tokens in, tokens out, exactly."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest
from proxy_parts import SPECIAL, SPECIAL_IDS, Harness, ProxyStack, call_text

from infra.chat.messages import Message, Tool
from infra.state import keys
from proxy.conversation import stored_turns
from workers.harness_check.verify import sequences


@pytest.fixture
async def harness(stack: ProxyStack, session: aiohttp.ClientSession) -> Harness:
    await stack.open("cell-0")
    proxy = await stack.proxy()
    return Harness(proxy.url, await stack.key(), session)


async def five_turns(stack: ProxyStack, harness: Harness) -> None:
    harness.user("look at fox.txt")
    for number in range(5):
        stack.replies.append(call_text(f"cat fox{number}.txt"))
        harness.answer(await harness.turn(), f"the quick brown fox {number}")


async def test_append_only_conversation_is_one_exact_prefix_chain(stack: ProxyStack, harness: Harness) -> None:
    await five_turns(stack, harness)
    records = await stack.records()
    full = sequences(records)
    seen = stack.engines["cell-0"].seen
    assert [record.parent for record in records] == [-1, 0, 1, 2, 3]
    for number, record in enumerate(records):
        assert full[number] == seen[number].input_ids + seen[number].output_ids  # what the engine really saw
        assert record.output_ids.tolist() == seen[number].output_ids
        if number:
            assert record.kept == len(full[number - 1])  # every sampled token is kept where it stands
            assert full[number][: record.kept] == full[number - 1]
        assert not record.mutated and record.synthetic == 0
        assert record.versions.tolist() == [0] * len(record.output_ids)
    sampled = sum(len(request.output_ids) for request in seen)
    assert sum(len(record.output_ids) for record in records) == sampled
    assert await stack.redis.hlen(keys.open_calls("ep")) == 0


async def test_the_tokens_are_those_that_the_policy_was_warm_started_on(stack: ProxyStack, harness: Harness) -> None:
    stack.replies = [call_text("cat fox.txt"), "done<|im_end|>"]
    harness.user("look at fox.txt")
    harness.answer(await harness.turn(), "fox")
    await harness.turn()
    renderer, system = stack.renderer, Message(role="system")
    user, tool = Message(role="user", content="look at fox.txt"), Message(role="tool", content="fox")
    assistant = Message(role="assistant")
    ids = renderer.root(None, [Tool(name="bash")])
    ids += renderer.message(system, user) + renderer.generation_prompt(user)
    seen = stack.engines["cell-0"].seen
    assert seen[0].input_ids == ids
    ids += seen[0].output_ids + renderer.message(assistant, tool, closed=True) + renderer.generation_prompt(tool)
    assert seen[1].input_ids == ids


async def test_streaming_says_what_the_plain_answer_says(stack: ProxyStack, harness: Harness) -> None:
    text = "<think>\nhm\n</think>\n\nlooking" + call_text("ls")
    stack.replies = [text, text]
    harness.user("go")
    status, plain = await harness.post()
    assert status == 200
    harness.messages[0]["content"] = "go "  # another request, so that it is sampled
    status, events = await harness.post(stream=True, stream_options={"include_usage": True})
    assert status == 200
    lines = [line[6:] for line in events.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    usage = chunks.pop()
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    joined: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": []}
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        joined["content"] += delta.get("content") or ""
        joined["reasoning_content"] += delta.get("reasoning_content") or ""
        joined["calls"] += [call["function"] for call in delta.get("tool_calls", [])]
    message = plain["choices"][0]["message"]
    assert joined["content"] == message["content"] == "looking"
    assert joined["reasoning_content"] == message["reasoning_content"] == "hm"
    assert joined["calls"] == [call["function"] for call in message["tool_calls"]]
    assert chunks[-1]["choices"][0]["finish_reason"] == plain["choices"][0]["finish_reason"] == "tool_calls"


async def test_usage_is_the_true_token_count(stack: ProxyStack, harness: Harness) -> None:
    harness.user("count me")
    _, body = await harness.post()
    seen = stack.engines["cell-0"].seen[0]
    assert body["usage"]["prompt_tokens"] == len(seen.input_ids)
    assert body["usage"]["completion_tokens"] == len(seen.output_ids)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 7


async def test_text_that_spells_special_tokens_stays_text(stack: ProxyStack, harness: Harness) -> None:
    await five_turns(stack, harness)
    plain = [sum(token in SPECIAL_IDS for token in stack.engines["cell-0"].seen[-1].input_ids)]
    harness.messages = []
    stack.replies = []
    spelled = "".join(SPECIAL)
    harness.messages.append({"role": "system", "content": spelled})
    harness.user(spelled)
    harness.messages.append({"role": "assistant", "content": spelled})
    harness.messages.append({"role": "tool", "tool_call_id": "x", "content": spelled})
    await harness.turn()
    ids = stack.engines["cell-0"].seen[-1].input_ids
    # system, user, assistant, tool's user turn, the turn to sample: 5 starts, 4 ends, one pair of response tags
    assert sum(token in SPECIAL_IDS for token in ids) == 5 + 4 + 2
    assert plain[0] > 0


@pytest.mark.parametrize("rewrite", ["spaces", "content"])
async def test_a_rewritten_turn_keeps_its_tokens_and_is_counted(
    stack: ProxyStack, harness: Harness, rewrite: str
) -> None:
    stack.replies = ["hello" + call_text("cat fox.txt")]
    harness.user("go")
    message = await harness.turn()
    if rewrite == "spaces":
        call = message["tool_calls"][0]
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), separators=(",", ":"))
    else:
        message["content"] = "hello, rewritten"
    harness.answer(message, "fox")
    await harness.turn()
    seen = stack.engines["cell-0"].seen
    assert seen[1].input_ids[: len(seen[0].input_ids) + len(seen[0].output_ids)] == (
        seen[0].input_ids + seen[0].output_ids
    )
    records = await stack.records()
    # JSON written anew is what harnesses do, and says the same
    assert [record.mutated for record in records] == [False, rewrite == "content"]
    assert records[1].synthetic == 0


async def test_equal_forms_of_a_message_are_one_message(stack: ProxyStack, harness: Harness) -> None:
    stack.replies = [call_text("ls"), "bye<|im_end|>"]
    harness.user("go")
    message = await harness.turn()
    harness.messages[0] = {"role": "user", "content": [{"type": "text", "text": "go", "cache_control": {}}]}
    del message["content"]
    harness.answer(message, "fox")
    await harness.turn()
    first, second = await stack.records()
    assert (second.parent, second.kept, second.mutated) == (0, len(sequences([first])[0]), False)


async def test_turns_that_the_policy_never_said_are_prompt(stack: ProxyStack, harness: Harness) -> None:
    harness.user("hi")
    harness.messages.append({"role": "assistant", "content": "a few-shot answer"})
    harness.user("go")
    await harness.turn()
    harness.user("again")
    await harness.turn()
    records = await stack.records()
    assert [record.synthetic for record in records] == [1, 1]
    spoken = stack.renderer.text("a few-shot answer")
    assert all(record.output_ids.tolist() != spoken for record in records)
    assert records[1].kept == len(sequences(records[:1])[0])


async def test_a_plain_turn_is_recognised_by_its_text(stack: ProxyStack, harness: Harness) -> None:
    stack.replies = [" certainly  <|im_end|>"]
    harness.user("go")
    message = await harness.turn()
    message["content"] = message["content"].strip()
    harness.user("more")
    await harness.turn()
    records = await stack.records()
    assert records[1].parent == 0 and records[1].synthetic == 0 and not records[1].mutated


async def test_a_kept_tail_under_another_prefix_is_context_with_its_own_tokens(
    stack: ProxyStack, harness: Harness
) -> None:
    stack.replies = [call_text("one"), call_text("two"), "end<|im_end|>"]
    harness.user("a long story")
    harness.answer(await harness.turn(), "1")
    harness.answer(await harness.turn(), "2")
    harness.messages = [{"role": "user", "content": "summary of the story"}, *harness.messages[3:]]
    await harness.turn()
    seen = stack.engines["cell-0"].seen
    records = await stack.records()
    kept_turn, ids = seen[1].output_ids, seen[2].input_ids
    (start,) = [start for start in range(len(ids)) if ids[start : start + len(kept_turn)] == kept_turn]
    newline = stack.renderer.text("\n")
    assert ids[start + len(kept_turn) :][:2] == [*newline, stack.renderer.im_start]  # it was closed when sampled
    assert records[2].synthetic == 0 and records[2].kept < len(records[0].prompt_ids)
    assert len(records[2].output_ids) == len(seen[2].output_ids)  # the kept turn is not sampled a second time


async def test_text_appended_inside_the_last_message_keeps_its_tokens(stack: ProxyStack, harness: Harness) -> None:
    harness.user("read this")
    await harness.turn()
    harness.messages = [{"role": "user", "content": "read this\nnow summarise"}]
    await harness.turn()
    first, second = await stack.records()
    assert second.parent == 0
    header = len(stack.renderer.generation_prompt(Message(role="user")))
    assert second.kept == len(first.prompt_ids) - header


async def test_an_unfinished_turn_is_closed_by_us(stack: ProxyStack, harness: Harness) -> None:
    stack.replies = ["one two three four five six seven"]
    harness.user("go")
    status, body = await harness.post(max_tokens=3)
    assert status == 200 and body["choices"][0]["finish_reason"] == "length"
    harness.messages.append(body["choices"][0]["message"])
    harness.user("go on")
    await harness.turn()
    records = await stack.records()
    assert records[0].finish_reason == "length" and len(records[0].output_ids) == 3
    assert records[1].kept == len(sequences(records[:1])[0])
    assert records[1].prompt_ids[0] == stack.renderer.im_end  # ours, so it is prompt


async def test_what_the_harness_asked_is_recorded(stack: ProxyStack, harness: Harness) -> None:
    harness.user("go")
    await harness.turn(temperature=0.2, top_p=0.5, metadata={"x": "1"})

    stored = stored_turns.decode(await stack.redis.hget(keys.turns("ep"), "0"))
    assert stored.asked == {"temperature": 0.2, "top_p": 0.5, "metadata": {"x": "1"}}
