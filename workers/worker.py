"""One Temporal worker process: `python -m workers.worker --role control|harness|grade|trajectory|cell`.

A role is a task queue and the activities on it. The unix socket ``home/workers/NAME.sock`` answers once the worker
polls, which is how the stack knows that it is ready.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import timedelta
from typing import Any

from temporalio.worker import Worker

from activities.plugins import check_plugins
from activities.services import Services
from infra.settings import Settings
from infra.state.redis import redis_client
from infra.temporal import connect
from trajectory.plugins import PluginError
from workers.leaving import leave
from workflows import names
from workflows.cell import Cell
from workflows.group import Group
from workflows.run import Run
from workflows.scheduler import Scheduler
from workflows.step import Step

WORKFLOWS: Sequence[type] = (Run, Step, Group, Scheduler, Cell)
HEARTBEAT_THROTTLE = timedelta(seconds=2)
"""A cancelled activity hears of it this late at most; the SDK's default is a minute."""


def control_activities(services: Services) -> list[Callable[..., Any]]:
    from activities.cells import DrainActivities
    from activities.runs import RunActivities
    from activities.scheduling import SchedulingActivities

    scheduling, runs, drain = SchedulingActivities(services), RunActivities(services), DrainActivities(services)
    return [
        scheduling.open_step,
        scheduling.close_step,
        scheduling.await_turn,
        scheduling.watch_demand,
        scheduling.describe_steps,
        scheduling.run_status,
        runs.inspect_run,
        runs.commit_candidate,
        drain.drain_cell,
    ]


def cell_activities(services: Services, cell: str) -> list[Callable[..., Any]]:
    from activities.cells import CellActivities
    from activities.training import TrainingActivities

    cells, training = CellActivities(services, cell), TrainingActivities(services, cell)
    return [
        cells.serve_rollout,
        cells.prepare_training,
        cells.watch_cell,
        cells.reach_cell,
        training.train_micro_steps,
        training.offer_gradients,
        training.finish_step,
    ]


def build_worker(services: Services, role: str, cell: str = "") -> Worker:
    """The worker of a role. Raises ValueError for an unknown one."""
    workflows: Sequence[type] = ()
    concurrent = 32
    if role == "control":
        queue, activities, workflows = names.CONTROL_QUEUE, control_activities(services), WORKFLOWS
    elif role == "harness":
        from activities.episodes.run import EpisodeActivities

        queue, activities = names.HARNESS_QUEUE, [EpisodeActivities(services).run_episode]
        concurrent = services.settings.harness_slots
    elif role == "grade":
        from activities.episodes.grading import GradingActivities

        queue, activities, concurrent = names.GRADE_QUEUE, [GradingActivities(services).grade_episode], 4
    elif role == "trajectory":
        from activities.trajectories import TrajectoryActivities

        queue, activities, concurrent = names.TRAJECTORY_QUEUE, [TrajectoryActivities(services).process], 2
    elif role == "cell":
        queue, activities = names.cell_queue(cell), cell_activities(services, cell)
    else:
        raise ValueError(f"no worker role {role!r}")
    return Worker(
        services.temporal,
        task_queue=queue,
        workflows=workflows,
        activities=activities,
        max_concurrent_activities=concurrent,
        max_heartbeat_throttle_interval=HEARTBEAT_THROTTLE,
        default_heartbeat_throttle_interval=HEARTBEAT_THROTTLE,
        graceful_shutdown_timeout=timedelta(seconds=2),
    )


@contextlib.asynccontextmanager
async def ready_socket(settings: Settings, name: str) -> AsyncIterator[None]:
    path = settings.root / "workers" / f"{name}.sock"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    server = await asyncio.start_unix_server(lambda reader, writer: writer.close(), str(path))
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)


async def serve(settings: Settings, role: str, cell: str) -> None:
    check_plugins()  # before any workflow: what it calls must be loaded outside of the sandbox
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    metrics = settings.metrics_address if role == "control" else ""  # it alone knows a step's gauges
    async with redis_client(settings.redis) as redis:
        services = Services(settings, await connect(settings, metrics), redis)
        adopted: list[asyncio.Task[None]] = []
        if role == "harness":
            from activities.episodes.adoption import adopt, find_orphans

            adopted = [asyncio.create_task(adopt(services, find_orphans(settings)))]
        async with build_worker(services, role, cell), ready_socket(settings, f"{cell}-worker" if cell else role):
            await stop.wait()
        for task in adopted:
            task.cancel()
        await asyncio.gather(*adopted, return_exceptions=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="One Temporal worker of gyre.")
    parser.add_argument("--role", required=True)
    parser.add_argument("--cell", default="")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        asyncio.run(serve(Settings(), options.role, options.cell))
    except PluginError as error:
        raise SystemExit(f"gyre: {error}") from error
    leave(0)


if __name__ == "__main__":
    main()
