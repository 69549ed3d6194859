"""One rank of a world of two that trains under several layouts, one after the other: ``layout_ranks.py RANK FOLDER``.

The folder holds ``jobs.json``, a list of jobs (see ``Job``), and their micro-steps; rank 0 writes each job's gradient,
and the weights after an update, beside them. A job's ``mutation`` breaks one of the sums over ranks on purpose.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANKS = 2


@dataclass(frozen=True)
class Job:
    name: str
    policy: str
    layout: dict[str, int]
    micro_steps: list[str]
    """Files, in order. With data-parallel ranks each takes every other."""
    mutation: str = ""


def run(job: Job, rank: int, folder: Path, store: Any) -> None:
    from safetensors.torch import save_file

    from infra.megatron.checkpoint import read_policy
    from infra.megatron.model.layout import Layout, end_world, start_world
    from infra.megatron.replica import Replica
    from trajectory.config import OptimizerConfig
    from trajectory.micro_step import MicroStep

    layout = Layout(**job.layout)
    start_world(layout, rank=rank, store=store)
    replica = Replica(Path(job.policy), OptimizerConfig(kind="sgd", lr=0.1, clip_grad=0.05))
    replica.load(read_policy(Path(job.policy)), 0)
    replica.begin(0)
    mine = job.micro_steps[rank :: layout.dp] if layout.dp > 1 else job.micro_steps
    undo = MUTATIONS[job.mutation](rank) if job.mutation else lambda: None
    stats = [replica.train(MicroStep.from_bytes((folder / name).read_bytes())) for name in mine]
    gradient = replica.gradient()
    again = replica.gradient()
    assert all(bool((gradient[name] == again[name]).all()) for name in gradient), "reading the sum changed it"
    undo()
    result = {"stats": stats}
    if not job.mutation:
        replica.add_gradient(gradient)  # as if another replica had the same sum
        result["norm"] = replica.update(7.0)
        weights = replica.weights()
    if rank == 0:
        save_file(gradient, folder / f"{job.name}.gradient")
        if not job.mutation:
            save_file(weights, folder / f"{job.name}.weights")
    (folder / f"{job.name}.{rank}.json").write_text(json.dumps(result))
    end_world()


def replace(owner: Any, name: str, value: Any) -> Callable[[], None]:
    plain = owner.__dict__[name]
    setattr(owner, name, value)
    return lambda: setattr(owner, name, plain)


def loss_counted_once_per_rank(_: int) -> Callable[[], None]:
    """The gradient of the gathered log-probs is summed over the context-parallel ranks, as of a usual all-reduce."""
    import torch.distributed as dist

    from infra.megatron.model import collectives
    from infra.megatron.model.layout import context_group

    def doubled(_: Any, grad: Any) -> Any:
        grad = grad.clone()
        dist.all_reduce(grad, group=context_group())
        return grad, None

    return replace(collectives.SumOfParts, "backward", staticmethod(doubled))


def keys_of_others_without_gradient(_: int) -> Callable[[], None]:
    """A rank keeps to itself what its queries say about the other ranks' keys and values."""
    from infra.megatron.model import attention

    def own(context: Any, grad: Any) -> Any:
        return grad.chunk(context.group.size())[context.group.rank()], None

    return replace(attention._GatherTokens, "backward", staticmethod(own))


def nothing_summed_over_ranks(_: int) -> Callable[[], None]:
    from infra.megatron import replica

    return replace(replica, "finalize_model_grads", lambda _: None)


def sums_over_ranks_twice(_: int) -> Callable[[], None]:
    from infra.megatron import replica

    plain = replica.finalize_model_grads

    def twice(models: Any) -> None:
        plain(models)
        plain(models)

    return replace(replica, "finalize_model_grads", twice)


def stage_gradient_doubled(_: int) -> Callable[[], None]:
    from infra.megatron.model import collectives

    plain = collectives.ToNextStage.__dict__["backward"].__func__

    def doubled(context: Any, grad: Any) -> Any:
        received, *rest = plain(context, grad)
        return (2 * received, *rest)

    return replace(collectives.ToNextStage, "backward", staticmethod(doubled))


MUTATIONS = {
    made.__name__: made
    for made in (
        loss_counted_once_per_rank,
        keys_of_others_without_gradient,
        nothing_summed_over_ranks,
        sums_over_ranks_twice,
        stage_gradient_doubled,
    )
}


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    import torch.distributed as dist

    store = dist.FileStore(str(folder / "store"), RANKS)
    for job in json.loads((folder / "jobs.json").read_text()):
        run(Job(**job), rank, folder, store)
    sys.stdout.flush()
    os._exit(0)  # without waiting for the other rank


if __name__ == "__main__":
    main()
