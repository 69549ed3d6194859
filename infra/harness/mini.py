"""gyre's small coding agent: one file, standard library only, started as ``python3 -I -S -B mini.py``.

It speaks OpenAI Chat Completions, without streaming, over one kept-alive connection to ``OPENAI_BASE_URL`` with
``OPENAI_API_KEY`` and ``OPENAI_MODEL``; that is all it knows of its surroundings. The task is the text of
``/gyre/instruction.md``, or its arguments. Four tools (bash, write_file, edit_file, submit) work in the current
folder. ``MINI_MAX_TURNS`` (14) bounds the turns, ``MINI_TOOL_TIMEOUT`` (10) the seconds of a command.

The conversation is fixed: no system message, the task, then turns and tool results. Policies are warm-started on
exactly these texts, so a word changed here changes what they see.

Exit status: 0 submitted, nothing left to do, out of turns or out of context; 2 badly started; 3 the server refused
(its message on stderr); 4 the server could not be reached for ten minutes.

Only cheap modules are imported: an episode of a tiny policy costs little more than this process's start.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time

TYPE_CHECKING = False  # importing typing would cost more than the rest of this file
if TYPE_CHECKING:
    from typing import Any

INSTRUCTION_FILE = "/gyre/instruction.md"
OUTPUT_LIMIT = 160
OUTPUT_KEPT = 4096
READ_TIMEOUT_S = 600.0
GIVE_UP_S = 600.0
BACKOFF_S = (0.02, 10.0)
RETRIED = (408, 429)
OUT_OF_ROOM = ("context_length", "context length", "context limit", "context window", "call limit", "call_limit")


def _tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    _tool("bash", "Run a shell command and return its output.", command="The command line, for /bin/sh."),
    _tool("write_file", "Write a file, replacing what it held.", path="The file.", content="All of its content."),
    _tool(
        "edit_file",
        "Replace the first occurrence of a text in a file.",
        path="The file.",
        old="The text to replace, exactly as in the file.",
        new="The text to put in its place.",
    ),
    _tool("submit", "Say that the task is done."),
]


class Refused(Exception):
    """The server answered with a 4xx. Attributes: status, code, message."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message

    def out_of_room(self) -> bool:
        """Whether the context or the calls are used up: the end of the work, not a fault."""
        text = f"{self.code} {self.message}".lower()
        return self.status == 400 and any(words in text for words in OUT_OF_ROOM)


class Unreachable(Exception):
    """No answer for ten minutes."""


