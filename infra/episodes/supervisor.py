"""Owns the harness of one episode from start to end, and outlives the worker that started it.

    python3 -I -S -B supervisor.py SPEC.json

Invariants: while this process lives it holds the episode folder's lock, so the folder has one supervisor at most;
the harness runs only while the lease in Redis isn't another's; whatever ends the harness, ``exit.json`` says so
before the lease is given back; and when this process is killed the kernel kills the sandbox with it.

The budget is charged in active time: wall time less the time for which the gateway held the episode's calls. Redis
is asked for the held time only once the wall time alone would have spent the budget. Redis being away ends nothing:
only another holder, or a newer generation, does.

Standard library only, one file, cheap imports: one such process runs for every episode. It knows neither tasks nor
sandboxes: it is given a command line and, on ``status_fd``, told by the sandbox whether the program was started.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time

TYPE_CHECKING = False  # importing typing would cost as much as everything else here
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

CANCEL_POLL_S = 1.0
REDIS_TIMEOUT_S = 3.0
REDIS_RETRY_S = 0.5
START_DEADLINE_S = 300.0
CLOSING_DEADLINE_S = 10.0
TAIL_BYTES = 2000
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)

TAKE = """
local holder = redis.call('GET', KEYS[1])
local current = tonumber(redis.call('GET', KEYS[2]) or '0') or 0
local mine = tonumber(ARGV[3])
if current > mine then return current .. ':newer generation' end
local older = holder and (tonumber(string.match(holder, '^%d+')) or 0) < mine
if not holder or holder == ARGV[1] or holder == ARGV[4] or (older and ARGV[5] == 'force') then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
  if ARGV[5] ~= 'renew' and current < mine then redis.call('SET', KEYS[2], ARGV[3]) end
  return ARGV[1]
end
return holder
"""
"""Take, renew or take again; answers who holds the lease now. Whoever takes it shuts out older generations for good,
also those that find it free later."""

RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


class RedisAway(Exception):
    """Redis didn't answer, or answered with an error."""


class Redis:
    """One connection, made again when it breaks. Every command answers or raises RedisAway."""

    def __init__(self, where: dict[str, Any]) -> None:
        self._where = where
        self._socket: socket.socket | None = None

    def call(self, *arguments: str) -> Any:
        try:
            if self._socket is None:
                self._connect()
            return self._exchange(arguments)
        except (OSError, ValueError) as error:
            self._close()
            raise RedisAway(f"{type(error).__name__}: {error}") from error

    def _connect(self) -> None:
        where = self._where
        if where.get("path"):
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.settimeout(REDIS_TIMEOUT_S)
            self._socket.connect(where["path"])
        else:
            self._socket = socket.create_connection((where["host"], where["port"]), timeout=REDIS_TIMEOUT_S)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if where.get("tls"):
                import ssl

                self._socket = ssl.create_default_context().wrap_socket(self._socket, server_hostname=where["host"])
        self._file = self._socket.makefile("rb")
        if where.get("password"):
            self._exchange(("AUTH", *([where["username"]] if where.get("username") else []), where["password"]))
        if where.get("db"):
            self._exchange(("SELECT", str(where["db"])))

    def _exchange(self, arguments: tuple[str, ...]) -> Any:
        encoded = [argument.encode() for argument in arguments]
        parts = [b"*%d\r\n" % len(encoded), *(b"$%d\r\n%b\r\n" % (len(item), item) for item in encoded)]
        assert self._socket is not None
        self._socket.sendall(b"".join(parts))
        return self._reply()

    def _reply(self) -> Any:
        line = self._read(self._file.readline())
        kind, rest = line[:1], line[1:-2].decode()
        if kind == b"-":
            raise ValueError(rest)
        if kind in b"+:":
            return rest
        size = int(rest)
        if size < 0:
            return None
        if kind == b"*":
            return [self._reply() for _ in range(size)]
        return self._read(self._file.read(size + 2))[:-2].decode()

    @staticmethod
    def _read(data: bytes) -> bytes:
        if not data.endswith(b"\r\n"):
            raise ConnectionError("Redis closed the connection")
        return data

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None


