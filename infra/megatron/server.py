"""The replica's process: ``python -m infra.megatron.server --cell cell-0 --policy DIR``.

Serves ``infra.megatron.protocol`` on the cell's unix socket, and nothing else: what a request means is in
``infra.megatron.service``. The socket appears when the model is built. SIGTERM ends the process without waiting for
torch: the gradient sum of an open step lives only here, and whoever lost it has its micro-steps trained elsewhere.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.middleware.base import RequestResponseEndpoint

from infra.megatron.protocol import Problem, ReplicaError
from infra.megatron.replica import Replica
from infra.megatron.service import ReplicaService
from infra.settings import Settings
from infra.state.blobs import BlobMissing, BlobStore
from infra.state.redis import redis_client

logger = logging.getLogger(__name__)

REDIS_TIMEOUT_S = 10


def make_app(service: ReplicaService) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await service.close()

    app = FastAPI(lifespan=lifespan, openapi_url=None)
    app.add_api_route("/status", service.status, methods=["GET"])
    for endpoint in (
        service.prepare,
        service.train,
        service.gradients,
        service.finish,
        service.publish,
        service.serve,
    ):
        app.add_api_route(f"/{endpoint.__name__}", endpoint, methods=["POST"])

    @app.exception_handler(ReplicaError)
    async def refused(_: Request, error: ReplicaError) -> JSONResponse:
        return JSONResponse(error.problem.model_dump(), status_code=error.status)

    @app.exception_handler(BlobMissing)
    async def missing(_: Request, error: BlobMissing) -> JSONResponse:
        return JSONResponse(Problem(detail=f"no blob {error}").model_dump(), status_code=409)

    @app.middleware("http")
    async def faults_are_answered(request: Request, answer: RequestResponseEndpoint) -> Response:
        try:
            return await answer(request)
        except Exception as error:
            logger.exception("fault in %s", request.url.path)
            return JSONResponse(Problem(detail=f"{type(error).__name__}: {error}").model_dump(), status_code=500)

    return app


def main() -> None:
    parser = argparse.ArgumentParser(prog="infra.megatron.server", description=__doc__)
    parser.add_argument("--cell", required=True)
    parser.add_argument("--policy", required=True, type=Path, help="Hugging Face folder: the policy's shape")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    settings = Settings()
    socket = settings.replica_socket(args.cell)
    socket.parent.mkdir(parents=True, exist_ok=True)
    torch_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch")
    replica = torch_thread.submit(Replica, args.policy).result()
    redis = redis_client(settings.redis, socket_timeout=REDIS_TIMEOUT_S, socket_connect_timeout=REDIS_TIMEOUT_S)
    service = ReplicaService(replica, torch_thread, BlobStore(settings.blobs), redis, settings.host)
    config = uvicorn.Config(
        make_app(service), uds=str(socket), log_level="warning", access_log=False, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    server.run()  # ends by the signal that stopped it, or returns when it could not start
    os._exit(0 if server.started else 1)  # a thread pool's threads would hold the process until their work is done


if __name__ == "__main__":
    main()
