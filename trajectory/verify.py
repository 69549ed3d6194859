"""Provenance: every target token of a step's micro-steps is one position of one record, and no other target is.

This reads micro-steps and records and nothing that lies between them, so that it can find what went wrong there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trajectory.columns import Bool, Index
from trajectory.micro_step import MicroStep
from trajectory.records import CallRecord


class ProvenanceError(ValueError):
    """A target token that was not sampled as it claims, or is trained twice."""


@dataclass(frozen=True)
class Provenance:
    """What was checked."""

    micro_steps: int
    episodes: int
    calls: int
    """Records with at least one target."""
    targets: int
    """Target tokens, each one position of one record."""


def verify_provenance(micro_steps: Iterable[MicroStep], records: Mapping[str, Sequence[CallRecord]]) -> Provenance:
    """Check the targets of a step against the records of its episodes (by episode id, in ``seq`` order from 0).

    (episode, call, offset) must be unique over all micro-steps, and each target's id, behaviour log-prob (bits),
    version, temperature and position in its sequence those of the record. Raises ProvenanceError naming the first
    target for which that isn't so.
    """
    seen: dict[tuple[str, int], Bool] = {}
    count = 0
    for number, micro_step in enumerate(micro_steps):
        count += 1
        for trajectory in range(len(micro_step.kinds)):
            first, stop = micro_step.cu_seqlens[trajectory : trajectory + 2].tolist()
            episode = micro_step.episodes[micro_step.episode_index[trajectory]]
            where = f"micro-step {number}, trajectory {trajectory}, episode {episode}"
            if episode not in records:
                raise ProvenanceError(f"{where}: no records of this episode")
            entries = first + np.flatnonzero(micro_step.target[first:stop])
            calls = micro_step.call[entries]
            for call in np.unique(calls).tolist():
                if not 0 <= call < len(records[episode]):
                    raise ProvenanceError(f"{where}: target of call {call}, of which there is no record")
                record = records[episode][call]
                if (record.episode, record.seq) != (episode, call):
                    raise ProvenanceError(f"{where}: record {call} is call {record.seq} of episode {record.episode}")
                mine = entries[calls == call]
                used = seen.setdefault((episode, call), np.zeros(len(record.output_ids), np.bool_))
                begin = first - int(micro_step.prefix_len[trajectory])
                _check_call(micro_step, record, used, entries=mine, first=begin, where=f"{where}, call {call}")
    return Provenance(
        micro_steps=count,
        episodes=len({episode for episode, _ in seen}),
        calls=len(seen),
        targets=sum(int(used.sum()) for used in seen.values()),
    )


def _check_call(
    micro_step: MicroStep, record: CallRecord, used: Bool, *, entries: Index, first: int, where: str
) -> None:
    """Compare the targets of one call in one trajectory with its record, and mark their offsets as used.

    ``first``: where token 0 of the trajectory would be, if its tokens stood before ``entries`` without a gap.
    """
    offsets = micro_step.offset[entries]

    def refuse_where(wrong: Bool, why: str) -> None:
        if wrong.any():
            i = int(wrong.argmax())
            raise ProvenanceError(f"{where}, offset {offsets[i]} (token {entries[i]} of the micro-step): {why}")

    refuse_where((offsets < 0) | (offsets >= len(used)), f"the record has {len(used)} sampled tokens")
    again = np.ones(len(offsets), np.bool_)
    again[np.unique(offsets, return_index=True)[1]] = False
    refuse_where(again | used[offsets], "this sampled token is a target more than once")
    begin = record.kept + len(record.prompt_ids)
    checks = {
        "position": (entries - first, begin + offsets),
        "id": (micro_step.ids[entries], record.output_ids[offsets]),
        "log-prob": (micro_step.behaviour[entries], record.logprobs[offsets]),
        "version": (micro_step.version[entries], record.versions[offsets]),
        "temperature": (micro_step.temperature[entries], np.full(len(offsets), record.temperature, np.float32)),
    }
    for name, (claimed, recorded) in checks.items():
        refuse_where(claimed != recorded, f"the {name} is not the record's")
    used[offsets] = True
