"""What makes the quickstart's policy: the parameters of its shape and warm start, and their digest.

Invariant: two recipes of the same digest make the same policy from the same seed on the same machine; the digest
covers the parameters and the source of every module that carries them out. Only light imports: whether a cached
policy can be used is known without torch.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from infra.quickstart.tasks import DEFAULT_FAMILIES, Family

CODE = (
    "chat/chatml.py",
    "chat/export.py",
    "chat/qwen3.py",
    "chat/templates/chatml.jinja",
    "chat/tokens.py",
    "quickstart/model.py",
    "quickstart/prepare.py",
    "quickstart/tokenizer.py",
    "quickstart/warm_start.py",
    "quickstart/tasks.py",
    "quickstart/demonstrations.py",
)
"""Relative to the package ``infra``."""


@dataclass(frozen=True)
class QuickstartShape:
    """A Qwen3 decoder with tied embeddings; every query head has its own key and value head."""

    hidden: int = 128
    layers: int = 2
    heads: int = 4
    intermediate: int = 256
    positions: int = 8192
    rope_theta: float = 1e4

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


@dataclass(frozen=True)
class WarmStartRecipe:
    steps: int = 550
    """Optimizer steps."""

    tokens_per_step: int = 2048
    """Padded tokens of one batch, at most."""

    clean_share: float = 0.6
    """Share of the steps on demonstrations with ``clean_mistakes``; the rest has ``mistakes``."""

    clean_mistakes: float = 0.05
    mistakes: float = 0.66
    """Probability of a mistake per turn; it sets the pass rate from which reinforcement learning starts."""

    learning_rate: float = 3e-3
    weight_decay: float = 0.05
    families: tuple[Family, ...] = (*DEFAULT_FAMILIES, "fix")


@dataclass(frozen=True)
class PolicyRecipe:
    version: int = 1
    shape: QuickstartShape = field(default_factory=QuickstartShape)
    warm_start: WarmStartRecipe = field(default_factory=WarmStartRecipe)

    def digest(self) -> str:
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode())
        package = Path(__file__).parents[1]
        for name in CODE:
            digest.update((package / name).read_bytes())
        return digest.hexdigest()
