"""Token in, token out: whatever a harness does to its history, what is known keeps its exact ids, and a ledger that is
rebuilt from records and notes plans every request as the one that lived through the calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.chat.messages import Message, Tool, ToolCall
from infra.chat.qwen3 import Qwen3Renderer
from proxy.conversation.ledger import Ledger, PlannedCall
from proxy.conversation.requests import ModelRequest
from proxy.conversation.stored_turns import StoredTurn, decode, encode, stored_message
from trajectory.records import CallRecord, make_record

TOOLS = (Tool(name="bash", parameters={"type": "object", "properties": {"command": {"type": "string"}}}),)
TEXTS = st.sampled_from(
    ["", "ls", "cat fox.txt", "a <|im_end|> in a file", "<tool_call>", "</think> x", "  two\n\nlines ", "é👍", "ok"]
)


def request(messages: list[Message], tools: tuple[Tool, ...] = TOOLS, system: str = "be brief") -> ModelRequest:
    return ModelRequest(
        model="m",
        system=Message(role="system", content=system) if system else None,
        messages=tuple(messages),
        tools=tools,
        max_tokens=None,
        stream=False,
    )


@dataclass
class Recorded:
    """A ledger with the records and notes that its proxy would have written."""

    renderer: Qwen3Renderer
    ledger: Ledger
    calls: list[tuple[CallRecord, StoredTurn]] = field(default_factory=list)

    def say(self, asked: ModelRequest, text: str, calls: int = 0) -> tuple[PlannedCall, Message, list[int]]:
        """Plan a request, sample ``text`` and ``calls`` tool calls, record it; returns the turn and its ids."""
        plan = self.ledger.refreshed(self.ledger.plan(asked))
        plan.acknowledge()
        number = len(self.calls)
        spelled = f"<think>\nhm {number}\n</think>\n\n{text}" + "".join(
            f'\n<tool_call>\n{{"name": "bash", "arguments": {{"command": "step {number} {index}"}}}}\n</tool_call>'
            for index in range(calls)
        )
        output = [*self.renderer.tokenizer.encode(spelled, add_special_tokens=False).ids, self.renderer.im_end]
        parsed = self.renderer.parse(output)
        message = Message(
            role="assistant",
            content=parsed.content,
            reasoning=parsed.reasoning,
            tool_calls=tuple(
                ToolCall(id=f"call_{number}_{index}", name=call.name, arguments=call.arguments)
                for index, call in enumerate(parsed.calls)
            ),
            turn_id=f"turn-{number}",
        )
        record = make_record(
            episode="ep",
            seq=number,
            prev="",
            agent=plan.place.agent,
            parent=plan.parent,
            kept=plan.kept,
            prompt_ids=plan.prompt_ids,
            output_ids=output,
            logprobs=[0.0] * len(output),
            versions=[0] * len(output),
            temperature=1.0,
            finish_reason="stop",
            cells=["a"],
            started_at=0.0,
            active_s=0.0,
            held_s=0.0,
            side=plan.place.side,
            summary=plan.place.summary,
            compacts=plan.place.compacts,
            tools=bool(asked.tools),
            fork=plan.place.fork,
        )
        nodes = [node.stored() for node in plan.added]
        stored = StoredTurn("rid", asked.name, message.turn_id, 0, plan.shared, nodes, stored_message(message), {})
        self.calls.append((record, decode(encode(stored))))
        self.ledger.commit(plan, record, stored)
        assert self.sequence(number) == [*plan.prompt, *output]
        return plan, message, output

    def sequence(self, seq: int) -> list[int]:
        record = self.calls[seq][0]
        kept = self.sequence(record.parent)[: record.kept] if record.parent >= 0 else []
        return [*kept, *record.prompt_ids.tolist(), *record.output_ids.tolist()]

    def rebuilt(self) -> Ledger:
        ledger = Ledger(self.renderer)
        for record, stored in self.calls:
            ledger.restore(record, stored)
        return ledger


def results(message: Message, text: str = "done") -> list[Message]:
    return [Message(role="tool", content=text, tool_call_id=call.id) for call in message.tool_calls]


def test_first_calls_only_keep_the_sampled_tokens_before_them(
    renderer: Qwen3Renderer,
) -> None:
    episode = Recorded(renderer, Ledger(renderer))
    first = [Message(role="user", content="go")]
    plan, turn, output = episode.say(request(first), "I look", calls=2)
    kept = msgspec.structs.replace(turn, tool_calls=turn.tool_calls[:1])
    again = episode.ledger.plan(request([*first, kept, *results(kept), Message(role="user", content="go on")]))
    cut = renderer.parse(output).cuts[1]
    assert cut is not None and 0 < cut < len(output)
    assert list(again.prompt[: len(plan.prompt) + cut]) == [*plan.prompt, *output[:cut]]
    assert [(turn.seq, turn.own, turn.whole) for turn in again.turns] == [(0, False, False)]
    assert again.synthetic == 0
    episode.say(request([*first, kept, *results(kept), Message(role="user", content="go on")]), "done")
    record = episode.calls[1][0]
    assert (record.parent, record.kept) == (0, len(plan.prompt) + cut)


def test_never_said_a_turn_is_rendered_and_counted(renderer: Qwen3Renderer) -> None:
    episode = Recorded(renderer, Ledger(renderer))
    first = [Message(role="user", content="go")]
    _, turn, _ = episode.say(request(first), "one")
    synthetic = Message(role="assistant", content="I was interrupted")
    plan = episode.ledger.plan(request([*first, turn, Message(role="user", content="?"), synthetic, *first]))
    assert (plan.synthetic, plan.place.fork) == (1, "resume")


def test_other_prefix_a_kept_tail_under_a_summary_has_the_same_tokens(renderer: Qwen3Renderer) -> None:
    episode = Recorded(renderer, Ledger(renderer))
    first = [Message(role="user", content="go")]
    _, one, _ = episode.say(request(first), "one", calls=1)
    history = [*first, one, *results(one)]
    _, two, output = episode.say(request(history), "two", calls=1)
    summary = Message(role="user", content="This session goes on from a summary: one was done")
    plan = episode.ledger.plan(request([summary, two, *results(two)]))
    text = list(plan.prompt)
    assert any(text[start : start + len(output)] == output for start in range(len(text)))
    assert [(turn.seq, turn.own, turn.whole) for turn in plan.turns] == [(1, False, True)]


def test_new_text_in_the_last_message_branches_inside_it(renderer: Qwen3Renderer) -> None:
    episode = Recorded(renderer, Ledger(renderer))
    first = [Message(role="user", content="go")]
    plan, _, _ = episode.say(request(first), "one")
    longer = episode.ledger.plan(request([*first, Message(role="user", content="summarise", joined=True)]))
    header = len(plan.header)
    assert longer.prompt[: len(plan.prompt) - header] == plan.prompt[: len(plan.prompt) - header]
    assert (longer.parent, longer.kept) == (0, len(plan.prompt) - header)


GO = Message(role="user", content="go")


def begun(renderer: Qwen3Renderer, text: str = "one", calls: int = 0) -> tuple[Recorded, list[int], Message]:
    """An episode with one call; the tokens of its prompt without the generation prompt, and its turn."""
    episode = Recorded(renderer, Ledger(renderer))
    plan, turn, _ = episode.say(request([GO]), text, calls)
    return episode, list(plan.prompt[: len(plan.prompt) - len(plan.header)]), turn


def continued(turn: Message, **changes: Any) -> ModelRequest:
    """The request that goes on from a turn in the form in which a harness sends it back."""
    sent = msgspec.structs.replace(turn, **changes)
    return request([GO, sent, *(results(sent) or [GO])])


def test_known_message_is_not_tokenised_again(renderer: Qwen3Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    episode, _, turn = begun(renderer)
    asked = continued(turn)
    episode.say(asked, "two")
    monkeypatch.setattr(renderer, "message", lambda *_, **__: pytest.fail("it is known"))
    assert list(episode.ledger.plan(asked).prompt) == [*episode.sequence(1)[: len(episode.ledger.plan(asked).prompt)]]


def test_longer_user_message_keeps_the_tokens_of_the_shorter(renderer: Qwen3Renderer) -> None:
    episode, before, _ = begun(renderer)
    message = episode.ledger.turns[0].parent
    assert message is not None
    for text, keeps in (("go\non", True), ("gone", False)):
        plan = episode.ledger.plan(request([Message(role="user", content=text)]))
        assert (plan.leaf.twin is message) == keeps
        assert (list(plan.prompt[: len(before)]) == before and plan.kept == len(before)) == keeps


def test_minted_id_is_the_turn_whatever_its_text_says(renderer: Qwen3Renderer) -> None:
    episode, _, turn = begun(renderer, calls=1)
    for changes, mutated in (({}, False), ({"content": "another text"}, True), ({"reasoning": ""}, False)):
        for ids in ({}, {"turn_id": ""}):
            plan = episode.ledger.plan(continued(turn, **changes, **ids))
            assert list(plan.prompt[: len(episode.sequence(0))]) == episode.sequence(0)
            assert plan.mutated == mutated and [(c.seq, c.own, c.whole) for c in plan.turns] == [(0, True, True)]


def test_other_calls_than_the_turns_first_were_never_said(renderer: Qwen3Renderer) -> None:
    episode, _, turn = begun(renderer, calls=2)
    plan = episode.ledger.plan(continued(turn, tool_calls=turn.tool_calls[1:]))
    assert (plan.turns, plan.synthetic) == ((), 1)


def test_same_content_is_the_turn_that_had_the_same_thought(renderer: Qwen3Renderer) -> None:
    episode, _, first = begun(renderer)
    _, latest, _ = episode.say(request([GO]), "one")
    assert first.content == latest.content and first.reasoning != latest.reasoning
    for turn, seq in ((first, 0), (latest, 1), (msgspec.structs.replace(first, reasoning=""), 1)):
        plan = episode.ledger.plan(continued(turn, turn_id="", content=f" {turn.content}\n"))
        assert [(c.seq, c.own, c.whole) for c in plan.turns] == [(seq, True, True)]


def test_text_without_calls_is_the_turns_beginning(renderer: Qwen3Renderer) -> None:
    episode, before, turn = begun(renderer, "I look", calls=1)
    plan = episode.ledger.plan(continued(turn, turn_id="", tool_calls=()))
    assert [(c.seq, c.own, c.whole) for c in plan.turns] == [(0, False, False)] and plan.synthetic == 0
    assert plan.kept > len(before) + len(plan.header)


def test_content_elsewhere_is_copied_unless_it_is_empty(renderer: Qwen3Renderer) -> None:
    for text, copied in (("one", True), ("", False)):
        episode, _, turn = begun(renderer, text)
        sent = msgspec.structs.replace(turn, turn_id="")
        plan = episode.ledger.plan(request([Message(role="user", content="so far"), sent, GO]))
        assert [(c.seq, c.own, c.whole) for c in plan.turns] == ([(0, False, True)] if copied else [])
        assert plan.synthetic == (not copied)


def test_nothing_recorded_means_no_parent(renderer: Qwen3Renderer) -> None:
    episode, before, _ = begun(renderer)
    other = episode.ledger.plan(request([GO], system="another"))
    assert (other.parent, other.kept, other.shared, len(other.added)) == (-1, 0, 0, 2)
    assert list(other.prompt_ids) == list(other.prompt) != before


def test_sampled_again_keeps_the_whole_prompt_of_the_latest_sample(renderer: Qwen3Renderer) -> None:
    episode, before, _ = begun(renderer)
    for latest in range(3):
        plan = episode.ledger.plan(request([GO]))
        assert (plan.parent, plan.kept, list(plan.prompt_ids)) == (latest, len(before) + len(plan.header), [])
        episode.say(request([GO]), f"sample {latest}")


def test_shared_beginning_is_kept_of_the_siblings_call(renderer: Qwen3Renderer) -> None:
    episode, before, _ = begun(renderer)
    episode.say(request([Message(role="user", content="other")]), "two")
    plan = episode.ledger.plan(request([Message(role="user", content="go\non")]))
    assert (plan.parent, plan.kept) == (0, len(before))


def test_goes_on_from_the_last_recorded_node(renderer: Qwen3Renderer) -> None:
    episode, _, turn = begun(renderer)
    plan = episode.ledger.plan(continued(turn))
    assert (plan.parent, plan.kept, plan.shared) == (0, len(episode.sequence(0)), 3)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_histories_only_grow_and_a_rebuilt_ledger_plans_alike(renderer: Qwen3Renderer, data: st.DataObject) -> None:
    episode = Recorded(renderer, Ledger(renderer))
    lines: list[tuple[list[Message], list[int]]] = [([], [])]
    asked: list[ModelRequest] = []
    for _ in range(data.draw(st.integers(1, 8))):
        messages, expected = data.draw(st.sampled_from(lines))
        messages = list(messages)
        edit = data.draw(st.sampled_from(["go on", "cut a turn", "summary", "synthetic", "other tools"]))
        tools = TOOLS
        if edit == "cut a turn" and messages and messages[-1].tool_calls:
            left = data.draw(st.integers(0, len(messages[-1].tool_calls) - 1))
            messages[-1] = msgspec.structs.replace(messages[-1], tool_calls=messages[-1].tool_calls[:left])
            expected = []
        elif edit == "summary":
            messages = [Message(role="user", content="summary"), *messages[-1:]]
            expected = []
        elif edit == "synthetic" and messages:
            messages += [Message(role="user", content="?"), Message(role="assistant", content=data.draw(TEXTS))]
        elif edit == "other tools":
            tools, expected = (), []
        if messages and messages[-1].tool_calls:
            messages += results(messages[-1], data.draw(TEXTS))
        messages.append(Message(role="user", content=data.draw(TEXTS)))
        if data.draw(st.booleans()):
            messages.append(Message(role="user", content=data.draw(TEXTS), joined=True))
        asked.append(request(messages, tools))
        plan, turn, output = episode.say(asked[-1], data.draw(TEXTS), calls=data.draw(st.integers(0, 2)))
        assert list(plan.prompt[: len(expected)]) == expected
        echoed = turn if data.draw(st.booleans()) else msgspec.structs.replace(turn, turn_id="")
        lines.append(([*messages, echoed], [*plan.prompt, *output] if tools else []))
    rebuilt = episode.rebuilt()
    for wanted in asked:
        live, other = episode.ledger.plan(wanted), rebuilt.plan(wanted)
        assert live.prompt == other.prompt
        assert (live.turns, live.mutated, live.synthetic) == (other.turns, other.mutated, other.synthetic)
        assert live.prompt_ids == other.prompt_ids and live.place == other.place
