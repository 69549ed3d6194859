"""The proxy process: ``python -m proxy.main --policy FOLDER``. Listens on a port and on a unix socket.

With ``--processes N`` it is N processes behind the same sockets. Each holds nothing that Redis does not: kill any of
them at any moment.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import secrets
import socket
import sys
from pathlib import Path

from pydantic import ValidationError
from redis.asyncio import Redis

from infra.chat.families import NoRenderer, renderer_for
from infra.chat.renderer import Renderer
from infra.chat.tokens import TokenizerUnfit
from infra.kv_store.arrival import Arrival
from infra.kv_store.pages import bytes_per_token, namespace, read_config
from infra.settings import Settings
from infra.sglang.client import EngineClient
from infra.state.keys import Route
from infra.state.redis import redis_client
from proxy.app import create_app
from proxy.calls.gateway import Gateway
from proxy.calls.moved_prefixes import PolicyKv
from proxy.limits import Limits
from proxy.prefork import Family, inherited, module_command
from proxy.routing.engine import Engine
from proxy.routing.router import Router
from proxy.server import listen, make_server

REDIS_CONNECTIONS = 4096
"""At most; as many calls may be at Redis at one moment. The client's default of 100 fails the calls beyond it."""


class BadLimits(ValueError):
    """The limits that were given are none."""


def read_limits(text: str) -> Limits:
    """Limits from a JSON object or the path of a file with one; "" for the defaults. Raises BadLimits."""
    try:
        given = text if not text or text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8")
        return Limits.model_validate_json(given or "{}")
    except OSError as fault:
        raise BadLimits(f"limits: neither a JSON object nor a file that can be read: {fault}") from fault
    except ValidationError as fault:
        unknown = any(error["type"] == "extra_forbidden" for error in fault.errors())
        known = f"; there are {', '.join(Limits.model_fields)}" if unknown else ""
        wrong = "; ".join(f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in fault.errors())
        raise BadLimits(f"limits: {wrong.lstrip(': ')}{known}") from fault


def model_vocabulary(policy: Path, renderer: Renderer) -> int:
    """Ids that the model can sample: more than the tokenizer has where the embedding is padded."""
    config = policy / "config.json"
    size = json.loads(config.read_text()).get("vocab_size") if config.exists() else None
    return max(renderer.vocab_size, int(size or 0))


def policy_kv(policy: Path, settings: Settings) -> PolicyKv:
    """What is known of a policy's KV; nothing of a folder that holds a tokenizer only."""
    if not (policy / "config.json").exists():
        return PolicyKv()
    config, store = read_config(policy), settings.kv_store
    arrival = None if store is None else Arrival(store.http, namespace(config))
    return PolicyKv(bytes_per_token(config), arrival)


def build_gateway(
    redis: Redis,
    renderer: Renderer,
    *,
    vocab_size: int | None = None,
    limits: Limits | None = None,
    kv: PolicyKv | None = None,
) -> Gateway:
    """A gateway to SGLang engines, with an id of its own. ``vocab_size``: of the model, if not the tokenizer's."""
    limits = limits or Limits()

    def connect(route: Route) -> Engine:
        return EngineClient(route.url, vocab_size=vocab_size or renderer.vocab_size)

    proxy_id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    return Gateway(redis, renderer, Router(redis, proxy_id, connect, limits), limits, kv)


def arguments() -> argparse.ArgumentParser:
    """The command line. What isn't given comes from the settings (``GYRE_*``)."""
    options = argparse.ArgumentParser(prog="proxy", description=__doc__)
    options.add_argument("--policy", type=Path, required=True, help="folder of the policy: tokenizer.json and more")
    options.add_argument("--processes", type=int, help="serve with so many processes (GYRE_PROXY_PROCESSES)")
    options.add_argument("--limits", help="JSON object, or a file with one: fields of Limits (GYRE_PROXY_LIMITS)")
    options.add_argument("--inherited", default="", help=argparse.SUPPRESS)
    options.add_argument("--announce", type=int, help=argparse.SUPPRESS)
    return options


def main() -> None:
    options = arguments()
    given = options.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = Settings()
    processes = settings.proxy_processes if given.processes is None else given.processes
    try:
        limits = read_limits(settings.proxy_limits if given.limits is None else given.limits)
    except BadLimits as fault:
        options.error(str(fault))
    if processes < 1:
        options.error(f"--processes is {processes}; at least 1 is needed")
    if not (given.policy / "tokenizer.json").is_file():
        options.error(f"no policy: {given.policy / 'tokenizer.json'} is no file")
    if given.inherited:
        sockets = inherited(given.inherited)
    else:
        sockets = listen(settings.host, settings.proxy_port, settings.proxy_socket)
        if processes > 1:
            family = Family(module_command("proxy.main", sys.argv[1:]), sockets, processes)
            sys.exit(asyncio.run(family.run()))
    redis = redis_client(
        settings.redis, max_connections=REDIS_CONNECTIONS, socket_connect_timeout=5, socket_keepalive=True
    )
    try:
        renderer = renderer_for(given.policy)
    except (NoRenderer, TokenizerUnfit) as fault:
        options.error(str(fault))
    vocabulary, kv = model_vocabulary(given.policy, renderer), policy_kv(given.policy, settings)
    gateway = build_gateway(redis, renderer, vocab_size=vocabulary, limits=limits, kv=kv)

    def announce() -> None:
        if given.announce is not None:
            os.write(given.announce, b"1")

    make_server(create_app(gateway, announce)).run(sockets=sockets)


if __name__ == "__main__":
    main()
