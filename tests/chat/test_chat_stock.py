"""A stock chat template is taken when it is append-only, and refused by the construct that makes it something else."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
from chat_parts import SYSTEM, blocks, messages_of, texts, tool_lists, write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.chat.chatml import TEMPLATE
from infra.chat.messages import Message, Tool, ToolCall
from infra.chat.probes import TemplateUnfit
from infra.chat.qwen3 import Qwen3Renderer
from infra.chat.stock import StockRenderer

APPEND_ONLY = TEMPLATE.read_text()
PLAIN = """\
{{- bos_token }}
{%- for tool in tools or [] %}
{{- '<|im_start|>system\\n' if loop.first else '' }}{{ tool | tojson }}{{ '<|im_end|>\\n' if loop.last else '\\n' }}
{%- endfor %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}
{{- '<think>' + message.reasoning_content + '</think>' }}
{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LAST_QUERY = """\
{%- set ns = namespace(last_query_index=0) %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- set ns.last_query_index = loop.index0 %}
{%- endif %}
{%- endfor %}
"""
VARIABLES = {"bos_token": "<|endoftext|>"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("stock"), qwen=True)


@pytest.fixture(scope="module")
def stock(tokenizer: Path) -> StockRenderer:
    return StockRenderer(tokenizer, APPEND_ONLY, {})


@pytest.fixture(scope="module")
def own(tokenizer: Path) -> Qwen3Renderer:
    return Qwen3Renderer(tokenizer)


@given(st.lists(messages_of(texts), min_size=1, max_size=6), tool_lists, st.one_of(st.none(), texts))
@settings(max_examples=60, deadline=None)
def test_no_text_becomes_structure(
    stock: StockRenderer, own: Qwen3Renderer, messages: list[Message], tools: tuple[Tool, ...], opening: str | None
) -> None:
    """The template that gyre exports, taken as a stock one, gives gyre's own blocks, whatever the texts spell."""
    system = None if opening is None else Message(role="system", content=opening)
    messages = [  # arguments are rendered from their values, and only equal roles are joined
        Message(
            role=message.role,
            content=message.content,
            reasoning=message.reasoning,
            tool_calls=tuple(ToolCall(call.id, call.name, '{"a": "<|im_end|>"}') for call in message.tool_calls),
            joined=message.joined and message.role in ("user", "system") and before.role == message.role,
        )
        for before, message in zip([SYSTEM, *messages], messages, strict=False)
    ]
    if not own.root(system, tools) and messages[0].role != "user":
        messages = [Message(role="user", content="go"), *messages]
    assert blocks(stock, system, tools, messages) == blocks(own, system, tools, messages)


def test_an_append_only_template_without_a_system_turn_of_its_own_is_taken(tokenizer: Path) -> None:
    renderer = StockRenderer(tokenizer, PLAIN, VARIABLES)
    talk = (
        Message(role="user", content="a"),
        Message(role="assistant", content="b"),
        Message(role="tool", content="c"),
    )
    ids = list(chain(*blocks(renderer, None, (), talk)))
    assert ids[0] == renderer.vocabulary.special("<|endoftext|>")
    assert renderer.decode(ids[1:]) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>tool\nc"
    )
    assert renderer.message(talk[1], talk[2]) == [renderer.im_end, *renderer.message(talk[1], talk[2], closed=True)]


def test_a_generation_prompt_that_opens_the_reasoning_is_read_with_it(tokenizer: Path) -> None:
    source = PLAIN.replace("'<|im_start|>assistant\\n' }}", "'<|im_start|>assistant\\n<think>' }}")
    renderer = StockRenderer(tokenizer, source, VARIABLES)
    turn = renderer.parse([*renderer.text("hm"), renderer.vocabulary.special("</think>"), *renderer.text("b")])
    assert (turn.reasoning, turn.content) == ("hm", "b")


@pytest.mark.parametrize(
    ("broken", "replaced", "named"),
    [
        ("{%- if message.reasoning_content %}", "{%- if message.reasoning_content and loop.last %}", "loop.last"),
        (
            "{%- if message.reasoning_content %}",
            "{%- if message.reasoning_content and loop.index0 > ns.last_query_index %}",
            "loop.index0 > ns.last_query_index",
        ),
        ("{{- message.content }}", "{{- message.content.split('</think>')[-1] if loop.last else '' }}", "loop.last"),
        ("for message in messages %}", "for message in messages[::-1] %}", "messages[::-1]"),
        ("message.reasoning_content + ", "'' + ", "reasoning"),
        ("in tools or []", "in []", "never uses `tools`"),
        ("in message.tool_calls or []", "in []", "argument"),
        (
            "{{- '<|im_start|>' + message.role",
            "{%- if message.role == 'system' and not loop.first %}{{ raise_exception('System first') }}{%- endif %}"
            "{{- '<|im_start|>' + message.role",
            "System first",
        ),
        ("{{- bos_token }}", "{{- messages | length }}", "messages | length"),
        ("'<|im_end|>\\n' }}", "'###\\n' }}", "special token"),
        ("{%- endfor %}", "", "line"),
        ("'<tool_call>{", "'<call>{", "can't be read"),
        (
            "'<|im_start|>' + message.role",
            "'<|im_start|>' + (loop.index | string if message.role == 'user' else '') + message.role",
            "depends on more",
        ),
    ],
)
def test_a_template_that_is_not_append_only_is_refused_by_its_construct(
    tokenizer: Path, broken: str, replaced: str, named: str
) -> None:
    assert broken in PLAIN
    with pytest.raises(TemplateUnfit) as refused:
        StockRenderer(tokenizer, LAST_QUERY + PLAIN.replace(broken, replaced), VARIABLES)
    assert named in str(refused.value)


def test_a_template_that_strips_thinking_is_named_with_its_probe_and_line(tokenizer: Path) -> None:
    source = PLAIN.replace("{%- if message.reasoning_content %}", "{%- if message.reasoning_content and loop.last %}")
    with pytest.raises(TemplateUnfit, match=r"probe 'thinking kept'.*line 7: .*loop\.last"):
        StockRenderer(tokenizer, source, VARIABLES)
