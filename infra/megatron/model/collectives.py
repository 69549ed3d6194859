# mypy: disallow-subclassing-any=False
"""What ranks of one world say to each other inside a forward and backward pass, with the gradient each should get.

One idea: every rank computes the whole loss from the same log-probs, so a log-prob's gradient is known everywhere and
must not be summed again; what differs between ranks are activations, whose gradients are. Knows nothing of models.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class SumOfParts(torch.autograd.Function):
    """The sum over a group of tensors of which each rank filled its own part and left the rest zero.

    Backward hands the gradient on as it is: every rank computes the same loss from the sum, and takes of its gradient
    what belongs to its own part. Summing it over the ranks would count the loss once per rank.
    """

    @staticmethod
    def forward(_: Any, part: Tensor, group: Any) -> Tensor:
        whole = part.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(_: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class FromPreviousStage(torch.autograd.Function):
    """Activations of a shape from the previous pipeline stage; backward sends it their gradient.

    ``anchor``: any tensor that requires a gradient, so that backward is called; it gets none.
    """

    @staticmethod
    def forward(context: Any, anchor: Tensor, shape: tuple[int, ...], group: Any) -> Tensor:
        context.group = group
        received = torch.empty(shape, dtype=anchor.dtype, device=anchor.device)
        dist.recv(received, group=group, group_src=group.rank() - 1)
        return received

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[None, None, None]:
        dist.send(grad.contiguous(), group=context.group, group_dst=context.group.rank() - 1)
        return None, None, None


class ToNextStage(torch.autograd.Function):
    """Sends activations to the next pipeline stage and returns the log-probs [n] that the last stage made of them.

    Backward ignores the gradient of the log-probs, which the last stage has itself, and receives the activations'.
    """

    @staticmethod
    def forward(context: Any, activations: Tensor, tokens: int, dtype: torch.dtype, group: Any) -> Tensor:
        context.group, context.like = group, (activations.shape, activations.dtype, activations.device)
        dist.send(activations.detach().contiguous(), group=group, group_dst=group.rank() + 1)
        logprobs = torch.empty(tokens, dtype=dtype, device=activations.device)
        dist.broadcast(logprobs, group=group, group_src=group.size() - 1)
        return logprobs

    @staticmethod
    def backward(context: Any, _: Tensor) -> tuple[Tensor, None, None, None]:
        shape, dtype, device = context.like
        grad = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(grad, group=context.group, group_src=context.group.rank() + 1)
        return grad, None, None, None


def to_earlier_stages(logprobs: Tensor, group: Any) -> Tensor:
    """Give the last stage's log-probs to the other stages, which wait for them in ``ToNextStage``."""
    if group.size() > 1:
        dist.broadcast(logprobs.detach().clone(), group=group, group_src=group.size() - 1)
    return logprobs
