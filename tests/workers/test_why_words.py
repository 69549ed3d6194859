"""`gyre why`, the pure part: a wait's words, its deadline, what is told together, and who isn't there to answer."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from temporalio.api.common.v1 import ActivityType
from temporalio.api.failure.v1 import Failure
from temporalio.api.history.v1 import (
    ActivityTaskCompletedEventAttributes,
    ActivityTaskFailedEventAttributes,
    ActivityTaskScheduledEventAttributes,
    ActivityTaskStartedEventAttributes,
    HistoryEvent,
)

from infra.state import keys
from tests.processes import free_port
from trajectory.records import make_record
from workers.why import episode_outcome as outcome
from workers.why.activity_waits import activity_wait, task_waits
from workers.why.episode_answer import path_of
from workers.why.episode_state import EpisodeState, SharedState, UnfinishedCall
from workers.why.episode_waits import Surroundings, episode_wait, why_held
from workers.why.temporal import Pending, QueueWorkers, WorkflowTask, process_state, queue_workers
from workers.why.wait import Wait, line, merged
from workflows.contracts.results import EpisodeExit, EpisodeResult, Outcome

NOW = datetime(2026, 3, 4, 12, 0, 0, tzinfo=UTC)
QUEUES = {
    "gyre.harness": QueueWorkers("gyre.harness", True, "worker 7@h"),
    "gyre.grade": QueueWorkers("gyre.grade", False, "no worker polls gyre.grade"),
}


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def running(**changes: Any) -> Pending:
    """An episode whose harness has run for 100 s."""
    fields: dict[str, Any] = {
        "workflow": "gyre/r/step/000001/g/002",
        "activity": "run_episode",
        "id": "ep-03",
        "queue": "gyre.harness",
        "state": "started",
        "scheduled": ago(110),
        "started": ago(100),
        "heartbeat": ago(1),
        "worker": "7@h",
        "start_to_close_s": 1500.0,
        "heartbeat_s": 30.0,
    }
    return Pending(**{**fields, **changes})


def around(**changes: Any) -> Surroundings:
    route = keys.Route(cell="c0", url="", incarnation="i", epoch=1, open=True, version=4)
    shared = SharedState(routes={"c0": route}, proxies=frozenset({"p1"}))
    fields: dict[str, Any] = {
        "now": NOW,
        "shared": shared,
        "queues": QUEUES,
        "hold_s": 3600.0,
        "budget_s": 300.0,
        "wall_s": 600.0,
    }
    return Surroundings(**{**fields, **changes})


# --- words --------------------------------------------------------------------------------------------------------


def test_a_wait_is_one_line_with_its_owner_its_reason_and_its_deadline() -> None:
    wait = Wait(what="run r", owner="gyre/r", reason="a claim", since=ago(30), deadline=ago(-90), ends="it is repeated")
    assert line(wait, NOW) == (
        "run r | gyre/r | a claim, since 11:59:30 (30 s) | by 12:01:30 (in 90 s): it is repeated"
    )


def test_a_wait_without_a_deadline_says_who_ends_it() -> None:
    wait = Wait(what="run r", owner="gyre/r", reason="paused", ends="a person (`gyre resume r`)")
    assert line(wait, NOW).endswith("| no deadline: a person (`gyre resume r`)")


def test_a_deadline_that_has_passed_is_told_as_such() -> None:
    wait = Wait(what="w", owner="o", reason="r", deadline=ago(86400), ends="it ends")
    assert "was due 2026-03-03 12:00:00 (24.0 h ago): it ends" in line(wait, NOW)


def test_many_that_wait_for_the_same_are_told_as_one_with_the_earliest_times() -> None:
    held = [
        Wait(
            what=f"episode {n}",
            owner=f"p{n % 2}",
            reason="held",
            ends="e",
            since=ago(n),
            deadline=ago(-n),
            kind="episode",
        )
        for n in range(1, 6)
    ]
    other = Wait(what="episode x", owner="p", reason="in a tool", ends="e", kind="episode")
    alone = Wait(what="step", owner="s", reason="held", ends="e")
    first, second, third = merged([held[0], other, *held[1:], alone])
    assert (first.what, first.owner, first.since, first.deadline) == ("5 episodes", "p0 and 1 more", ago(5), ago(-1))
    assert (second, third) == (other, alone)


# --- activities ---------------------------------------------------------------------------------------------------


def test_an_attempt_that_runs_ends_with_its_timeout() -> None:
    wait = activity_wait("episode e", running(activity="grade_episode"), QUEUES, NOW)
    assert (wait.deadline, wait.reason) == (ago(-1400), "its evaluator runs")
    assert wait.owner == "gyre/r/step/000001/g/002 · grade_episode ep-03 on gyre.harness, 7@h"


def test_a_worker_that_is_silent_is_given_up_with_its_heartbeat() -> None:
    wait = activity_wait("episode e", running(heartbeat=ago(20)), QUEUES, NOW)
    assert wait.deadline == ago(-10)
    assert "gives no sign of life" in wait.reason


def test_an_attempt_that_failed_says_why_and_when_the_next_begins() -> None:
    failed = running(state="scheduled", attempt=3, started=None, again=ago(-8), failure="LeaseHeld: 1:7 holds it")
    wait = activity_wait("episode e", failed, QUEUES, NOW)
    assert (wait.deadline, wait.ends) == (ago(-8), "attempt 3 begins")
    assert "attempt 2 of run_episode failed: LeaseHeld" in wait.reason


def test_a_queue_without_workers_is_told_instead_of_a_slot() -> None:
    wait = activity_wait("e", running(activity="grade_episode", queue="gyre.grade", state="scheduled"), QUEUES, NOW)
    assert wait.reason == "nobody works on gyre.grade: no worker polls gyre.grade"
    assert wait.deadline is None and "gyre up" in wait.ends


def test_an_order_to_a_cell_has_to_be_taken_in_time() -> None:
    order = running(activity="serve_rollout", queue="gyre.cell.c", state="scheduled", schedule_to_start_s=120.0)
    assert activity_wait("cell c", order, {}, NOW).deadline == ago(-10)


def test_a_workflow_that_nobody_runs_and_one_that_fails_are_told_and_a_young_task_is_not() -> None:
    away = QueueWorkers("gyre.control", False, "worker 7@h is dead")
    (waits,) = task_waits("run r", "gyre/r", WorkflowTask(1, ago(20), started=False), away, NOW)
    assert waits.reason == "nobody runs its code: worker 7@h is dead"
    (failing,) = task_waits("run r", "gyre/r", WorkflowTask(5, ago(20), started=True), away, NOW)
    assert "failed 4 times" in failing.reason
    assert task_waits("run r", "gyre/r", WorkflowTask(1, ago(1), started=True), away, NOW) == []


# --- episodes -----------------------------------------------------------------------------------------------------


def test_an_episode_in_a_held_call_waits_for_what_no_cell_gives_until_hold_or_wall_limit() -> None:
    state = EpisodeState(calls=4, holding={"p1.a": ago(50).timestamp()}, versions=(5, 6))
    wait = episode_wait("e", running(), state, around())
    assert wait.reason == "in a call that is held: no cell serves a version in [5, 6]: c0 serves 4"
    assert (wait.owner, wait.since, wait.detail) == ("proxy p1", ago(50), "4 calls so far")
    assert (wait.deadline, wait.ends) == (ago(-500), "its wall limit ends it")
    assert episode_wait("e", running(), state, around(hold_s=60.0)).deadline == ago(-10)


def test_a_call_that_runs_and_a_tool_are_told_apart_and_end_with_the_active_budget() -> None:
    call = EpisodeState(
        calls=1,
        held_s=40.0,
        opened={"p1.a": UnfinishedCall(proxy="p1", cell="c0", since=ago(5).timestamp())},
        lease="1:9",
    )
    wait = episode_wait("e", running(), call, around())
    assert (wait.reason, wait.since, wait.deadline) == ("in a call that c0 samples", ago(5), ago(-240))
    tool = EpisodeState(calls=1, last_end=ago(3).timestamp(), lease="1:9")
    wait = episode_wait("e", running(), tool, around())
    assert (wait.reason, wait.owner, wait.since) == ("in the harness or its tools", "supervisor 1:9", ago(3))
    assert (wait.deadline, wait.ends) == (ago(-200), "its active budget is spent")


def test_calls_of_a_proxy_that_died_wait_for_its_peers() -> None:
    state = EpisodeState(holding={"p9.a": ago(5).timestamp()})
    assert "a proxy that is gone" in episode_wait("e", running(), state, around()).reason


def test_a_queued_episode_waits_for_a_slot() -> None:
    wait = episode_wait("e", running(state="scheduled", started=None), None, around())
    assert wait.reason == "queued: every slot of the harness workers is taken"


def test_why_no_cell_takes_a_call() -> None:
    closed = keys.Route(cell="c1", url="", incarnation="i", epoch=1, open=False, version=4)
    assert why_held((0, 4), {}, {}) == "no cell has ever served"
    assert why_held((0, 4), {"c1": closed}, {"c1": "trains step 3"}) == "every route is closed: c1 trains step 3"
    opened = closed.model_copy(update={"open": True})
    assert why_held((0, 4), {"c1": opened}, {}) == "no room on c1"


# --- who answers --------------------------------------------------------------------------------------------------


def test_a_worker_that_is_stopped_or_dead_is_known_by_its_identity() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    identity = f"{process.pid}@{socket.gethostname()}"
    try:
        assert process_state(identity) == ""
        os.kill(process.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while not (stopped := process_state(identity)):
            assert time.monotonic() < deadline
        assert stopped == "is stopped by a signal"
        assert not queue_workers("q", {identity: NOW}, NOW).there
    finally:
        process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert process_state(identity) == "is dead", "before its parent has reaped it"
    process.wait()
    assert process_state(identity) == "is dead"
    assert process_state("1@elsewhere") == ""
    assert queue_workers("q", {}, NOW).words == "no worker polls q"
    assert not queue_workers("q", {"1@elsewhere": ago(300)}, NOW).there


# --- ends ---------------------------------------------------------------------------------------------------------


def result(ended_as: Outcome, reward: float | None, **changes: Any) -> EpisodeResult:
    exit_ = EpisodeExit(outcome=Outcome.COMPLETED, calls=2, gradeable=True, active_s=3.0, held_s=1.5, wall_s=4.5)
    return EpisodeResult(
        episode="r/000000/000/01", outcome=ended_as, reward=reward, exit=exit_.model_copy(update=changes), detail="boom"
    )


def test_an_evaluator_that_failed_excludes_and_says_how_the_harness_had_ended() -> None:
    failed = result(Outcome.EVALUATOR_FAILED, None, generation=2, restarts=["2026-03-04T12:00:00+00:00 generation 1 …"])
    told = "\n".join(outcome.reasons(failed, {"active_s": 60.0}))
    assert "evaluator_failed: boom" in told and "its harness before that: completed" in told
    assert "active 3.0 s of 60 s, held 1.5 s, wall 4.5 s" in told
    assert "started again once; generation 2 ended it" in told
    (standing,) = outcome.standing(failed, [None, 1.0], train=True)
    assert standing.startswith("excluded, never zero")


def test_a_group_whose_rewards_are_equal_is_said_to_give_no_gradient() -> None:
    counted = result(Outcome.COMPLETED, 0.5)
    assert "(no_variance)" in outcome.standing(counted, [0.5, 0.5, None], train=True)[1]
    assert "(too_few)" in outcome.standing(counted, [0.5, None], train=True)[1]
    assert len(outcome.standing(counted, [0.5, 1.0], train=True)) == 1
    assert "trains nothing" in outcome.standing(counted, [0.5], train=False)[0]


def test_the_timeline_has_the_calls_that_were_held_long() -> None:
    calls = [
        make_record(
            episode="e",
            seq=seq,
            prev="",
            agent="root",
            parent=seq - 1,
            kept=0,
            prompt_ids=[1],
            output_ids=[2],
            logprobs=[-1.0],
            versions=[0],
            temperature=1.0,
            finish_reason="stop",
            cells=["a", "b"] if seq == 1 else ["a"],
            started_at=100.0 * seq,
            active_s=1.0,
            held_s=12.0 if seq == 1 else 0.0,
        )
        for seq in range(3)
    ]
    told = [moment.text for moment in outcome.call_moments(calls)]
    assert told == ["first call", "call 1 is held 12.0 s (a → b)", "last call (2) has ended"]
    (line_,) = outcome.calls_made(calls)
    assert line_ == "3 calls, 1 moved between cells; the last, of the main agent, ended with `stop` on a at 00:03:21"


def test_attempts_and_failures_come_from_the_groups_history_and_siblings_are_left_out() -> None:
    scheduled = ActivityTaskScheduledEventAttributes
    failure = Failure(message="gone")

    def event(number: int, **attributes: Any) -> HistoryEvent:
        made = HistoryEvent(event_id=number, **attributes)
        made.event_time.FromDatetime(NOW + timedelta(seconds=number))
        return made

    def asked(number: int, name: str, activity_id: str) -> HistoryEvent:
        attributes = scheduled(activity_id=activity_id, activity_type=ActivityType(name=name))
        return event(number, activity_task_scheduled_event_attributes=attributes)

    events = [
        asked(1, "run_episode", "ep-01"),
        asked(2, "run_episode", "ep-02"),
        event(
            3,
            activity_task_started_event_attributes=ActivityTaskStartedEventAttributes(
                scheduled_event_id=1, identity="7@h", attempt=2, last_failure=failure
            ),
        ),
        event(4, activity_task_completed_event_attributes=ActivityTaskCompletedEventAttributes(scheduled_event_id=1)),
        event(5, activity_task_completed_event_attributes=ActivityTaskCompletedEventAttributes(scheduled_event_id=2)),
        asked(6, "grade_episode", "grade-01"),
        event(
            7,
            activity_task_failed_event_attributes=ActivityTaskFailedEventAttributes(
                scheduled_event_id=6, failure=failure
            ),
        ),
    ]
    assert [moment.text for moment in outcome.history_moments(events, 1)] == [
        "queued for a harness worker",
        "taken by worker 7@h, attempt 2 after gone",
        "its harness has ended",
        "queued for its evaluator",
        "its evaluator failed: gone",
    ]
    assert outcome.history_moments([*events, asked(8, "process_group", "9")], 3) == [], "there is no episode 3"


def test_a_generation_that_was_lost_is_in_the_timeline_at_its_time() -> None:
    (moment,) = outcome.restarted(
        ["2026-03-04T12:00:00+00:00 generation 1 was lost: killed; generation 2 starts from zero"]
    )
    assert moment.at == NOW and moment.text.startswith("generation 1 was lost")


@pytest.mark.parametrize("name", ["my-run/000003/002/01", "my-run/3/2/1", "my-run/3/2/1~2"])
def test_an_episode_is_named_with_or_without_leading_zeros(name: str) -> None:
    path = path_of(name)
    assert path is not None and path.episode == "my-run/000003/002/01"


@pytest.mark.parametrize("what", [[], ["r1"], ["r1/0"], ["r1/0/0/0"]])
def test_without_a_stack_it_says_how_to_start_one(tmp_path: Path, what: list[str]) -> None:
    settings = {"GYRE_HOME": str(tmp_path / ".gyre"), "GYRE_PORT_BASE": str(min(free_port(), 60000))}
    command = [str(Path(sys.executable).parent / "gyre"), "why", *what]
    done = subprocess.run(
        command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 2 and done.stdout == ""
    (said,) = done.stderr.strip().splitlines()
    assert said.startswith("gyre: ") and "gyre up" in said
