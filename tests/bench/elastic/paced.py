"""A scripted harness for the bench of scheduling: ``python3 -I -S -B paced.py``, with ``mini.py`` beside it.

It makes the turns that ``plan.json`` in the workspace gives its session: so many words of context, at most so many
sampled tokens, so many seconds of tool time. The tokens are sampled for real and stay in the conversation, but nothing
depends on what they say: an episode takes as long whatever the weights. The plan also says the reward, which the
task's verifier reads in ``reward.txt``.

Exit status: as mini's.
"""

from __future__ import annotations

import json
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from infra.harness import mini
else:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import mini  # its connection

PLAN_FILE = "plan.json"
REWARD_FILE = "reward.txt"


def words(known: list[str], count: int, seed: int) -> str:
    """``count`` of the words ``known``, drawn by a small generator (constants: Knuth, MMIX)."""
    drawn, state = [], seed
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        drawn.append(known[(state >> 33) % len(known)])
    return " ".join(drawn)


def run(server: mini.Server, model: str, plan: dict[str, Any], turns: list[tuple[int, int, float]], seed: int) -> None:
    """``turns``: words of context, sampled tokens at most, seconds of tool time after the answer."""
    messages: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for number, (length, tokens, tool_s) in enumerate(turns):
        text = words(plan["words"], length, seed + number)
        for call in calls:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
            text = "done"
        if not calls:
            messages.append({"role": "user", "content": text})
        message = server.complete({"model": model, "messages": messages, "max_tokens": tokens})
        calls = message.get("tool_calls") or []
        fields = ("role", "content", "reasoning_content", "tool_calls")
        messages.append({key: message[key] for key in fields if key in message})
        time.sleep(tool_s)


def main() -> int:
    try:
        server = mini.Server(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
        model = os.environ["OPENAI_MODEL"]
        with open(PLAN_FILE, encoding="utf-8") as stream:
            plan = json.load(stream)
        mine = plan["episodes"][plan["sessions"][os.environ["PACED_SESSION"]]]
    except (KeyError, ValueError, OSError) as error:
        print(f"paced: cannot start: {error!r}", file=sys.stderr)
        return 2
    try:
        run(server, model, plan, mine["turns"], mine["seed"])
    except mini.Refused as refusal:
        print(f"paced: status {refusal.status} {refusal.code}: {refusal.message}", file=sys.stderr)
        return 0 if refusal.out_of_room() else 3
    except mini.Unreachable as fault:
        print(f"paced: gave up after {mini.GIVE_UP_S:.0f} s: {fault}", file=sys.stderr)
        return 4
    mini.write_file(REWARD_FILE, str(mine["reward"]))
    return 0


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)
