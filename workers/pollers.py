"""Who asks Temporal for work on a task queue, and when each last did."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
from temporalio.client import Client


async def pollers(
    client: Client, queue: str, *, workflows: bool = False, within: timedelta | None = None
) -> dict[str, datetime]:
    """Identity (`pid@host`) of each worker that asked lately for activities, or for workflow tasks -> when."""
    kind = TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW if workflows else TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY
    request = DescribeTaskQueueRequest(
        namespace=client.namespace, task_queue=TaskQueue(name=queue), task_queue_type=kind
    )
    answer = await client.workflow_service.describe_task_queue(request, timeout=within)
    return {poller.identity: poller.last_access_time.ToDatetime(UTC) for poller in answer.pollers}