class Server:
    """One kept-alive HTTP/1.1 connection, made again when it breaks."""

    def __init__(self, base_url: str, api_key: str) -> None:
        scheme, _, rest = base_url.partition("://")
        if scheme != "http" or not rest:
            raise ValueError(f"OPENAI_BASE_URL must be an http:// URL, not {base_url!r}")
        self.authority, _, path = rest.partition("/")
        host, _, port = self.authority.partition(":")
        self.address = host, int(port or 80)
        self.path = f"/{path}".rstrip("/") + "/chat/completions"
        self.api_key = api_key
        self.connection: socket.socket | None = None
        self.buffer = b""

    def complete(self, body: dict[str, Any]) -> Any:
        """POST ``body`` until there is an answer; returns its first message. Raises Refused and Unreachable."""
        data = json.dumps(body).encode()
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: {self.authority}\r\nAuthorization: Bearer {self.api_key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        request = head.encode() + data
        failing_since, pause = None, BACKOFF_S[0]
        while True:
            try:
                status, answer = self._exchange(request)
                if status == 200:
                    return json.loads(answer)["choices"][0]["message"]
                fault = f"status {status}: {answer[:500].decode('utf-8', 'replace')}"
                if 400 <= status < 500 and status not in RETRIED:
                    raise Refused(status, *_error(answer))
            except (OSError, ValueError, LookupError, TypeError) as error:
                fault = f"{type(error).__name__}: {error}"
                self._drop()
            now = time.monotonic()
            failing_since = now if failing_since is None else failing_since
            if now - failing_since > GIVE_UP_S:
                raise Unreachable(fault)
            time.sleep(pause)
            pause = min(2 * pause, BACKOFF_S[1])

    def _exchange(self, request: bytes) -> tuple[int, bytes]:
        if self.connection is None:
            self.connection = socket.create_connection(self.address, timeout=10.0)
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connection.settimeout(READ_TIMEOUT_S)
        self.connection.sendall(request)
        status = 100
        headers: dict[bytes, bytes] = {}
        while status == 100:
            status = int(self._line().split(b" ", 2)[1])
            headers = {}
            while line := self._line():
                name, _, value = line.partition(b":")
                headers[name.strip().lower()] = value.strip()
        if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
            answer = b""
            while size := int(self._line().split(b";")[0], 16):
                answer += self._exactly(size)
                self._line()
            while self._line():
                pass
        else:
            answer = self._exactly(int(headers[b"content-length"]))
        if headers.get(b"connection", b"").lower() == b"close":
            self._drop()
        return status, answer

    def _line(self) -> bytes:
        while b"\r\n" not in self.buffer:
            self._receive()
        line, _, self.buffer = self.buffer.partition(b"\r\n")
        return line

    def _exactly(self, size: int) -> bytes:
        while len(self.buffer) < size:
            self._receive()
        data, self.buffer = self.buffer[:size], self.buffer[size:]
        return data

    def _receive(self) -> None:
        data = self.connection.recv(1 << 18) if self.connection is not None else b""
        if not data:
            raise ConnectionError("the server closed the connection")
        self.buffer += data

    def _drop(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self.connection, self.buffer = None, b""


def _error(answer: bytes) -> tuple[str, str]:
    """Code and message of an OpenAI error body, or of whatever else came."""
    try:
        error = json.loads(answer)["error"]
        return str(error.get("code") or ""), str(error.get("message") or "")
    except (ValueError, LookupError, TypeError, AttributeError):
        return "", answer[:500].decode("utf-8", "replace")


def bash(command: str, timeout_s: float) -> str:
    """Output of ``/bin/sh -c command``, stderr included; its whole group is killed when time is up.

    Returns when the shell ends: what it left in the background may go on, unread.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
    reader, writer = os.pipe()
    try:
        pid = os.posix_spawn(
            "/bin/sh",
            ["/bin/sh", "-c", command],
            environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, writer, 1),
                (os.POSIX_SPAWN_DUP2, writer, 2),
            ],
            setsid=True,
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # which Python ignores, and would bequeath
        )
    except ValueError:  # a NUL byte in the command
        os.close(reader)
        return "error: bad arguments"
    finally:
        os.close(writer)
    ended = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    poll.register(ended, select.POLLIN)
    os.set_blocking(reader, False)
    deadline = time.monotonic() + timeout_s
    output = b""
    while (left := deadline - time.monotonic()) > 0:
        ready = [descriptor for descriptor, _ in poll.poll(1000 * left)]
        if reader in ready:
            data = _read(reader)
            output = (output + data)[:OUTPUT_KEPT]
            if not data:
                poll.unregister(reader)  # every writer has gone, the shell is about to
        elif ended in ready:
            break
    else:
        os.killpg(pid, signal.SIGKILL)
        output = b"error: timeout"
    os.waitpid(pid, 0)
    os.close(ended)
    os.close(reader)
    return output.decode("utf-8", "replace")


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except BlockingIOError:
        return b""


def write_file(path: str, content: str) -> str:
    with open(path, "w", encoding="utf-8", newline="") as stream:
        stream.write(content)
    return "ok"


def edit_file(path: str, old: str, new: str) -> str:
    with open(path, encoding="utf-8", newline="") as stream:
        text = stream.read()
    if old not in text:
        return "error: old not found"
    return write_file(path, text.replace(old, new, 1))


def call_tool(name: str, arguments: str, timeout_s: float) -> str:
    """What the policy is told. Its own mistakes are answers, never faults."""
    known = {tool["function"]["name"]: tool["function"]["parameters"]["required"] for tool in TOOLS}
    if name not in known:
        return "error: unknown tool"
    try:
        given = json.loads(arguments)
    except (ValueError, TypeError):
        return "error: bad arguments"
    if not isinstance(given, dict) or not all(isinstance(given.get(key), str) for key in known[name]):
        return "error: bad arguments"
    try:
        if name == "bash":
            return bash(given["command"], timeout_s).rstrip("\n")[:OUTPUT_LIMIT]
        if name == "write_file":
            return write_file(given["path"], given["content"])
        return edit_file(given["path"], given["old"], given["new"])
    except FileNotFoundError:
        return "error: no such file"
    except (OSError, ValueError):  # a folder, no permission, a name with a NUL, a file that is no text
        return "error: cannot use file"


def run(server: Server, model: str, instruction: str, max_turns: int, timeout_s: float) -> None:
    """The conversation, to its end."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": instruction.strip()}]
    for _ in range(max_turns):
        turn = server.complete({"model": model, "messages": messages, "tools": TOOLS})
        calls = turn.get("tool_calls") or []
        if not calls:
            return
        messages.append(
            {key: turn[key] for key in ("role", "content", "reasoning_content", "tool_calls") if key in turn}
        )
        for call in calls:
            name = call["function"]["name"]
            if name == "submit":
                return
            content = call_tool(name, call["function"]["arguments"], timeout_s)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})


def main() -> int:
    try:
        server = Server(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
        model = os.environ["OPENAI_MODEL"]
        max_turns = int(os.environ.get("MINI_MAX_TURNS", "14"))
        timeout_s = float(os.environ.get("MINI_TOOL_TIMEOUT", "10"))
        instruction = " ".join(sys.argv[1:])
        if not instruction:
            with open(INSTRUCTION_FILE, encoding="utf-8") as stream:
                instruction = stream.read()
    except (KeyError, ValueError, OSError) as error:
        print(f"mini: cannot start: {error!r}", file=sys.stderr)
        return 2
    try:
        run(server, model, instruction, max_turns, timeout_s)
    except Refused as refusal:
        print(f"mini: status {refusal.status} {refusal.code}: {refusal.message}", file=sys.stderr)
        return 0 if refusal.out_of_room() else 3
    except Unreachable as fault:
        print(f"mini: gave up after {GIVE_UP_S:.0f} s: {fault}", file=sys.stderr)
        return 4
    return 0


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # nothing is left to tidy up; skipping the interpreter's own saves a millisecond
