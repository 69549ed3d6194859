"""Warm start: a minute of supervised learning on demonstrations, first clean ones, then mistaken ones.

The clean phase teaches the mechanics (call syntax, copying names), the mistaken phase leaves the policy knowing how
but often not doing it: a start from which reinforcement learning has everything to gain and something to reward.

Invariant: the demonstrations are encoded by the renderer that the proxy uses, block by block, so that the policy is
trained on the very ids it will meet; the number of optimizer steps and all draws are fixed by the recipe and the
seed, never by the clock. Only what the policy will sample itself is a target.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import Qwen3ForCausalLM

from infra.chat.messages import Message
from infra.chat.qwen3 import Qwen3Renderer
from infra.quickstart.demonstrations import TOOLS, demonstrate
from infra.quickstart.recipe import WarmStartRecipe
from infra.quickstart.tasks import make_task


@dataclass(frozen=True)
class EncodedDemo:
    """Token ids of a conversation and, for each, whether the policy sampled it (and is trained on it)."""

    ids: tuple[int, ...]
    sampled: tuple[bool, ...]


def encode(renderer: Qwen3Renderer, messages: Sequence[Message]) -> EncodedDemo:
    """Encode a conversation that ends with an assistant turn, as the proxy would have recorded it."""
    ids = renderer.root(None, TOOLS)
    sampled = [False] * len(ids)
    previous = Message(role="system")
    for message in messages:
        block = renderer.message(previous, message)
        opening = len(renderer.generation_prompt(previous)) if message.role == "assistant" else len(block)
        ids += block
        sampled += [False] * opening + [True] * (len(block) - opening)
        if previous.role == "assistant":  # the policy ends its turns itself: the block's first token is its last
            sampled[-len(block)] = True
        previous = message
    ids.append(renderer.im_end)
    sampled.append(True)
    return EncodedDemo(tuple(ids), tuple(sampled))


class DemoStream:
    """An endless, seeded supply of batches of demonstrations of about equal length."""

    POOL = 256

    def __init__(self, renderer: Qwen3Renderer, recipe: WarmStartRecipe, seed: int) -> None:
        self._renderer, self._recipe = renderer, recipe
        self._rng = random.Random(f"warm start/{seed}")
        self._pool: list[EncodedDemo] = []
        self._mistake_rate = math.nan

    def batch(self, mistake_rate: float) -> list[EncodedDemo]:
        if mistake_rate != self._mistake_rate:
            self._pool.clear()
            self._mistake_rate = mistake_rate
        while len(self._pool) < self.POOL:
            task = make_task(self._rng, self._rng.choice(self._recipe.families))
            messages = demonstrate(self._rng, task, mistake_rate=mistake_rate).messages
            self._pool.append(encode(self._renderer, messages))
        self._pool.sort(key=lambda demo: len(demo.ids))
        first = self._rng.randrange(len(self._pool))
        end = first + 1
        while end < len(self._pool) and len(self._pool[end].ids) * (end + 1 - first) <= self._recipe.tokens_per_step:
            end += 1
        taken = self._pool[first:end]
        del self._pool[first:end]
        return taken


def warm_start(
    model: Qwen3ForCausalLM,
    renderer: Qwen3Renderer,
    recipe: WarmStartRecipe,
    *,
    seed: int,
    progress: Callable[[int, float], None],
) -> None:
    """Train ``model`` in place; ``progress(step, mean loss of the last steps)`` is called every 50 steps."""
    stream = DemoStream(renderer, recipe, seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=recipe.weight_decay
    )
    losses: list[float] = []
    model.train()
    for step in range(recipe.steps):
        done = step / recipe.steps
        clean = done < recipe.clean_share
        batch = stream.batch(recipe.clean_mistakes if clean else recipe.mistakes)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * min(1.0, (done + 1e-3) / 0.05) * (1.0 - 0.9 * done)
        loss = _loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        if (step + 1) % 50 == 0 or step + 1 == recipe.steps:
            progress(step + 1, sum(losses) / len(losses))
            losses.clear()
    model.eval()


def _loss(model: Qwen3ForCausalLM, batch: Sequence[EncodedDemo]) -> torch.Tensor:
    """Mean cross-entropy over the sampled tokens, [] fp32; logits are computed only where they are targets."""
    width = max(len(demo.ids) for demo in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    sampled = torch.zeros(len(batch), width, dtype=torch.bool)
    for row, demo in enumerate(batch):
        ids[row, : len(demo.ids)] = torch.tensor(demo.ids)
        sampled[row, : len(demo.ids)] = torch.tensor(demo.sampled)
    hidden = model.model(ids, use_cache=False).last_hidden_state[:, :-1]
    targets = sampled[:, 1:]
    return F.cross_entropy(model.lm_head(hidden[targets]), ids[:, 1:][targets])
