"""Where a call belongs in its episode: whose it is, what it is for, and why it doesn't simply go on.

The conversation decides: which sampled turns a request contains, which tool call asked for it, which summary it opens
with. What the harness says of itself (``Hints``) decides only where that shows nothing; a contradiction is returned.

Invariant: ``place`` changes nothing. All that it needs comes from ``observe``, that is from records and stored turns:
a lineage that is rebuilt places every request as the one that lived through the calls.

Whose a request is, and what for; the first row that fits. `test_lineage.py` has a test of each row's name.

| row | what is seen: no sampled turn, and | what it is |
|---|---|---|
| `marked_side` | the harness says that it is no part of the work | a side call |
| `announced_summary` | in it the text of an announced summary | its window: `compaction` |
| `prompt_of_a_tool_call` | its prompt is an argument of a tool call without an agent | that sub-agent, as it is named |
| `unannounced_summary` | in it the text of a turn that nothing went on from | its window: `compaction` |
| `named_agent` | the harness names a sub-agent | that one |
| `prompt_of_another` | its prompt is that of a sub-agent | a sub-agent of that name |
| `unnamed_sub_agent` | the harness says that it is a sub-agent's | one named by the request |
| `rewritten_summary` | an announced summary has no window yet | its window: `compaction` |
| `alone_without_tools` | no tools, though the agents have some | a side call |
| `main_agent` | nothing of these | the main agent's |
| | **what is seen: sampled turns, and** | |
| `given_conversation` | a new sub-agent's prompt after the last of them | that sub-agent's |
| `goes_on` | the last is the latest of its line, whole and under its own prefix | "" |
| `kept_tail` | a summary after all of them opens it | its window: `compaction` |
| `asks_for_a_summary` | the harness says that it asks for one | `summary` |

Any other belongs to the agent of its last own turn, and forks:

| row | what is seen | `fork` |
|---|---|---|
| `first_of_its_agent` | nothing was said by that agent | `agent`; "" for the first call of all |
| `same_request` | the agent's latest request once more | `sample` |
| `other_answer` | it goes on from another answer to the latest request | `sample` |
| `turn_nobody_said` | a turn that the policy never said comes last | `resume` |
| `part_of_a_turn` | the last turn came back in part | `resume` |
| `changed_opening` | all turns are copies, up to the latest | `opening` |
| `turns_without_output` | what is missing said nothing | `dropped` |
| `unanswered_calls` | what is missing only called tools, and the user speaks | `dropped` |
| `unexplained` | nothing of these | `unexplained` |

An agent's calls make *threads*: the line of calls of one conversation, on through its compactions. Side calls and
summaries are no part of the line. Two agents with equal requests in flight may get one name, but never one thread.

It knows neither tokens nor how the turns of a request were recognised.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from infra.chat.messages import Message
from proxy.conversation.requests import Hints, ModelRequest
from proxy.conversation.sub_agents import TaskCall, TaskCalls, hinted_id, is_minted, task_call_of
from trajectory.kinds import ROOT_AGENT
from trajectory.records import CallRecord

SHORTEST: Final = 64
"""Characters from which a text is taken for a summary by its reappearance alone; hints make shorter ones acceptable."""
CANDIDATES: Final = 4
"""Latest turns of each agent that nothing went on from, kept as possible summaries."""


@dataclass(frozen=True)
class Continued:
    """A sampled turn on a request's path."""

    seq: int
    own: bool
    """Under the prefix under which it was sampled. False: a copy, after a compaction or with other tools."""
    whole: bool
    """False: it came back in part."""


@dataclass(frozen=True)
class Place:
    """What a record says of a call; see ``CallRecord`` for the fields."""

    agent: str
    side: bool
    summary: bool
    compacts: int
    fork: str
    disagreements: tuple[str, ...]
    """Where the harness says something else than the conversation shows: for people."""


@dataclass(frozen=True, slots=True)
class _PlacedCall:
    agent: str
    thread: int
    """-1 for side calls."""
    side: bool
    summary: bool
    name: bytes
    """Of its request: equal requests of an agent have equal names. b"" if unknown."""
    text: str
    called: bool
    """Its turn calls tools."""
    parent: int
    kept: int
    length: int


