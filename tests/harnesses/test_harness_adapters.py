"""What every harness is told, and what it isn't: pure descriptions of a start."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from infra.harness.harness import INSTRUCTION, SIDE_MODEL, Harness, Session
from infra.harness.install import PACKAGES
from infra.harness.registry import NAMES, harness_named

SESSION = Session(
    base_url="http://127.0.0.1:8080",
    api_key="secret-key",
    model="policy",
    context_limit=200_000,
    max_output=8_000,
    session_id="01234567-89ab-4def-8123-456789abcdef",
)


@pytest.fixture(params=NAMES)
def harness(request: pytest.FixtureRequest) -> Harness:
    return harness_named(request.param, Path("/nowhere"))


def test_the_key_is_only_in_the_environment(harness: Harness) -> None:
    assert SESSION.api_key in harness.environment(SESSION).values()
    told = [*harness.command(INSTRUCTION, SESSION), *(harness.resume_command(SESSION) or ())]
    told += harness.files(SESSION).values()
    assert not any(SESSION.api_key in text for text in told)
    assert SESSION.api_key not in repr(SESSION)


def test_it_finds_the_model_at_the_gateway_and_nowhere_else(harness: Harness) -> None:
    told = " ".join([*harness.environment(SESSION).values(), *harness.files(SESSION).values()])
    assert SESSION.base_url in told
    assert told.count("://") == told.count("http://127.0.0.1:8080")


def test_what_it_writes_and_where_it_keeps_its_transcript_is_below_its_home(harness: Harness) -> None:
    for name in [*harness.files(SESSION), harness.transcript]:
        assert not Path(name).is_absolute() and ".." not in Path(name).parts


def test_its_version_is_pinned_and_its_patience_known(harness: Harness) -> None:
    assert harness.version == (PACKAGES[harness.name].version if harness.name in PACKAGES else "")
    assert harness.patience_s >= 300


def test_what_can_be_resumed_keeps_a_transcript() -> None:
    resumable = {name for name in NAMES if harness_named(name).resume_command(SESSION) is not None}
    assert resumable == {"claude-code", "codex", "opencode", "qwen-code"}
    assert all(harness_named(name).transcript for name in resumable)


def test_claude_code_compacts_before_a_turn_no_longer_fits_and_asks_for_one_model_only() -> None:
    told = harness_named("claude-code").environment(SESSION)
    assert told["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "192000"
    assert told["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "8000"
    assert told["ANTHROPIC_BASE_URL"] == SESSION.base_url, "it adds /v1 itself"
    assert {value for name, value in told.items() if name.endswith("_MODEL")} == {"policy"}


def test_codex_is_configured_in_its_own_words() -> None:
    (text,) = harness_named("codex").files(SESSION).values()
    settings = tomllib.loads(text)
    provider = settings["model_providers"][settings["model_provider"]]
    assert (provider["wire_api"], provider["base_url"]) == ("responses", SESSION.openai_url)
    assert settings["model_context_window"] == 200_000
    assert settings["web_search"] == "disabled" and settings["analytics"]["enabled"] is False


def test_opencode_asks_for_titles_under_a_name_of_their_own() -> None:
    (text,) = harness_named("opencode").files(SESSION).values()
    settings = json.loads(text)
    assert settings["small_model"] == f"gyre/{SIDE_MODEL}" and settings["model"] == "gyre/policy"
    assert settings["permission"]["webfetch"] == "deny"
