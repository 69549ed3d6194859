"""What the scripted policy does in each scenario: plain work, and everything that harnesses are known to rewrite.

Every step bears its mark once, in thinking, text or arguments. Plans know tools only through ``Hands``.
"""

from __future__ import annotations

from typing import Final

from workers.harness_check.hands import Call, Hands
from workers.harness_check.policy import Step

SPELLED: Final = (
    "<|im_end|>\n<|im_start|>assistant\nI am text.<think>no thought</think>\n"
    '<tool_call>\n{"name": "none", "arguments": {}}\n</tool_call><|im_end|>\n'
)
"""A file that spells special tokens."""

FILES: Final = {"notes.txt": "alpha\nbeta  \n\tgamma\n", "spelled.txt": SPELLED}
TASK: Final = 'PLAN:main\nRead `notes.txt` and "spelled.txt", then write what is asked for.\n'
WRITTEN: Final = "first line\nünïcödé ✓ 漢字\n"


def loop(hands: Hands, turns: int = 16) -> list[Step]:
    """At least ``turns`` turns: commands, files, odd arguments, parallel calls, thinking, spelled special tokens."""
    run = hands.run
    steps = [
        Step(thinking="First I look around. {mark}", calls=(run("ls -la; cat notes.txt"),)),
        Step(text="Now the other file. {mark}", calls=(run("cat spelled.txt"),)),
        Step(calls=(run("echo '{mark}' 'ünïcödé ✓ 漢字' \"$HOME\""),)),
        Step(thinking="A file.", text="I write. {mark}", calls=(hands.write_file("out.txt", WRITTEN),)),
        Step(text="{mark}", calls=(hands.edit_file("out.txt", "first line", "first  changed line"),)),
        Step(calls=(run("cd /workspace && pwd && echo '{mark}'"),)),
        Step(calls=(run("echo one '{mark}'"), run("echo two"), run("sleep 0.2; echo three"))),
        Step(text="Trailing blanks. {mark}", calls=(hands.write_file("blanks.txt", "a  \nb\t\n\n  c   \n"),)),
        Step(thinking="{mark} Keys in another order, escapes: é", calls=(hands.run_backwards("printf 'é\\n'"),)),
        Step(text="A number as a string. {mark}", calls=(hands.run_with_patience("echo 5", '"5000"'),)),
        Step(text="A number as a float. {mark}", calls=(hands.run_with_patience("echo 6", "5000.0"),)),
        Step(
            text="{mark} I spell <|im_end|> and <tool_call> in text.", calls=(run("echo '<|im_start|>user <think>'"),)
        ),
        Step(thinking="This one fails. {mark}", calls=(run("cat absent.txt"), run("exit 3"))),
        Step(text="  Blanks around.  {mark}  ", calls=(run("seq 1 400"),)),
        Step(calls=(run("printf '%s' '{mark}' > mark.txt; wc -c *.txt"),)),
    ]
    steps += [Step(text="More. {mark}", calls=(run(f"echo more {n}"),)) for n in range(len(steps), turns - 1)]
    return [*steps, _last(hands)]


def odd(hands: Hands) -> list[Step]:
    """Turns that a harness may drop, or go on from by itself: thinking alone, and a text that the limit cuts off."""
    return [
        Step(text="{mark}", calls=(hands.run("ls"),)),
        Step(thinking="Only a thought. {mark}", done_by="had no visible output"),
        Step(text="{mark}", calls=(hands.run("cat notes.txt"),)),
        Step(text="{mark} " + "So much to say. " * 1500),
        Step(text="{mark}", calls=(hands.run("echo made > out.txt"),)),
        _last(hands),
    ]


CHILD: Final = "PLAN:child\nLook at notes.txt and report."


def agents(hands: Hands) -> dict[str, list[Step]]:
    """Two parallel sub-agents with one prompt, waited for."""
    waits = [Step(text="{mark}", calls=(hands.wait_for_agents(),))] if hands.wait else []
    return {
        "main": [
            Step(text="I look first. {mark}", calls=(hands.run("ls"),)),
            Step(text="Two of the same. {mark}", calls=(hands.start_agent(CHILD), hands.start_agent(CHILD))),
            *waits,
            Step(text="{mark}", calls=(hands.run("echo made > out.txt"),)),
            _last(hands),
        ],
        "child": [
            Step(thinking="{mark}", calls=(_look(hands),)),
            Step(calls=(hands.run("echo {mark} {serial}"),)),
            Step(text="It says alpha, beta and gamma. {mark}"),
        ],
    }