class Lineage:
    """The calls of one episode so far."""

    def __init__(self) -> None:
        self._calls: list[_PlacedCall] = []
        self._lines: list[list[int]] = []
        """Of each thread: its line of calls."""
        self._threads: dict[str, int] = {}
        """Each agent's latest thread."""
        self._tooled: set[str] = set()
        """Agents that were offered tools."""
        self._ids: dict[str, str] = {}
        """A harness's id of a sub-agent -> the agent."""
        self._loose: dict[str, list[int]] = {}
        """Of each agent: its latest calls that nothing went on from."""
        self._opened: set[int] = set()
        """Summaries with which a window has opened."""
        self._tasks = TaskCalls()
        self._announces = False
        """The harness marks its requests for summaries."""

    def place(
        self,
        request: ModelRequest,
        path: Sequence[Continued],
        synthetic_after: bool,
        *,
        running: Collection[str] = (),
    ) -> Place:
        """Where a request belongs, by the calls that were observed.

        ``path``: the sampled turns that it contains, in order. ``synthetic_after``: after the last of them stands an
        assistant turn that the policy never said. ``running``: agents of calls that are being sampled; the tool calls
        that started them have their agents.
        """
        hints = request.hints
        origin = self._calls[_origin(path).seq] if path else None
        side, summary, compacts = hints.side is True, hints.summary is True, -1
        disagreements: list[str] = []
        if origin is None:
            agent, compacts, side = self._new_root(request, running)
        elif (forked := self._forked(request)) is not None:
            agent, origin = forked, None
        else:
            agent, side = origin.agent, side or origin.side
            if self._goes_on(path, synthetic_after):
                if origin.summary and not summary:
                    disagreements.append(f"the line goes on from call {path[-1].seq}, which was announced as a summary")
            elif not side and not summary:
                compacts = self._summary_after(request, path, agent)
        if side:
            fork = "side"
        elif summary:
            fork = "summary"
        elif compacts >= 0 and compacts not in self._opened:
            fork = "compaction"
        elif origin is None and compacts < 0 and self._is_first(request, agent):
            fork = "agent" if self._calls or agent != ROOT_AGENT else ""
        else:
            thread = self._threads[agent] if origin is None else origin.thread
            thread = self._calls[compacts].thread if compacts >= 0 else thread
            fork = self._why(request, path, synthetic_after, thread=thread, since=compacts)
            if fork == "unexplained" and origin is None and task_call_of(agent) is not None:
                fork = "agent"  # one more agent with the same prompt than calls that ask for one
        if compacts >= 0 and self._announces and not self._calls[compacts].summary:
            disagreements.append(f"call {compacts} is the summary of this window, but was not announced as one")
        if side and hints.side is False:
            disagreements.append("the call stands alone without tools, but the harness says that it is no side call")
        named = self._agent_by_hints(hints, agent)
        if named != agent:
            disagreements.append(f"the conversation is that of {agent}, but the harness says {named}")
        return Place(agent, side, summary and not side, compacts, fork, tuple(disagreements))

    def observe(self, record: CallRecord, added: Sequence[Message], turn: Message, name: bytes = b"") -> None:
        """A call was recorded; calls come in the order of ``seq``.

        ``added``: the messages that it added to its parent's path. ``name``: ``ModelRequest.name``; without it, a
        request that is sampled once more isn't recognised as such.
        """
        self._tasks.answered(added)
        agent, base = record.agent, self._base(record)
        thread = -1 if record.side else self._thread(record)
        self._calls.append(
            _PlacedCall(
                agent=agent,
                thread=thread,
                side=record.side,
                summary=record.summary,
                name=name,
                text=turn.content,
                called=bool(turn.tool_calls),
                parent=record.parent,
                kept=record.kept,
                length=record.kept + (len(record.prompt_bytes) + len(record.output_bytes)) // 4,
            )
        )
        if record.side:
            return
        line = self._lines[thread]
        aside = record.summary or (record.fork != "" and not record.tools and agent in self._tooled)
        overtaken = record.fork == "" and line != [] and base < line[-1]  # placed before that one was recorded
        if not aside and not overtaken:
            line.append(record.seq)
        if base >= 0 and base in (loose := self._loose.get(self._calls[base].agent, [])):
            loose.remove(base)
        self._loose.setdefault(agent, []).append(record.seq)
        del self._loose[agent][:-CANDIDATES]
        if record.compacts >= 0:
            self._opened.add(record.compacts)
        if record.tools:
            self._tooled.add(agent)
        self._announces |= record.summary
        last = agent.rpartition("/")[2]
        if agent != ROOT_AGENT and not is_minted(last):
            self._ids[last] = agent
        self._tasks.observe(record.seq, agent, turn)

    def _base(self, record: CallRecord) -> int:
        """The last call whose whole sequence a call keeps, -1 for none."""
        call, kept = record.parent, record.kept
        while call >= 0 and kept < self._calls[call].length:
            kept = min(kept, self._calls[call].kept)
            call = self._calls[call].parent
        return call

    def _thread(self, record: CallRecord) -> int:
        """The thread of a recorded call, a new one if it opens one."""
        if record.fork == "agent" or record.agent not in self._threads:
            self._lines.append([])
            self._threads[record.agent] = len(self._lines) - 1
            return len(self._lines) - 1
        near = record.compacts if record.compacts >= 0 else record.parent
        if near >= 0 and self._calls[near].agent == record.agent and self._calls[near].thread >= 0:
            return self._calls[near].thread
        return self._threads[record.agent]

    def _goes_on(self, path: Sequence[Continued], synthetic_after: bool) -> bool:
        """Whether a request goes on from the latest call of its thread's line, or from one that was set aside since."""
        last = path[-1]
        if not last.own or not last.whole or synthetic_after:
            return False
        call = self._calls[last.seq]
        return call.side or last.seq >= self._head(call.thread)

    def _head(self, thread: int) -> int:
        line = self._lines[thread] if thread >= 0 else []
        return line[-1] if line else -1

    def _is_first(self, request: ModelRequest, agent: str) -> bool:
        """Whether an agent has said nothing yet, side calls that were not told as such aside."""
        thread = self._threads.get(agent, -1)
        return self._head(thread) < 0 or (bool(request.tools) and agent not in self._tooled)

    def _new_root(self, request: ModelRequest, running: Collection[str]) -> tuple[str, int, bool]:
        """Agent, summary and whether it is a side call, of a request without any sampled turn."""
        hints = request.hints
        asked, fresh = self._tasks.find(request.messages, running, late=hints.sub_agent is not False)
        named = self._named(hints, asked)
        if hints.side:
            return named or ROOT_AGENT, -1, True
        compacts = self._find_summary(request, -1, named, announced=True)
        if compacts < 0 and not fresh:
            compacts = self._find_summary(request, -1, named, announced=False)
        if compacts >= 0:
            return self._calls[compacts].agent, compacts, False
        if named is not None and named != ROOT_AGENT:
            return named, self._pending(request, named), False
        if asked is not None:
            return self._tasks.name(asked), -1, False
        if hints.sub_agent:
            return f"{ROOT_AGENT}/~{request.digest.hex()[:8]}", -1, False
        compacts = self._pending(request, named)
        if compacts >= 0:
            return self._calls[compacts].agent, compacts, False
        alone = not request.tools and bool(self._tooled) and hints.summary is not True
        return ROOT_AGENT, -1, alone

    def _forked(self, request: ModelRequest) -> str | None:
        """A new sub-agent that was given the conversation of the agent that started it."""
        id_ = hinted_id(request.hints.agent)
        if not id_ or id_ in self._ids:
            return None
        asked, _ = self._tasks.find(_after_last_turn(request.messages), ())
        return None if asked is None else self._named(request.hints, asked)

    def _named(self, hints: Hints, asked: TaskCall | None) -> str | None:
        """The agent that the harness names, None when it doesn't say. ``asked``: the call that seems to have started
        the agent."""
        id_ = hinted_id(hints.agent)
        if id_:
            parent = self._ids.get(hinted_id(hints.parent))
            if parent is None:
                parent = ROOT_AGENT if asked is None else self._tasks.asker(asked)
            return self._ids.get(id_, f"{parent}/{id_}")
        # A harness that names its sub-agents leaves only its main agent unnamed.
        main = hints.sub_agent is False or (hints.sub_agent is None and bool(self._ids))
        return ROOT_AGENT if main else None

    def _agent_by_hints(self, hints: Hints, agent: str) -> str:
        """The agent that the harness says outright; ``agent`` if it doesn't contradict that."""
        id_ = hinted_id(hints.agent)
        if id_:
            parent = self._ids.get(hinted_id(hints.parent))
            above, _, last = agent.rpartition("/")
            if last == id_:
                return agent if parent is None or above == parent else f"{parent}/{id_}"
            return self._ids.get(id_, id_)
        if hints.sub_agent is None or hints.sub_agent == (agent != ROOT_AGENT):
            return agent
        return "a sub-agent" if hints.sub_agent else ROOT_AGENT

    def _summary_after(self, request: ModelRequest, path: Sequence[Continued], agent: str) -> int:
        """The summary with which a request opens a window though it contains sampled turns, -1 for none: every one of
        those is older than it."""
        after = max(turn.seq for turn in path)
        for announced in (True, False):
            summary = self._find_summary(request, after, agent, announced=announced)
            if summary >= 0:
                return summary
        copies = not any(turn.own for turn in path)
        return self._pending(request, agent, after) if copies else -1

    def _find_summary(self, request: ModelRequest, after: int, agent: str | None, *, announced: bool) -> int:
        """The latest call after ``after`` whose text stands in what the user or the system says, -1 for none."""
        heard: str | None = None
        for seq in self._candidates(after, agent):
            call = self._calls[seq]
            if call.summary != announced or (not announced and self._tasks.finished(call.agent)):
                continue
            shortest = 1 if announced and self._lost_since(call.thread, seq) else SHORTEST
            for form in _forms(call.text):
                if len(form) < shortest:
                    continue
                if heard is None:
                    heard = "\n".join(_even(m.content) for m in request.messages if m.role in ("user", "system"))
                if form in heard:
                    return seq
        return -1

    def _pending(self, request: ModelRequest, agent: str | None, after: int = -1) -> int:
        """The announced summary that a new window must open with, though its text isn't there: harnesses may rewrite
        it. -1 for none, or for several."""
        if not request.tools and self._tooled:
            return -1
        pending = [
            seq
            for seq in self._candidates(after, agent)
            if self._calls[seq].summary and self._lost_since(self._calls[seq].thread, seq)
        ]
        return max(pending) if len({self._calls[seq].agent for seq in pending}) == 1 else -1

    def _candidates(self, after: int, agent: str | None) -> list[int]:
        """Possible summaries, latest first."""
        loose = self._loose.values() if agent is None else [self._loose.get(agent, [])]
        return sorted((seq for calls in loose for seq in calls if seq > after), reverse=True)

    def _lost_since(self, thread: int, seq: int, *, resumed: bool = False) -> bool:
        """Whether no call of the thread's line after ``seq`` said anything; harnesses drop such turns.

        ``resumed``: nor anything but tool calls, which a harness that was killed doesn't keep without an answer.
        """
        for later in reversed(self._lines[thread]):
            if later <= seq:
                break
            call = self._calls[later]
            if call.text.strip() or (call.called and not resumed):
                return False
        return True

    def _why(
        self, request: ModelRequest, path: Sequence[Continued], synthetic_after: bool, *, thread: int, since: int
    ) -> str:
        """The ``fork`` of a request that belongs to a thread with a line. ``since``: the summary that its window opens
        with."""
        if path and self._goes_on(path, synthetic_after):
            return ""
        head, last = self._head(thread), path[-1].seq if path else -1
        latest = self._calls[head] if head >= 0 else None
        if latest is not None and latest.name == request.name:
            return "sample"
        if latest is not None and 0 <= last < head and latest.name and latest.name == self._calls[last].name:
            return "sample"  # it goes on from the other one of two answers to the same request
        if synthetic_after or (path and not path[-1].whole):
            return "resume"
        if path and not any(turn.own for turn in path):
            # Copies: under another opening. What is asked about a part of the conversation, without tools, goes on from
            # no call of the line.
            asked_aside = not request.tools and latest is not None and latest.agent in self._tooled
            if last >= head or asked_aside:
                return "opening"
        resumed = request.messages[-1].role == "user"
        return "dropped" if self._lost_since(thread, max(last, since), resumed=resumed) else "unexplained"


def _origin(path: Sequence[Continued]) -> Continued:
    """The turn whose agent a request belongs to: the last of its own, else the last that was copied."""
    return next((turn for turn in reversed(path) if turn.own), path[-1])


def _after_last_turn(messages: Sequence[Message]) -> list[Message]:
    after: list[Message] = []
    for message in reversed(messages):
        if message.role == "assistant":
            break
        after.append(message)
    return after


def _forms(text: str) -> Iterator[str]:
    """What of a turn's text may stand in the next window, blanks evened out: the summary in it, all but the analysis,
    all of it."""
    inner = _between(text, "<summary>", "</summary>")
    start, end = text.find("<analysis>"), text.find("</analysis>")
    rest = text[:start] + text[end + len("</analysis>") :] if 0 <= start < end else text
    for form in dict.fromkeys(_even(part) for part in (inner, rest, text)):
        if form:
            yield form


def _even(text: str) -> str:
    return " ".join(text.split())


def _between(text: str, before: str, after: str) -> str:
    start = text.find(before)
    if start < 0:
        return ""
    start += len(before)
    end = text.rfind(after)
    return text[start:end] if end >= start else text[start:]
