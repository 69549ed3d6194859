"""A process that does nothing but hold memory for the KV store: ``python -m infra.kv_store.segment``.

KV outlives the cell that computed it because it lies here. When the master comes back from the dead, Mooncake's own
client mounts the memory again, empty. Once the memory is mounted, the unix socket given accepts connections.

It knows nothing of what it holds.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
from pathlib import Path

log = logging.getLogger("gyre.kv_store")

MASTER_S = 60.0
"""How long the master may take to appear. Mooncake itself would wait for it with the interpreter locked."""
PAUSE_S = 0.1


class NoMaster(RuntimeError):
    """The master did not appear, or refuses the memory."""


async def wait_listening(address: str, deadline_s: float) -> None:
    """Return when something listens at ``host:port``. Raises NoMaster after ``deadline_s`` seconds."""
    host, port = address.rsplit(":", 1)
    deadline = asyncio.get_running_loop().time() + deadline_s
    while True:
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except OSError:
            if asyncio.get_running_loop().time() > deadline:
                raise NoMaster(f"nothing listens at {address}") from None
            await asyncio.sleep(PAUSE_S)
        else:
            writer.close()
            return


async def hold(host: str, master: str, megabytes: int, socket: Path) -> None:
    """Mount the memory and hold it until SIGTERM or SIGINT. Raises NoMaster."""
    from mooncake.store import MooncakeDistributedStore

    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    await wait_listening(master, MASTER_S)
    store = MooncakeDistributedStore()
    code = store.setup(host, "P2PHANDSHAKE", megabytes << 20, 16 << 20, "tcp", "", master)
    if code:
        raise NoMaster(f"{master} refuses {megabytes} MB: error {code}")
    socket.parent.mkdir(parents=True, exist_ok=True)
    socket.unlink(missing_ok=True)
    server = await asyncio.start_unix_server(lambda _, writer: writer.close(), str(socket))
    log.info("%d MB are held for the store at %s", megabytes, master)
    async with server:
        await ended.wait()
    store.close()


def main() -> None:
    options = argparse.ArgumentParser(prog="segment", description=__doc__)
    options.add_argument("--host", required=True)
    options.add_argument("--master", required=True, help="host:port")
    options.add_argument("--megabytes", type=int, required=True)
    options.add_argument("--socket", type=Path, required=True)
    given = options.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    asyncio.run(hold(given.host, given.master, given.megabytes, given.socket))


if __name__ == "__main__":
    main()
