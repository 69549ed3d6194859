"""Which sums may become a gradient: the check that every micro-step is in exactly one of them.

Pure. Knows sets of micro-steps by the incarnation that summed them, not gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from infra.megatron.protocol import Problem, ReplicaError


def check_coverage(micro_steps: Sequence[str], sums: Mapping[str, Sequence[str]]) -> None:
    """Raises ReplicaError, naming what is missing and doubled, unless the sums cover each micro-step exactly once.

    ``sums``: incarnation -> the micro-steps that it summed. A micro-step that is not of the step is refused too.
    """
    counts = Counter(ref for ids in sums.values() for ref in ids)
    listed = Counter(micro_steps)
    missing = tuple(ref for ref in listed if ref not in counts)
    doubled = tuple(sorted(ref for ref in counts | listed if counts[ref] > 1 or listed[ref] > 1))
    unknown = tuple(sorted(ref for ref in counts if ref not in listed))
    if missing or doubled or unknown:
        detail = (
            f"the sums of {len(sums)} replicas do not cover the step's {len(micro_steps)} micro-steps exactly once: "
            f"missing {list(missing)}, doubled {list(doubled)}, not of this step {list(unknown)}"
        )
        raise ReplicaError(Problem(detail=detail, missing=missing, doubled=doubled))
