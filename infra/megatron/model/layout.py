"""How many ranks a Megatron world has and what each of them holds, and the world's beginning and end.

One idea: the world of a process is begun once with a layout, and everything that is built afterwards reads the layout
from the world. Cells never share a world; what they exchange goes through the transfer engine. Knows nothing of models.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch.distributed as dist

from infra.megatron.model import cpu_shim

ON_CPU = cpu_shim.install()

from megatron.core import parallel_state  # noqa: E402 - the shim must be first
from megatron.core.tensor_parallel.random import initialize_rng_tracker  # noqa: E402


class UnsupportedLayout(ValueError):
    """A layout that does not exist, or that the policy's shape cannot be cut into."""


@dataclass(frozen=True)
class Layout:
    """The parallel sizes of one cell. Raises UnsupportedLayout where they do not fit together.

    Tensor, pipeline and context parallel ranks work on the same micro-step; pipeline stages take turns on it, so with
    pp of them each is idle for all but 1/pp of the time. Data-parallel ranks work on different ones; with experts
    spread over them (ep > 1) they must train equally many, since all of them compute a layer of experts together.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    """Ranks over which experts are spread; they are among the data-parallel ones."""
    dp: int = 1

    def __post_init__(self) -> None:
        if min(self.tp, self.pp, self.cp, self.ep, self.dp) < 1:
            raise UnsupportedLayout(f"{self}: sizes are positive")
        if self.dp % self.ep:
            raise UnsupportedLayout(f"{self}: experts are spread over data-parallel ranks, so ep must divide dp")
        if self.ep > 1 and self.tp > 1:
            raise UnsupportedLayout(f"{self}: Megatron combines ep and tp only with sequence parallelism, unused here")

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.cp * self.dp


@dataclass(frozen=True)
class RankPlace:
    """A layout and where this process is in it."""

    layout: Layout
    tp: int
    pp: int
    cp: int
    ep: int

    @property
    def first_stage(self) -> bool:
        return self.pp == 0

    @property
    def last_stage(self) -> bool:
        return self.pp == self.layout.pp - 1

    @classmethod
    def alone(cls) -> RankPlace:
        """The only rank of a world."""
        return cls(Layout(), 0, 0, 0, 0)

    @classmethod
    def here(cls) -> RankPlace:
        """This process's place in its world, which must have begun."""
        s = parallel_state
        layout = Layout(
            tp=s.get_tensor_model_parallel_world_size(),
            pp=s.get_pipeline_model_parallel_world_size(),
            cp=s.get_context_parallel_world_size(),
            ep=s.get_expert_model_parallel_world_size(),
            dp=s.get_data_parallel_world_size(),
        )
        return cls(
            layout,
            tp=s.get_tensor_model_parallel_rank(),
            pp=s.get_pipeline_model_parallel_rank(),
            cp=s.get_context_parallel_rank(),
            ep=s.get_expert_model_parallel_rank(),
        )


def start_world(layout: Layout | None = None, *, rank: int = 0, store: dist.Store | None = None) -> None:
    """Begin this process's world; without a layout and store, a world of one rank, unless one has begun.

    ``store`` is where the ranks of a cell meet. A world of one keeps it in memory, and gloo is bound to the loopback
    device: a cell of one rank opens no port to the network. A process whose world has ended (``end_world``) may begin
    another of as many ranks.
    """
    if layout is None and parallel_state.model_parallel_is_initialized():
        return
    layout = layout or Layout()
    if not dist.is_initialized():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend = "gloo" if ON_CPU else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=store or dist.HashStore(), rank=rank, world_size=layout.ranks)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
    )
    initialize_rng_tracker(inference_rng_tracker=True)  # nothing is random in training: dropout is zero


def end_world() -> None:
    """Forget the layout. The ranks stay connected."""
    parallel_state.destroy_model_parallel()


tensor_group = parallel_state.get_tensor_model_parallel_group
pipeline_group = parallel_state.get_pipeline_model_parallel_group
context_group = parallel_state.get_context_parallel_group
expert_group = parallel_state.get_expert_model_parallel_group
