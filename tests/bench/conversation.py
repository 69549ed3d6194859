"""A harness's side of one conversation, in the words of a dialect, as cheap as it can be.

Messages are encoded once and kept; a request is the join of them. So what the client costs hardly shows in what is
measured of the proxy, however long the conversation is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import orjson

TOOL_TEXT = "Run a shell command in the workspace and return what it prints."
SCHEMA = {
    "type": "object",
    "properties": {
        "command": {"type": "string", "description": "The command line"},
        "timeout": {"type": "integer", "description": "Seconds"},
    },
    "required": ["command"],
}
SYSTEM = (
    "You are a coding agent. You work in a git checkout, read before you write, run the tests, and stop when they "
    "pass. Use the shell for everything. "
) * 12


class Conversation(ABC):
    """Messages so far; ``body`` is the next request. After its answer came: ``take``, then ``answer``."""

    path: str

    def __init__(self, key: str, task: str) -> None:
        self.key = key
        self.messages: list[bytes] = []
        self.calls: list[str] = []
        """Ids of the tool calls that wait for their output."""
        self.texts: list[str] = []
        """Each message as a chat template would write it, for what re-rendering costs."""
        self.prompt_tokens = 0
        """Of the last request, as the usage says."""
        self.output_tokens = 0
        self._say({"role": "user", "content": task}, task)

    @property
    @abstractmethod
    def headers(self) -> dict[str, str]: ...

    @abstractmethod
    def body(self) -> bytes: ...

    @abstractmethod
    def take(self, answer: bytes) -> None:
        """Take over the turn of an answer."""

    @abstractmethod
    def answer(self, output: str) -> None:
        """The outputs of the turn's tool calls."""

    def _say(self, message: dict[str, Any], text: str) -> None:
        self.messages.append(orjson.dumps(message))
        self.texts.append(f"<|im_start|>{message['role']}\n{text}<|im_end|>\n")


def turn_text(reasoning: str, content: str, calls: list[tuple[str, str]]) -> str:
    """A turn as a chat template would write it."""
    thought = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    written = [f'<tool_call>\n{{"name": "{name}", "arguments": {given}}}\n</tool_call>' for name, given in calls]
    return "\n".join([thought + content, *written])


class ChatConversation(Conversation):
    """OpenAI Chat Completions."""

    path = "/v1/chat/completions"
    _head = orjson.dumps(
        {
            "model": "gyre-policy",
            "tools": [
                {"type": "function", "function": {"name": "bash", "description": TOOL_TEXT, "parameters": SCHEMA}}
            ],
        }
    )

    def __init__(self, key: str, task: str) -> None:
        super().__init__(key, task)
        self.messages.insert(0, orjson.dumps({"role": "system", "content": SYSTEM}))

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}", "content-type": "application/json"}

    def body(self) -> bytes:
        return self._head[:-1] + b',"messages":[' + b",".join(self.messages) + b"]}"

    def take(self, answer: bytes) -> None:
        body = orjson.loads(answer)
        message = body["choices"][0]["message"]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
        text = turn_text(message.get("reasoning_content") or "", message.get("content") or "", calls)
        self._say({name: value for name, value in message.items() if value is not None}, text)
        self.calls = [call["id"] for call in message.get("tool_calls") or []]
        self.prompt_tokens = body["usage"]["prompt_tokens"]
        self.output_tokens = body["usage"]["completion_tokens"]

    def answer(self, output: str) -> None:
        for call in self.calls:
            self._say({"role": "tool", "tool_call_id": call, "content": output}, output)


class AnthropicConversation(Conversation):
    """Anthropic Messages."""

    path = "/v1/messages"
    _head = orjson.dumps(
        {
            "model": "gyre-policy",
            "max_tokens": 8192,
            "system": [{"type": "text", "text": SYSTEM}],
            "tools": [{"name": "bash", "description": TOOL_TEXT, "input_schema": SCHEMA}],
        }
    )

    @property
    def headers(self) -> dict[str, str]:
        return {"x-api-key": self.key, "anthropic-version": "2023-06-01", "content-type": "application/json"}

    def body(self) -> bytes:
        return self._head[:-1] + b',"messages":[' + b",".join(self.messages) + b"]}"

    def take(self, answer: bytes) -> None:
        body = orjson.loads(answer)
        blocks = body["content"]
        thought = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
        text = "".join(block["text"] for block in blocks if block["type"] == "text")
        calls = [(block["name"], str(block["input"])) for block in blocks if block["type"] == "tool_use"]
        self._say({"role": "assistant", "content": blocks}, turn_text(thought, text, calls))
        self.calls = [block["id"] for block in body["content"] if block["type"] == "tool_use"]
        self.prompt_tokens = body["usage"]["input_tokens"]
        self.output_tokens = body["usage"]["output_tokens"]

    def answer(self, output: str) -> None:
        results = [{"type": "tool_result", "tool_use_id": call, "content": output} for call in self.calls]
        self._say({"role": "user", "content": results}, output * len(results))


DIALECTS: dict[str, type[Conversation]] = {"openai_chat": ChatConversation, "anthropic": AnthropicConversation}
