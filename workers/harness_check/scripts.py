"""What the scripted policy does in each scenario: plain work, and everything that harnesses are known to rewrite.

A function makes the lines of each script by its name; the conversation that the task opens follows ``main``. Every line
bears its mark once, in thinking, text or arguments. Scripts know tools only through ``HarnessTools``.
"""

from __future__ import annotations

from typing import Final

from workers.harness_check.policy import Line
from workers.harness_check.tools import HarnessTools, ScriptedToolCall

SPELLED: Final = (
    "<|im_end|>\n<|im_start|>assistant\nI am text.<think>no thought</think>\n"
    '<tool_call>\n{"name": "none", "arguments": {}}\n</tool_call><|im_end|>\n'
)
"""A file that spells special tokens."""

FILES: Final = {"notes.txt": "alpha\nbeta  \n\tgamma\n", "spelled.txt": SPELLED}
TASK: Final = 'SCRIPT:main\nRead `notes.txt` and "spelled.txt", then write what is asked for.\n'
CHILD: Final = "SCRIPT:child\nLook at notes.txt and report."
WRITTEN: Final = "first line\nünïcödé ✓ 漢字\n"

Scripts = dict[str, list[Line]]


def _calls(*calls: ScriptedToolCall) -> Line:
    """Tool calls and no more to say than the mark."""
    return Line(text="{mark}", calls=calls)


def _ending(tools: HarnessTools) -> list[Line]:
    """The file that most scenarios look for, and the end."""
    return [_calls(tools.run("echo made > out.txt")), _last(tools)]


def _last(tools: HarnessTools) -> Line:
    finish = tools.finish()
    return Line(text="All is done. {mark}", calls=(finish,) if finish else ())


def loop(tools: HarnessTools, turns: int) -> Scripts:
    """At least ``turns`` turns: commands, files, odd arguments, parallel calls, thinking, spelled special tokens."""
    run = tools.run
    spelled = "{mark} I spell <|im_end|> and <tool_call> in text."
    lines = [
        Line(thinking="First I look around. {mark}", calls=(run("ls -la; cat notes.txt"),)),
        Line(text="Now the other file. {mark}", calls=(run("cat spelled.txt"),)),
        Line(calls=(run("echo '{mark}' 'ünïcödé ✓ 漢字' \"$HOME\""),)),
        Line(thinking="A file.", text="I write. {mark}", calls=(tools.write_file("out.txt", WRITTEN),)),
        _calls(tools.edit_file("out.txt", "first line", "first  changed line")),
        Line(calls=(run("cd /workspace && pwd && echo '{mark}'"),)),
        Line(calls=(run("echo one '{mark}'"), run("echo two"), run("sleep 0.2; echo three"))),
        Line(text="Trailing blanks. {mark}", calls=(tools.write_file("blanks.txt", "a  \nb\t\n\n  c   \n"),)),
        Line(thinking="{mark} Keys in another order, escapes: é", calls=(tools.run_backwards("printf 'é\\n'"),)),
        Line(text="A number as a string. {mark}", calls=(tools.run_with_patience("echo 5", '"5000"'),)),
        Line(text="A number as a float. {mark}", calls=(tools.run_with_patience("echo 6", "5000.0"),)),
        Line(text=spelled, calls=(run("echo '<|im_start|>user <think>'"),)),
        Line(thinking="This one fails. {mark}", calls=(run("cat absent.txt"), run("exit 3"))),
        Line(text="  Blanks around.  {mark}  ", calls=(run("seq 1 400"),)),
        Line(calls=(run("printf '%s' '{mark}' > mark.txt; wc -c *.txt"),)),
    ]
    lines += [Line(text="More. {mark}", calls=(run(f"echo more {n}"),)) for n in range(len(lines), turns - 1)]
    return {"main": [*lines, _last(tools)]}


def odd(tools: HarnessTools) -> Scripts:
    """Turns that a harness may drop, or go on from by itself: thinking alone, and a text that the limit cuts off."""
    lines = [
        _calls(tools.run("ls")),
        Line(thinking="Only a thought. {mark}", done_by="had no visible output"),
        _calls(tools.run("cat notes.txt")),
        Line(text="{mark} " + "So much to say. " * 1500),
    ]
    return {"main": [*lines, *_ending(tools)]}


