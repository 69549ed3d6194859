"""What a sampled call becomes: the turn that the harness gets, the record that training reads, and the stored turn from
which a ledger is rebuilt.

It knows neither Redis nor HTTP nor engines.
"""

from __future__ import annotations

import secrets
from dataclasses import replace

from infra.chat.messages import Message, ToolCall
from infra.chat.reading import ParsedTurn
from proxy.calls.running_call import RunningCall
from proxy.conversation.ledger import PlannedCall
from proxy.conversation.requests import Turn
from proxy.conversation.stored_turns import StoredTurn, stored_message
from trajectory import records


def turn_of(call: RunningCall, parsed: ParsedTurn) -> Turn:
    """The turn as the harness gets it. Each tool call gets an unguessable id by which it is recognised."""
    output_tokens, head = len(call.output_ids), call.attempt.head
    finish = call.finish
    if finish == "length" and len(call.planned.prompt) + output_tokens >= call.key.context_limit:
        finish = "context"
    message = Message(
        role="assistant",
        content=parsed.content,
        reasoning=parsed.reasoning,
        tool_calls=tuple(
            ToolCall(id=f"call_{secrets.token_urlsafe(18)}", name=sampled.name, arguments=sampled.arguments)
            for sampled in parsed.calls
        ),
        turn_id=head.turn_id,
    )
    return replace(
        head, message=message, finish_reason=finish, output_tokens=output_tokens, cached_tokens=call.cached_tokens
    )


def record_of(
    call: RunningCall, planned: PlannedCall, turn: Turn, *, malformed: int, kv_token_bytes: int
) -> records.CallRecord:
    """The call as the next one of its episode. ``planned``: refreshed. ``malformed``: tool-call spans that are none."""
    place = planned.place
    return records.make_record(
        episode=call.episode.name,
        seq=len(call.episode.ledger.turns),
        prev=call.episode.tail,
        agent=place.agent,
        parent=planned.parent,
        kept=planned.kept,
        prompt_ids=planned.prompt_ids,
        output_ids=call.output_ids,
        logprobs=call.logprobs,
        versions=call.versions,
        temperature=call.key.temperature,
        finish_reason=turn.finish_reason,
        cells=call.cells,
        started_at=call.started_at,
        active_s=call.active_s,
        held_s=call.held_s,
        side=place.side,
        summary=place.summary,
        compacts=place.compacts,
        tools=bool(call.request.tools),
        fork=place.fork,
        malformed=malformed,
        resampled=call.resampled,
        mutated=planned.mutated,
        synthetic=planned.synthetic,
        partial=sum(not earlier.whole for earlier in planned.turns),
        **call.moved.figures(kv_token_bytes),
    )


def stored_turn(call: RunningCall, planned: PlannedCall, turn: Turn) -> StoredTurn:
    return StoredTurn(
        rid=call.attempt.rid,
        name=call.request.name,
        turn_id=turn.turn_id,
        cached_tokens=turn.cached_tokens,
        depth=planned.shared,
        nodes=[node.stored() for node in planned.added],
        message=stored_message(turn.message),
        asked=call.request.asked,
    )
