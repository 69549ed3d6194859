"""What a harness is to gyre: how it is started and resumed in a sandbox, what it needs there, and what it must not do.

A harness is run unmodified. All that it learns is a session (where the model is, under which key and name, how much
fits) and the task; whatever it does with them is seen by the model gateway. Each harness is one small file of this
folder and knows nothing of episodes, and of sandboxes no more than what a path inside is.

A harness of one's own is a package with an entry point in the group ``gyre.harnesses``: the name that a run
configuration gives, and a class (or function) that takes a folder and returns a ``Harness``. The folder is
``.gyre-harness/NAME``, for what the package installs there; it need not exist. All members of ``Harness`` are needed
(class attributes will do for the properties), and ``name`` is the entry point's. Nothing may be started or written
before the sandbox is: ``check`` says what is missing. ``examples/plugin/`` has one to copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from infra.sandbox.spec import Bind

INSTRUCTION: Final = "/gyre/instruction.md"
"""Where the task's instruction is bound."""

RESUMED: Final = (
    "The work was interrupted and goes on now. The files are as they were; a command that was running was killed. "
    "Go on and finish the task."
)
"""What a resumed harness is told."""


class HarnessUnavailable(RuntimeError):
    """The harness is not installed here. The message says how to mend it."""


@dataclass(frozen=True)
class Session:
    """One start of a harness, or its resumption."""

    base_url: str
    """Of the gateway, as seen inside, without a path: each API has its own below it."""
    api_key: str = field(repr=False)
    model: str
    """Name under which the harness asks for the policy."""
    context_limit: int
    """Tokens of prompt and output of a call at most."""
    max_output: int
    """Sampled tokens of a turn at most; below ``context_limit``."""
    session_id: str
    """UUID, the same when the episode is resumed."""

    @property
    def openai_url(self) -> str:
        """Base URL of both OpenAI dialects."""
        return f"{self.base_url}/v1"

    @property
    def room(self) -> int:
        """Tokens of prompt that leave room for a whole turn: where a harness should have compacted its context."""
        return max(1, self.context_limit - self.max_output)


STREAM_PATIENCE_S: Final = 24 * 3600.0
"""Seconds for which a harness that can be told so waits for a stream that does nothing but ping: several don't count
pings as signs of life. Longer than the gateway holds any call."""

SIDE_MODEL: Final = "gyre-side"
"""Name under which a harness asks for titles and the like, where it can be told to."""


class Harness(Protocol):
    @property
    def name(self) -> str:
        """That of the registry."""
        ...

    @property
    def version(self) -> str:
        """The pinned version; empty for what has none, like gyre's own."""
        ...

    @property
    def address_space_mb(self) -> int | None:
        """MiB of address space that it needs itself, on top of the task's; None: it cannot live with a limit."""
        ...

    @property
    def patience_s(self) -> float:
        """Seconds for which it waits for an answer that isn't streamed (a stream is kept alive by pings)."""
        ...

    @property
    def early_stream(self) -> bool:
        """Whether it asks again when a stream breaks. If not, its streams are opened only when the turn is there: then
        what breaks before is a request without an answer, which every harness sends again."""
        ...

    @property
    def transcript(self) -> str:
        """File or folder, relative to HOME, in which it keeps its conversation; empty when it keeps none."""
        ...

    @property
    def disallowed_tools(self) -> tuple[str, ...]:
        """Tools that it is told not to offer: they need the network, another machine or another day."""
        ...

    def command(self, instruction_path: str, session: Session) -> list[str]:
        """Program and arguments, with paths as seen inside the sandbox."""
        ...

    def resume_command(self, session: Session) -> list[str] | None:
        """The same for going on, after a kill, in the workspace and HOME that it left; None when it cannot."""
        ...

    def environment(self, session: Session) -> dict[str, str]:
        """Variables besides the sandbox's own."""
        ...

    def files(self, session: Session) -> Mapping[str, str]:
        """Texts to write before the start, by path relative to HOME."""
        ...

    def binds(self) -> tuple[Bind, ...]:
        """What it needs from the host, read-only."""
        ...

    def check(self) -> None:
        """Raises HarnessUnavailable."""
        ...


def missing_members(part: object) -> list[str]:
    """What an object would need to be a Harness: names, in the order of the protocol."""
    return [name for name in vars(Harness) if not name.startswith("_") and not hasattr(part, name)]