class EpisodeOver(Exception):
    """The episode ends for a reason that isn't the harness's own. Attributes: reason, detail."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


class Supervisor:
    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.redis = Redis(spec["redis"])
        self.generation: int = spec["generation"]
        self.identity = f"{self.generation}:{os.getpid()}"
        self.pid, self.status = 0, -1
        """Of the harness: its process (0 before it is started) and its wait status (-1 while it runs)."""
        self.cpu_s = self.held_before = self.held_s = 0.0
        self.started = self.started_unix = self.ended = 0.0

    def run(self) -> None:
        _write("supervisor.json", {"pid": os.getpid(), "start": start_time(os.getpid()), "generation": self.generation})
        reason, detail = "exited", ""
        try:
            self._take_lease()
            if not self._retry(self._read_held_before, START_DEADLINE_S):
                raise EpisodeOver("failed_to_start", "Redis is away")
            status_reader = self._start()
            self._watch()
            if os.WIFEXITED(self.status) and not _was_started(status_reader):
                raise EpisodeOver("failed_to_start", _tail("harness.log"))
        except EpisodeOver as end:
            reason, detail = end.reason, end.detail
            if self.pid and self.status < 0:
                self._kill(0.0 if reason == "lease_lost" else self.spec["grace_s"])
        if self.pid:
            self._retry(self._read_held, CLOSING_DEADLINE_S)  # else it stays as last read
        wall_s = self.ended - self.started if self.pid else 0.0
        _write(
            "exit.json",
            {
                "reason": reason,
                "exit_code": os.waitstatus_to_exitcode(self.status) if self.pid else None,
                "wall_s": round(wall_s, 4),
                "held_s": round(min(self.held_s, wall_s), 4),
                "active_s": round(max(wall_s - self.held_s, 0.0), 4),
                "cpu_s": round(self.cpu_s, 4),
                "generation": self.generation,
                "detail": detail,
            },
        )
        try:
            self.redis.call("EVAL", RELEASE, "1", self.spec["lease_key"], self.identity)
        except RedisAway as away:
            print(f"the lease is left to run out: {away}", file=sys.stderr)

    def _take_lease(self) -> None:
        """Until the lease is ours. A holder of an older generation gets its TTL and the grace to go away."""
        patience = self.spec["lease_ttl_s"] + self.spec["grace_s"]
        start = time.monotonic()
        while True:
            waited = time.monotonic() - start
            try:
                holder = self._lease("force" if waited > patience else "take")
                if holder == self.identity:
                    return
                if waited > patience or _generation(holder) > self.generation:
                    raise EpisodeOver("lease_lost", f"the lease is held by {holder}")
            except RedisAway as away:
                if waited > START_DEADLINE_S:
                    raise EpisodeOver("failed_to_start", f"no lease without Redis: {away}") from away
            self._pause(REDIS_RETRY_S)

    def _lease(self, how: str) -> str:
        spec = self.spec
        ttl_ms = str(int(1000 * spec["lease_ttl_s"]))
        arguments = (self.identity, ttl_ms, str(self.generation), spec["supersedes"], how)
        return str(self.redis.call("EVAL", TAKE, "2", spec["lease_key"], spec["generation_key"], *arguments))

    def _start(self) -> int:
        """Start the sandboxed harness; returns the reading end of its status pipe."""
        spec = self.spec
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        # a resumed episode has the time behind it that the generations before took
        self.started, self.started_unix = time.monotonic() - spec["spent_s"], time.time()
        log = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        try:
            self.pid = os.posix_spawn(
                spec["argv"][0],
                spec["argv"],
                spec["environment"],
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, "harness.log", log, 0o644),
                    (os.POSIX_SPAWN_DUP2, 1, 2),
                    (os.POSIX_SPAWN_DUP2, writer, spec["status_fd"]),
                ],
                setpgroup=0,
                setsigmask=[],
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
            )
        except OSError as error:
            raise EpisodeOver("failed_to_start", f"{spec['argv'][0]}: {error}") from error
        finally:
            os.close(writer)
        return reader

    def _watch(self) -> None:
        """Returns when the harness has ended by itself; raises EpisodeOver when it must be ended."""
        spec = self.spec
        wall_end = self.started + spec["wall_limit_s"]
        renew = self.started + spec["lease_ttl_s"] / 3
        charge = self.started + spec["budget_s"]
        while self.status < 0:
            self._pause(min(renew, charge, wall_end) - time.monotonic())
            os.utime("supervisor.log")  # so that whoever resumes knows how long this one lived
            now = time.monotonic()
            if self.status >= 0:
                return
            if now >= wall_end:
                raise EpisodeOver("timed_out", "wall limit")
            if now >= renew:
                renew = now + self._renew()
            if now >= charge:
                charge = now + self._charge()

    def _renew(self) -> float:
        """Seconds until the lease is to be renewed again."""
        try:
            holder = self._lease("renew")
        except RedisAway:
            return REDIS_RETRY_S
        if holder != self.identity:
            raise EpisodeOver("lease_lost", f"the lease is held by {holder}")
        return float(self.spec["lease_ttl_s"]) / 3

    def _charge(self) -> float:
        """Seconds until the budget can be spent, at the earliest."""
        try:
            self._read_held()
        except RedisAway:
            return REDIS_RETRY_S
        left = self.spec["budget_s"] - (time.monotonic() - self.started - self.held_s)
        if left <= 0:
            raise EpisodeOver("timed_out", "budget")
        return float(max(left, 0.1))

    def _read_held_before(self) -> None:
        """What an earlier life was held for isn't this one's; what is resumed is the same life."""
        if self.spec["spent_s"]:
            return
        self.held_before = float(self.redis.call("GET", self.spec["held_key"]) or 0.0)

    def _read_held(self) -> None:
        """Seconds held since the harness started: of finished calls, and of those that are being held now."""
        held = float(self.redis.call("GET", self.spec["held_key"]) or 0.0) - self.held_before
        now = time.time()
        for since in self.redis.call("HVALS", self.spec["holding_key"]):
            held += max(0.0, now - max(float(since), self.started_unix))
        self.held_s = max(held, 0.0)

    def _retry(self, read: Callable[[], None], deadline_s: float) -> bool:
        """Whether ``read`` got its answer from Redis within the deadline."""
        start = time.monotonic()
        while True:
            try:
                read()
                return True
            except RedisAway as away:
                if time.monotonic() - start > deadline_s:
                    print(f"Redis is away: {away}", file=sys.stderr)
                    return False
                self._pause(REDIS_RETRY_S)

    def _pause(self, seconds: float) -> None:
        """Wait, at most a second. Notices that the harness has ended; raises EpisodeOver when told to cancel."""
        got = signal.sigtimedwait(SIGNALS, max(0.0, min(seconds, CANCEL_POLL_S)))
        self._reap()
        asked = got is not None and got.si_signo != signal.SIGCHLD
        if self.status < 0 and (asked or os.path.exists("cancel")):
            raise EpisodeOver("cancelled")

    def _reap(self, options: int = os.WNOHANG) -> None:
        if self.pid and self.status < 0:
            pid, status, usage = os.wait4(self.pid, options)
            if pid and not os.WIFSTOPPED(status):
                self.status, self.cpu_s = status, usage.ru_utime + usage.ru_stime
                self.ended = time.monotonic()

    def _kill(self, grace_s: float) -> None:
        """End the harness: politely, then by the sandbox's first process, with which the kernel ends the others."""
        inner = [process for child in _children(self.pid) for process in _children(child)]
        if inner and grace_s > 0:
            for process in inner:
                _signal(process, signal.SIGTERM)
            if self._ended_within(grace_s):
                return
        os.kill(self.pid, signal.SIGSTOP)  # it may be about to make that first process
        self._reap(os.WUNTRACED)
        for process in _children(self.pid) or [self.pid]:
            _signal(process, signal.SIGKILL)
        if self.status < 0:
            os.kill(self.pid, signal.SIGCONT)
        while not self._ended_within(5.0):
            os.killpg(self.pid, signal.SIGKILL)

    def _ended_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.status < 0 and (left := deadline - time.monotonic()) > 0:
            signal.sigtimedwait(SIGNALS, left)
            self._reap()
        return self.status >= 0


