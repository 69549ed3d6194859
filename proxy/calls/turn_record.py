"""What a sampled call becomes: the turn that the harness gets, the record that training reads, and the note from which
a ledger is rebuilt.

It knows neither Redis nor HTTP nor engines.
"""

from __future__ import annotations

import secrets
from array import array
from dataclasses import dataclass

from infra.chat.messages import Message, ToolCall
from infra.chat.reading import ParsedTurn
from proxy.calls.episodes import Attempt, Episode
from proxy.calls.recorder import LeftCall
from proxy.calls.sampler import Job, Sampled
from proxy.conversation import turn_notes
from proxy.conversation.ledger import Delta, Plan
from proxy.conversation.lineage import Place
from proxy.conversation.requests import ModelRequest, Turn
from trajectory import records


@dataclass(frozen=True)
class Call:
    """A call while it runs."""

    episode: Episode
    attempt: Attempt
    name: bytes
    """Under which the attempt is found when the request is sent again."""
    request: ModelRequest
    plan: Plan
    place: Place
    job: Job
    left: LeftCall | None
    """The same call in another proxy, whose connection has closed."""
    started_at: float
    """Unix time in seconds."""


@dataclass(frozen=True)
class Said:
    """A sampled turn, read."""

    turn: Turn
    output_ids: array[int]
    malformed: int
    """Tool-call spans that are none."""


def turn_of(call: Call, sampled: Sampled, parsed: ParsedTurn) -> Said:
    """The turn as the harness gets it. Each tool call gets an unguessable id by which it is recognised."""
    output_ids = array("i", sampled.output_ids)
    finish = sampled.finish
    if finish == "length" and len(call.plan.prompt) + len(output_ids) >= call.job.key.context_limit:
        finish = "context"
    message = Message(
        role="assistant",
        content=parsed.content,
        reasoning=parsed.reasoning,
        tool_calls=tuple(
            ToolCall(id=f"call_{secrets.token_urlsafe(18)}", name=said.name, arguments=said.arguments)
            for said in parsed.calls
        ),
        turn_id=call.attempt.opening.turn_id,
    )
    turn = Turn(call.attempt.opening, message, finish, len(output_ids), sampled.cached_tokens)
    return Said(turn, output_ids, parsed.malformed)


def write(
    call: Call, plan: Plan, delta: Delta, sampled: Sampled, said: Said, *, kv_token_bytes: int = 0
) -> tuple[records.CallRecord, bytes, bytes]:
    """The call as the next one of its episode: its record, the record's bytes, and the bytes of its note."""
    turn = said.turn
    place = call.place
    record = records.make_record(
        episode=call.episode.name,
        seq=len(call.episode.ledger.turns),
        prev=call.episode.tail,
        agent=place.agent,
        parent=delta.parent,
        kept=delta.kept,
        prompt_ids=delta.prompt_ids,
        output_ids=sampled.output_ids,
        logprobs=sampled.logprobs,
        versions=sampled.versions,
        temperature=call.job.key.temperature,
        finish_reason=turn.finish_reason,
        cells=sampled.cells,
        started_at=call.started_at,
        active_s=sampled.active_s,
        held_s=sampled.held_s,
        side=place.side,
        summary=place.summary,
        compacts=place.compacts,
        tools=bool(call.request.tools),
        fork=place.fork,
        malformed=said.malformed,
        resampled=sampled.resampled,
        moved_tokens=sampled.moves.tokens,
        moved_from_store=sampled.moves.from_store,
        moved_recomputed=sampled.moves.recomputed,
        moved_bytes=sampled.moves.from_store * kv_token_bytes,
        mutated=plan.mutated,
        synthetic=plan.synthetic,
        partial=sum(not earlier.whole for earlier in plan.turns),
    )
    note = turn_notes.TurnNote(
        rid=call.attempt.rid,
        name=call.name,
        turn_id=turn.opening.turn_id,
        cached_tokens=turn.cached_tokens,
        depth=delta.depth,
        nodes=delta.notes,
        message=turn_notes.note_of(turn.message),
        asked=call.request.asked,
    )
    return record, records.encode(record), turn_notes.encode(note)
