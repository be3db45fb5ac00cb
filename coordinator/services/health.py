"""gRPC health checking, with a `Watch` that holds nothing while it writes.

The library's own writes while it holds a lock that all watchers share, and cannot be ended there.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse


class HealthService(health.aio.HealthServicer):  # type: ignore[misc]
    """The library's servicer; `Watch` is an async generator."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = asyncio.Event()

    async def set(self, service: str, status: "HealthCheckResponse.ServingStatus.ValueType") -> None:
        """Records the status of a service, and notifies its watchers."""
        await super().set(service, status)
        self._tell()

    async def enter_graceful_shutdown(self) -> None:
        """Nothing is served any more."""
        await super().enter_graceful_shutdown()
        self._tell()

    async def Watch(  # noqa: N802 - the name of the rpc
        self, request: HealthCheckRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[HealthCheckResponse]:
        """Says how a service is, and again whenever that changes."""
        said = None
        while True:
            changed = self._changed
            status = self._server_status.get(request.service, HealthCheckResponse.SERVICE_UNKNOWN)
            if status != said:
                yield HealthCheckResponse(status=status)
                said = status
            await changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