def _generation(holder: str) -> int:
    number = holder.partition(":")[0]
    return int(number) if number.isdigit() else 0


def _children(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as stream:
            return [int(child) for child in stream.read().split()]
    except OSError:
        return []


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def start_time(pid: int) -> int | None:
    """Start in clock ticks since boot (field 22 of /proc/PID/stat); None when it has ended, reaped or not.

    A pid alone names a process only until it is used again; with its start it names one for good.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stream:
            fields = stream.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _was_started(reader: int) -> bool:
    """Whether the sandbox reported the exit code of a program, rather than failing before there was one."""
    try:
        return b'"exit-code"' in os.read(reader, 65536)
    except BlockingIOError:
        return False


def _tail(file: str) -> str:
    with open(file, "rb") as stream:
        return stream.read()[-TAIL_BYTES:].decode("utf-8", "replace").strip()


def _write(file: str, value: dict[str, Any]) -> None:
    part = f"{file}.part"  # not synced: what a power cut takes, it takes together with the harness
    with open(part, "w", encoding="utf-8") as stream:
        json.dump(value, stream)
    os.replace(part, file)


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    with open(sys.argv[1], encoding="utf-8") as stream:
        spec = json.load(stream)
    os.set_inheritable(spec["lock_fd"], False)
    os.chdir(spec["folder"])
    Supervisor(spec).run()


if __name__ == "__main__":
    main()
