"""Where ranks meet. torch's own store listens on every interface; on loopback nobody outside shall reach it."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore


def serve(address: str, port: int, timeout: timedelta) -> TCPStore:
    """Open a store that listens on this address alone; port 0 takes a free one.

    Raises:
        OSError: If the port is in use.
    """
    listening = socket.create_server((address, port))
    port = listening.getsockname()[1]
    return TCPStore(address, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listening.detach())


def join(address: str, port: int, timeout: timedelta) -> TCPStore:
    """Join the store that another process serves."""
    return TCPStore(address, port, None, False, timeout, wait_for_workers=False)
