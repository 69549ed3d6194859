"""The proxy process: ``python -m proxy.main --tokenizer FILE``. Listens on a port and on a unix socket.

It holds nothing that Redis does not: kill it at any moment and start another.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import secrets
import socket
from pathlib import Path

from redis.asyncio import Redis

from infra.chat.renderer import ChatMLRenderer
from infra.keys import Route
from infra.settings import Settings
from infra.sglang.client import EngineClient
from proxy.app import create_app
from proxy.engine import Engine
from proxy.gateway import Gateway
from proxy.limits import Limits
from proxy.router import Router
from proxy.server import listen, make_server


def model_vocabulary(tokenizer: Path, renderer: ChatMLRenderer) -> int:
    """Ids that the model can sample: more than the tokenizer has where the embedding is padded."""
    config = tokenizer.with_name("config.json")
    size = json.loads(config.read_text()).get("vocab_size") if config.exists() else None
    return max(renderer.vocab_size, int(size or 0))


def build_gateway(
    redis: Redis, renderer: ChatMLRenderer, *, vocab_size: int | None = None, limits: Limits | None = None
) -> Gateway:
    """A gateway to SGLang engines, with an id of its own. ``vocab_size``: of the model, if not the tokenizer's."""
    limits = limits or Limits()

    def connect(route: Route) -> Engine:
        return EngineClient(route.url, vocab_size=vocab_size or renderer.vocab_size)

    proxy_id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    return Gateway(redis, renderer, Router(redis, proxy_id, connect, limits), limits)


def main() -> None:
    options = argparse.ArgumentParser(prog="proxy", description=__doc__)
    options.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json of the policy")
    options.add_argument("--compact-tools", action="store_true", help="list tools by name only")
    arguments = options.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = Settings()
    redis = Redis.from_url(settings.redis, socket_connect_timeout=5, socket_keepalive=True)
    renderer = ChatMLRenderer(arguments.tokenizer, compact_tools=arguments.compact_tools)
    gateway = build_gateway(redis, renderer, vocab_size=model_vocabulary(arguments.tokenizer, renderer))
    server = make_server(create_app(gateway))
    server.run(sockets=listen(settings.host, settings.proxy_port, settings.proxy_socket))


if __name__ == "__main__":
    main()