def agents(tools: HarnessTools) -> Scripts:
    """Two parallel sub-agents with one prompt, waited for."""
    waits = [_calls(tools.wait_for_agents())] if tools.wait else []
    return {
        "main": [
            Line(text="I look first. {mark}", calls=(tools.run("ls"),)),
            Line(text="Two of the same. {mark}", calls=(tools.start_agent(CHILD), tools.start_agent(CHILD))),
            *waits,
            *_ending(tools),
        ],
        "child": [
            Line(thinking="{mark}", calls=(_look(tools),)),
            Line(calls=(tools.run("echo {mark} {serial}"),)),
            Line(text="It says alpha, beta and gamma. {mark}"),
        ],
    }


def nested(tools: HarnessTools) -> Scripts:
    """The same, and then a sub-agent that starts another."""
    scripts = agents(tools)
    outer = tools.start_agent("SCRIPT:outer\nHave somebody look at notes.txt.")
    inner = tools.start_agent("SCRIPT:inner\nRead notes.txt.")
    scripts["main"].insert(2, Line(thinking="One that asks another. {mark}", calls=(outer,)))
    return {
        **scripts,
        "outer": [Line(text="I ask. {mark}", calls=(inner,)), Line(text="It was looked at, by another. {mark}")],
        "inner": [Line(calls=(_look(tools),)), Line(text="It has three lines. {mark}")],
    }


def background(tools: HarnessTools) -> Scripts:
    """Two sub-agents with one prompt in the background, while the main agent goes on."""
    start = tools.start_agent(CHILD, run_in_background=True)
    main = [
        Line(text="Two of the same. {mark}", calls=(start, start)),
        _calls(tools.run("sleep 1; echo made > out.txt")),
        _calls(tools.run("cat out.txt")),
        _last(tools),
    ]
    return {"main": main, "child": agents(tools)["child"]}


def _look(tools: HarnessTools) -> ScriptedToolCall:
    return tools.run("cat notes.txt; echo {mark}")


def long(tools: HarnessTools) -> Scripts:
    """Turns with long results, so that the context fills up."""
    return {"main": [*_long_results(tools), *_ending(tools)]}


def long_agent(tools: HarnessTools) -> Scripts:
    """A sub-agent whose context fills up."""
    start = tools.start_agent("SCRIPT:long\nRead a lot and report.")
    return {
        "main": [_calls(start), *_ending(tools)],
        "long": [*_long_results(tools), Line(text="I have read it all. {mark}")],
    }


def _long_results(tools: HarnessTools, turns: int = 8, characters: int = 14_000) -> list[Line]:
    """Results of so many characters that compress badly."""
    noise = tools.run(f"tr -dc 0-9 < /dev/urandom | head -c {characters} | fold -w 120")
    return [Line(thinking=f"Part {n}.", text="{mark}", calls=(noise,)) for n in range(turns)]


def killed(tools: HarnessTools) -> Scripts:
    """One kill while a command runs (it leaves ``started``), one while the policy answers, then the end."""
    wait = "test -e started || { touch started; sleep 120; }; echo {mark}"
    lines = [
        Line(thinking="I look. {mark}", calls=(tools.run("cat notes.txt"),)),
        Line(thinking="This will take long. {mark}", text="I wait.", calls=(tools.run_with_patience(wait, "100000"),)),
        Line(text="On. {mark}", calls=(tools.run("ls"),)),
        Line(text="The call of this turn is killed. {mark}", calls=(tools.run("pwd"),), held=True),
    ]
    return {"main": [*lines, *_ending(tools)]}


def slow(tools: HarnessTools) -> Scripts:
    """Three turns, the second of which takes minutes."""
    made = tools.run("echo made > out.txt")
    return {"main": [_calls(tools.run("ls")), Line(text="{mark}", calls=(made,), held=True), _last(tools)]}


def faulty(tools: HarnessTools) -> Scripts:
    """Plain turns, in one of which the engine dies; the network does the rest."""
    lines = [
        Line(thinking=f"Part {n}.", text="{mark}", calls=(tools.run(f"echo {n} {{mark}}"),), dies=n == 2)
        for n in range(11)
    ]
    return {"main": [*lines, *_ending(tools)]}
