"""gRPC health checking, with a `Watch` that holds no lock while it writes.

The library's own `Watch` holds a lock of all watchers while it writes, and cannot be cancelled there.
"""

import asyncio
from collections.abc import AsyncIterator

from grpc_health.v1 import health
from grpc_health.v1.health_pb2 import (
    HealthCheckRequest,
    HealthCheckResponse,
    HealthListRequest,
    HealthListResponse,
)

from coordinator.members.access.rpc_messages import Context


class HealthService(health.aio.HealthServicer):  # type: ignore[misc]
    """The library's servicer with another `Watch`, and with `List`, which it lacks."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = asyncio.Event()

    async def set(self, service: str, status: "HealthCheckResponse.ServingStatus.ValueType") -> None:
        """Records the status of a service, and notifies its watchers."""
        await super().set(service, status)
        self._wake_watchers()

    async def enter_graceful_shutdown(self) -> None:
        """Records that nothing is served any more."""
        await super().enter_graceful_shutdown()
        self._wake_watchers()

    async def List(self, request: HealthListRequest, context: Context) -> HealthListResponse:
        """Sends the status of every service."""
        statuses = {name: HealthCheckResponse(status=status) for name, status in self._server_status.items()}
        return HealthListResponse(statuses=statuses)

    async def Watch(self, request: HealthCheckRequest, context: Context) -> AsyncIterator[HealthCheckResponse]:
        """Sends the status of a service, and again whenever it changes."""
        sent = None
        while True:
            changed = self._changed
            status = self._server_status.get(request.service, HealthCheckResponse.SERVICE_UNKNOWN)
            if status != sent:
                yield HealthCheckResponse(status=status)
                sent = status
            await changed.wait()

    def _wake_watchers(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
