"""What installed packages add to gyre's losses and scheduling policies, loaded before anything depends on it."""

from __future__ import annotations

from trajectory.config import LOSS_NAMES
from workflows.contracts.configuration import POLICY_NAMES
from workflows.scheduling.policies import policy_named


def check_plugins() -> None:
    """Load all. Raises PluginError, naming the one that is broken or takes a name that is taken."""
    for name in LOSS_NAMES.plugins:
        from trajectory.loss import loss_named  # torch: only where a package adds a loss

        loss_named(name)
    for name in POLICY_NAMES.plugins:
        policy_named(name)
