"""What a proxy keeps in Redis is read by the next version of it, and by the one before: its bytes don't change."""

from __future__ import annotations

import json
from array import array

import msgspec

from infra.chat.messages import Message, ToolCall
from proxy.calls.recorder import LeftCall, OpenCall
from proxy.conversation.stored_turns import StoredTurn, decode, encode, message_of, stored_message
from proxy.conversation.tree import Node
from proxy.dialects import openai_chat

CALLS = (ToolCall(id="call_a", name="bash", arguments='{"command": "ls"}'),)
TURN = Message("assistant", "I look", reasoning="hm", tool_calls=CALLS, turn_id="turn-0")
STORED = bytes.fromhex(
    "98a3726964c405006e616d65a67475726e2d30070293980cc0c404726f6f74c2c2c2ffc2981497a475736572a2676fa090a0c3a0c400c2c2c2"
    "ffc2981f97a9617373697374616e74a649206c6f6f6ba2686d9193a663616c6c5f61a462617368b17b22636f6d6d616e64223a20226c73227d"
    "a0c2a67475726e2d30c400c2c3c304c397a9617373697374616e74a649206c6f6f6ba2686d9193a663616c6c5f61a462617368b17b22636f6d"
    "6d616e64223a20226c73227da0c2a67475726e2d3081ab74656d7065726174757265cb3fe0000000000000"
)


def node(message: Message | None, key: bytes, end: int) -> Node:
    return Node(None, message, key, array("i"), end, 1)


def test_a_stored_turn_has_the_bytes_that_it_always_had() -> None:
    copy = node(TURN, b"", 31)
    copy.rewritten, copy.closed, copy.sampled_by, copy.partial = True, True, 4, True
    nodes = [node(None, b"root", 12), node(Message("user", "go", joined=True), b"", 20), copy]
    kept = [each.stored() for each in nodes]
    stored = StoredTurn("rid", b"\0name", "turn-0", 7, 2, kept, stored_message(TURN), {"temperature": 0.5})
    assert encode(stored) == STORED
    assert decode(STORED) == stored and message_of(stored.message) == TURN


def test_open_and_left_calls_have_the_json_that_they_always_had() -> None:
    opened = b'{"proxy":"p","cell":"cell-0","engine_rid":"rid.0","digest":"ab","since":1.5}'
    left = b'{"proxy":"p","turn_id":"turn-0","created":3,"prompt_tokens":20}'
    assert msgspec.json.encode(OpenCall("p", "cell-0", "rid.0", "ab", 1.5)) == opened
    assert msgspec.json.encode(LeftCall("p", "turn-0", 3, 20)) == left


def test_a_request_has_the_name_that_it_always_had() -> None:
    bash = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "go"}]
    body = {"model": "m", "messages": messages, "tools": [bash], "max_tokens": 5, "temperature": 0.5}
    request = openai_chat.parse(json.dumps(body).encode(), {})
    assert request.name.hex() == "005d50022e3cd00c8b792057c078fc6b26"
