"""The OpenAPI document of the proxy's POST paths, made from the dialects' tables of fields.

The schemas say what ``parse`` takes, so that good and bad bodies can be made from them; one rule is beyond JSON Schema
and is stated in words only: the last message must not be the assistant's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.dialects import anthropic
from proxy.dialects.dialect import Field
from proxy.dialects.registry import DIALECTS

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_OBJECT: Schema = {"type": "object"}
_BOUND: Schema = {"type": ["integer", "null"], "minimum": 1}
_SWITCH: Schema = {"type": ["boolean", "null"]}
_OPTIONAL_TEXT: Schema = {"type": ["string", "null"]}


def _one(kind: str, required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """An object told apart by its ``type``."""
    properties = {"type": {"const": kind}, **required, **(optional or {})}
    return {"type": "object", "properties": properties, "required": ["type", *required]}


def _record(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": [*required]}


def _any(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def _array(items: Schema, at_least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": at_least}


def _maybe(schema: Schema) -> Schema:
    return _any(schema, {"type": "null"})


_BLOCK = _one("text", {"text": _TEXT})
_RESULT = _one("tool_result", {"tool_use_id": _TEXT}, {"content": _maybe(_any(_TEXT, _array(_BLOCK)))})
_THOUGHT = _one("thinking", {"thinking": _TEXT}, {"signature": {}})
_USE = _one("tool_use", {"id": _TEXT, "name": _TEXT}, {"input": {}})
_ANTHROPIC: Mapping[str, Schema] = {
    "model": _OPTIONAL_TEXT,
    "max_tokens": {"type": "integer", "minimum": 1},
    "messages": _array(
        _any(
            _record({"role": {"const": "user"}, "content": _any(_TEXT, _array(_any(_BLOCK, _RESULT)))}),
            _record({"role": {"const": "assistant"}, "content": _any(_TEXT, _array(_any(_BLOCK, _THOUGHT, _USE)))}),
            _record({"role": {"const": "system"}, "content": _any(_TEXT, _array(_BLOCK))}),
        ),
        1,
    ),
    "system": _maybe(_any(_TEXT, _array(_BLOCK))),
    "stream": _SWITCH,
    "tools": _maybe(
        _array(
            _record(
                {"name": _TEXT, "input_schema": _OBJECT},
                {"type": {"enum": ["custom", None]}, "description": _OPTIONAL_TEXT},
            )
        )
    ),
    "tool_choice": _maybe(_record({"type": {"enum": ["auto", "none"]}})),
    "thinking": _maybe(_record({"type": {"enum": ["adaptive", "enabled", "disabled"]}})),
    "output_config": _maybe({"type": "object", "properties": {"format": {"type": "null"}}}),
    "context_management": _maybe(
        {
            "type": "object",
            "properties": {"edits": _array(_one("clear_thinking_20251015", {"keep": {"const": "all"}}))},
        }
    ),
}

_PARTS = _maybe(_any(_TEXT, _array(_any(_TEXT, _BLOCK, _one("refusal", {"refusal": _TEXT})))))
_NAMED_CALL = _record({"name": _TEXT}, {"arguments": {"type": ["string", "object", "null"]}})
_CHAT: Mapping[str, Schema] = {
    "model": _OPTIONAL_TEXT,
    "messages": _array(
        _any(
            _record({"role": {"enum": ["system", "developer", "user"]}}, {"content": _PARTS}),
            _record(
                {"role": {"const": "assistant"}},
                {
                    "content": _PARTS,
                    "reasoning_content": _OPTIONAL_TEXT,
                    "reasoning": _OPTIONAL_TEXT,
                    "tool_calls": _maybe(_array(_record({"function": _NAMED_CALL}, {"id": _OPTIONAL_TEXT}))),
                    "function_call": {"type": "null"},
                    "audio": {"type": "null"},
                },
            ),
            _record({"role": {"const": "tool"}}, {"content": _PARTS, "tool_call_id": _OPTIONAL_TEXT}),
        ),
        1,
    ),
    "tools": _maybe(
        _array(
            _one(
                "function",
                {
                    "function": _record(
                        {"name": _TEXT},
                        {"description": _OPTIONAL_TEXT, "parameters": {"type": ["object", "null"]}},
                    )
                },
            )
        )
    ),
    "max_tokens": _BOUND,
    "max_completion_tokens": _BOUND,
    "stream": _SWITCH,
    "stream_options": {"type": ["object", "null"]},
    "tool_choice": {"enum": ["auto", "none", None]},
}

_INPUT = _array(
    _any(_one("input_text", {"text": _TEXT}), _one("output_text", {"text": _TEXT}), _one("refusal", {"refusal": _TEXT}))
)
_THOUGHTS = {
    "summary": _array(_one("summary_text", {"text": _TEXT})),
    "content": _maybe(_array(_one("reasoning_text", {"text": _TEXT}))),
    "encrypted_content": _OPTIONAL_TEXT,
}
_DOTLESS: Schema = {"type": "string", "pattern": "^[^.]+$"}
_DESCRIBED: Mapping[str, Schema] = {"description": _OPTIONAL_TEXT}
_FUNCTION = _one("function", {"name": _DOTLESS}, {**_DESCRIBED, "parameters": {"type": ["object", "null"]}})
_CUSTOM = _one("custom", {"name": _DOTLESS}, {**_DESCRIBED, "format": {}})
_RESPONSES: Mapping[str, Schema] = {
    "model": _OPTIONAL_TEXT,
    "input": _any(
        _TEXT,
        _array(
            _any(
                _record(
                    {
                        "role": {"enum": ["system", "developer", "user", "assistant"]},
                        "content": _any(_TEXT, _INPUT),
                    },
                    {"type": {"const": "message"}},
                ),
                _one("reasoning", {}, _THOUGHTS),
                _one("function_call", {"call_id": _TEXT, "name": _TEXT, "arguments": _TEXT}, {"namespace": _TEXT}),
                _one("custom_tool_call", {"call_id": _TEXT, "name": _TEXT, "input": _TEXT}, {"namespace": _TEXT}),
                _one("function_call_output", {"call_id": _TEXT, "output": _any(_TEXT, _INPUT)}),
                _one("custom_tool_call_output", {"call_id": _TEXT, "output": _any(_TEXT, _INPUT)}),
            ),
            1,
        ),
    ),
    "instructions": _OPTIONAL_TEXT,
    "tools": _maybe(
        _array(
            _any(
                _FUNCTION,
                _CUSTOM,
                _one("namespace", {"name": _DOTLESS, "tools": _array(_any(_FUNCTION, _CUSTOM))}),
                _one("web_search", {}),
            )
        )
    ),
    "max_output_tokens": _BOUND,
    "stream": _SWITCH,
    "include": _maybe(_array({"enum": ["reasoning.encrypted_content", "web_search_call.action.sources"]})),
    "tool_choice": {"enum": ["auto", "none", None]},
    "text": _maybe({"type": "object", "properties": {"format": _maybe(_one("text", {}))}}),
}


_COUNTED = "The number of tokens of a prompt"
_SHAPES: Mapping[str, tuple[str, Mapping[str, Schema], list[str]]] = {
    "anthropic": ("A turn, in Anthropic's words", _ANTHROPIC, ["messages", "max_tokens"]),
    "openai_chat": ("A turn, in OpenAI's older words", _CHAT, ["messages"]),
    "openai_responses": ("A turn, in OpenAI's newer words", _RESPONSES, ["input"]),
}
"""Summary, schemas of fields and required fields by dialect; without an entry only the names of fields are told."""


def openapi() -> dict[str, Any]:
    """The document, OpenAPI 3.1."""
    asks = {
        dialect.PATHS[0]: (dialect, *_SHAPES.get(dialect.NAME, (f"A turn, {dialect.NAME}", {}, [])))
        for dialect in DIALECTS
    }
    asks[anthropic.COUNT_PATH] = (anthropic, _COUNTED, _ANTHROPIC, ["messages"])
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "gyre proxy",
            "version": "1",
            "description": "The last message of a request must not be the assistant's.",
        },
        "security": [{"bearer": []}, {"key": []}],
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            }
        },
        "paths": {
            path: {"post": _operation(title, _body(dialect.FIELDS, schemas, required))}
            for path, (dialect, title, schemas, required) in asks.items()
        },
    }


def _body(fields: Mapping[str, Field], schemas: Mapping[str, Schema], required: list[str]) -> Schema:
    properties: dict[str, Schema] = {}
    for name, field in fields.items():
        taken = {"enum": [None, *field.taken]} if field.treatment == "refused" else {}
        properties[name] = {**schemas.get(name, taken), **({"description": field.note} if field.note else {})}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _operation(title: str, body: Schema) -> dict[str, Any]:
    words = {"application/json": {"schema": {"type": "object", "required": ["error"]}}}
    return {
        "summary": title,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {
            "200": {
                "description": "The turn, or a stream of events",
                "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
            },
            "400": {"description": "Refused, and not to be tried again", "content": words},
            "413": {"description": "The body is too large", "content": words},
            "503": {"description": "To be tried again", "content": words},
        },
    }