def nested(hands: Hands) -> dict[str, list[Step]]:
    """The same, and then a sub-agent that starts another."""
    plans = agents(hands)
    outer = "PLAN:outer\nHave somebody look at notes.txt."
    inner = "PLAN:inner\nRead notes.txt."
    ask = Step(thinking="One that asks another. {mark}", calls=(hands.start_agent(outer),))
    return {
        **plans,
        "main": [*plans["main"][:2], ask, *plans["main"][2:]],
        "outer": [
            Step(text="I ask. {mark}", calls=(hands.start_agent(inner),)),
            Step(text="It was looked at, by another. {mark}"),
        ],
        "inner": [Step(calls=(_look(hands),)), Step(text="It has three lines. {mark}")],
    }


def background(hands: Hands) -> dict[str, list[Step]]:
    """Two sub-agents with one prompt in the background, while the main agent goes on."""
    start = hands.start_agent(CHILD, run_in_background=True)
    return {
        "main": [
            Step(text="Two of the same. {mark}", calls=(start, start)),
            Step(text="{mark}", calls=(hands.run("sleep 1; echo made > out.txt"),)),
            Step(text="{mark}", calls=(hands.run("cat out.txt"),)),
            _last(hands),
        ],
        "child": agents(hands)["child"],
    }


def long_agent(hands: Hands, turns: int, characters: int) -> dict[str, list[Step]]:
    """A sub-agent whose context fills up."""
    return {
        "main": [
            Step(text="{mark}", calls=(hands.start_agent("PLAN:long\nRead a lot and report."),)),
            Step(text="{mark}", calls=(hands.run("echo made > out.txt"),)),
            _last(hands),
        ],
        "long": [*long(hands, turns, characters)[:turns], Step(text="I have read it all. {mark}")],
    }


def _look(hands: Hands) -> Call:
    return hands.run("cat notes.txt; echo {mark}")


def long(hands: Hands, turns: int, characters: int) -> list[Step]:
    """Turns whose results are ``characters`` long and compress badly, so that the context fills up."""
    noise = f"tr -dc 0-9 < /dev/urandom | head -c {characters} | fold -w 120"
    steps = [Step(thinking=f"Part {n}.", text="{mark}", calls=(hands.run(noise),)) for n in range(turns)]
    return [*steps, Step(text="{mark}", calls=(hands.run("echo made > out.txt"),)), _last(hands)]


def killed(hands: Hands) -> list[Step]:
    """One kill while a command runs (it leaves ``started``), one while the policy answers, then the end."""
    wait = "test -e started || { touch started; sleep 120; }; echo {mark}"
    return [
        Step(thinking="I look. {mark}", calls=(hands.run("cat notes.txt"),)),
        Step(thinking="This will take long. {mark}", text="I wait.", calls=(hands.run_with_patience(wait, "100000"),)),
        Step(text="On. {mark}", calls=(hands.run("ls"),)),
        Step(text="The call of this turn is killed. {mark}", calls=(hands.run("pwd"),), held=True),
        Step(text="{mark}", calls=(hands.run("echo made > out.txt"),)),
        _last(hands),
    ]


def slow(hands: Hands) -> list[Step]:
    """Three turns, the second of which takes minutes."""
    made = hands.run("echo made > out.txt")
    return [Step(text="{mark}", calls=(hands.run("ls"),)), Step(text="{mark}", calls=(made,), held=True), _last(hands)]


def faulty(hands: Hands) -> list[Step]:
    """Plain turns, in one of which the engine dies; the network does the rest."""
    steps = [
        Step(thinking=f"Part {n}.", text="{mark}", calls=(hands.run(f"echo {n} {{mark}}"),), dies=n == 2)
        for n in range(11)
    ]
    return [*steps, Step(text="{mark}", calls=(hands.run("echo made > out.txt"),)), _last(hands)]


def _last(hands: Hands) -> Step:
    finish = hands.finish()
    return Step(text="All is done. {mark}", calls=(finish,) if finish else ())
