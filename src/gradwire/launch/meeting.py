"""A meeting point for torchrun's agent that listens on loopback alone; torch's own listen on every interface."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from gradwire.collectives.store import serve

NAME = "gradwire-loopback"
TIMEOUT = timedelta(seconds=60)


class Loopback(StaticTCPRendezvous):
    """torch's static rendezvous of one machine, over a store of ours."""

    def __init__(self, address: str, port: int, run_id: str) -> None:
        store = serve(address, port, TIMEOUT)
        super().__init__(address, store.port, 0, 1, run_id, TIMEOUT.seconds)
        self._store = store

    def get_backend(self) -> str:
        """The name that it is registered under."""
        return NAME


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    address, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=0)
    return Loopback(address, port, parameters.run_id)


def register() -> str:
    """Make it known to torch; returns its name."""
    rendezvous_handler_registry.register(NAME, _create)
    return NAME
