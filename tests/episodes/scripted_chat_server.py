"""A test double for the model gateway: OpenAI Chat Completions on a unix socket, with turns said in a fixed order."""

from __future__ import annotations

import json
import socketserver
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

Answer = dict[str, Any] | tuple[int, dict[str, Any]] | Callable[[], Any]


def call(name: str, **arguments: str) -> dict[str, Any]:
    """A turn with one tool call."""
    return raw_call(name, json.dumps(arguments))


def raw_call(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": f"call-{name}", "type": "function", "function": function}],
    }


def refusal(status: int, code: str, message: str = "no") -> tuple[int, dict[str, Any]]:
    return status, {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}


class ScriptedChatServer:
    """``script`` is worked through over all connections: a message, a (status, body), or something to call first.

    A callable may return such an answer, or None to close the connection without one. After the script's end every
    turn says "done." without a tool call.
    """

    def __init__(self, socket: Path, script: list[Answer]) -> None:
        self.socket, self.script = socket, list(script)
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.connections = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                outer.connections += 1
                super().setup()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.keys.append(self.headers["Authorization"])
                answer = outer._next(json.loads(body))
                if answer is None:
                    self.close_connection = True
                    return
                status, data = answer
                encoded = json.dumps(data).encode()
                head = (
                    f"HTTP/1.1 {status} OK\r\nContent-Type: application/json\r\nContent-Length: {len(encoded)}\r\n\r\n"
                )
                self.wfile.write(head.encode() + encoded)

            def address_string(self) -> str:
                return "sandbox"

            def log_message(self, format: str, *args: Any) -> None:
                return

        class Server(socketserver.ThreadingUnixStreamServer):
            daemon_threads = True
            request_queue_size = 64

        socket.parent.mkdir(parents=True, exist_ok=True)
        self._server = Server(str(socket), Handler)
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> ScriptedChatServer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self.socket.unlink(missing_ok=True)

    def tool_outputs(self) -> list[str]:
        """What the harness has told the model of its tools, at the last request."""
        return [message["content"] for message in self.requests[-1]["messages"] if message["role"] == "tool"]

    def _next(self, request: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
        with self._lock:
            self.requests.append(request)
            answer: Any = self.script.pop(0) if self.script else {"role": "assistant", "content": "done."}
        if callable(answer):
            answer = answer()
        if answer is None or isinstance(answer, tuple):
            return answer
        finish = "tool_calls" if answer.get("tool_calls") else "stop"
        return 200, {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": request["model"],
            "choices": [{"index": 0, "message": answer, "finish_reason": finish}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }
