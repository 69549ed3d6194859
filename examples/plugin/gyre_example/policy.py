"""A scheduling policy: a pure function from what waits to which cells train.

It runs in workflow code too: no clock, no files, no randomness. `workflows/scheduling/policies.py` has the
invariants that every policy must keep.
"""

from __future__ import annotations

from workflows.scheduling.pool_view import Decision, PoolView, already_training, assign, oldest_training


def core_only(view: PoolView) -> Decision:
    """One cell trains the oldest step, as soon as the others can hold every episode that it waits for."""
    step = oldest_training(view)
    if step is None:
        return assign(view, None, 0, "core-only: no training step is open, all cells serve")
    unfinished = step.unfinished + sum(other.unfinished for other in view.steps if not other.train)
    room = view.capacity * (len(view.cells) - 1)
    trainers = max(already_training(view, step), int(unfinished <= room))
    reason = f"core-only: step {step.step}: {unfinished} episodes, room for {room} without the core"
    return assign(view, step, trainers, reason)
