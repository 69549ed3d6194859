"""How to start an unmodified SGLang server for one CPU cell: its command line and its environment.

The invariant: everything the server listens on is a loopback address, and an idle server uses almost no CPU. Two
settings carry it. The process group of a single-rank engine meets in a file, because torch's TCP store binds every
interface; and the scheduler sleeps on its sockets when it has no request. The second one holds only while the
engine is not paused: a paused scheduler of SGLang 0.5.23 polls in a busy loop (99 % of a core).

This module starts nothing.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from pathlib import Path

from infra.kv_store.client import StoreAddress
from infra.kv_store.pages import PAGE_TOKENS, namespace, read_config

HTTP_KEEP_ALIVE_S = 75
"""How long the server keeps an idle connection. Clients must drop theirs earlier, or a request meets a closing one."""
FETCH_FROM = 256
"""Tokens of a prefix that are worth asking the store for."""
FETCH_S, FETCH_S_PER_KI_TOKEN = 1.0, 0.25
"""How long a call waits for the store at most: seconds, and seconds more for each 1,024 tokens of its prompt."""
HOST_RATIO = 1.0
"""Size of the tier between an engine's KV pool and the store, to the pool's: half of it is for what is fetched."""


def engine_command(
    model_dir: Path | str,
    host: str,
    port: int,
    *,
    max_total_tokens: int,
    context_length: int,
    stream_interval: int = 16,
    incarnation: str = "engine",
    kv_store: StoreAddress | None = None,
) -> list[str]:
    """Arguments of the server process: fp32 weights of ``model_dir`` (Hugging Face layout), token ids in and out.

    ``max_total_tokens`` is the size of the KV pool in tokens, ``context_length`` the most tokens of one request,
    prompt and output together; ``stream_interval`` is tokens between two messages of a streamed request.
    ``incarnation`` is the name under which this start of the server can be told from another.
    ``kv_store``: the store in which KV outlives the engine and from which it takes what others computed; None for none.
    The tokenizer is never loaded: the engine answers ``/generate`` with ``input_ids`` only.
    """
    flags = {
        "model-path": str(model_dir),
        "host": host,
        "port": str(port),
        "device": "cpu",
        "dtype": "float32",
        "weight-version": "0",
        "served-model-name": incarnation,
        "context-length": str(context_length),
        "max-total-tokens": str(max_total_tokens),
        "max-running-requests": "64",
        "chunked-prefill-size": "4096",
        # Of the machine's free memory at start, whoever else takes of it meanwhile; max-total-tokens sets the size.
        "mem-fraction-static": "0.8",
        "attention-backend": "torch_native",
        "sampling-backend": "pytorch",
        "sampling-defaults": "openai",  # a checkpoint's generation_config.json must not change how we sample
        "cuda-graph-backend-decode": "disabled",
        "cuda-graph-backend-prefill": "disabled",
        "stream-interval": str(stream_interval),
        "log-level": "warning",
    }
    switches = [
        "--skip-tokenizer-init",
        "--incremental-streaming-output",
        "--sleep-on-idle",
        "--disable-overlap-schedule",
    ]
    if kv_store is not None:
        flags |= _store_flags(model_dir, host, kv_store)
        switches.append("--enable-hierarchical-cache")
    options = [part for name, value in flags.items() for part in (f"--{name}", value)]
    return [sys.executable, "-m", "sglang.launch_server", *options, *switches]


def _store_flags(model_dir: Path | str, host: str, kv_store: StoreAddress) -> dict[str, str]:
    """SGLang's hierarchical cache with gyre's KV store behind it.

    What is computed goes to the store at once (``write_through``); what the store may have is waited for with a
    deadline that grows with its size, and computed after that.
    """
    config = {
        "backend_name": "gyre",
        "module_path": "infra.kv_store.backend",
        "class_name": "KvStoreBackend",
        "interface_v1": 1,
        "namespace": namespace(read_config(Path(model_dir))),
        "master": kv_store.master,
        "http": kv_store.http,
        "host": host,
        "prefetch_threshold": FETCH_FROM,
        "prefetch_timeout_base": FETCH_S,
        "prefetch_timeout_per_ki_token": FETCH_S_PER_KI_TOKEN,
    }
    return {
        "page-size": str(PAGE_TOKENS),
        "hicache-ratio": str(HOST_RATIO),
        "hicache-io-backend": "direct",
        "hicache-mem-layout": "page_first_direct",
        "hicache-write-policy": "write_through",
        "hicache-storage-backend": "dynamic",
        "hicache-storage-prefetch-policy": "timeout",
        "hicache-storage-backend-extra-config": json.dumps(config),
    }


def engine_environment(scratch: Path) -> dict[str, str]:
    """Environment of one start of the server; ask again for every start.

    ``scratch`` is an existing folder for the file in which the process group meets. The file is new for every start:
    one left by a killed engine would confuse the next.
    """
    meeting_point = scratch.absolute() / f"engine-{uuid.uuid4().hex}.store"
    return {
        **os.environ,
        "SGLANG_PLATFORM": "gyre_torch_cpu",
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{meeting_point}",
        "SGLANG_TIMEOUT_KEEP_ALIVE": str(HTTP_KEEP_ALIVE_S),
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "NO_PROXY": "127.0.0.1,localhost,::1",  # the server warms itself up over HTTP
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
