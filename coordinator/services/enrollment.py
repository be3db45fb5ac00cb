"""The Enrollment service, which exchanges a join string and a certificate request for a membership."""

from collections.abc import Callable
from concurrent.futures import Executor
from datetime import datetime
from typing import Any, TypeAlias

import grpc
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from sqlalchemy.exc import IntegrityError

from coordinator.front.listener import host_of
from coordinator.members.enrollment import Application, Authority, Enrolled, enroll
from coordinator.services.calls import Threads
from federation.certificates import pem
from federation.refusals import Refusal
from federation.v1 import enrollment_pb2_grpc
from federation.v1.enrollment_pb2 import EnrollRequest, EnrollResponse
from storage.database import Database
from storage.models import ClientState

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class EnrollmentService(enrollment_pb2_grpc.EnrollmentServicer):
    """Serves clients to be.

    Args:
        database: where facts are kept.
        executor: threads for the database, so that the event loop never waits for it.
        authority: issues certificates.
        coordinator_key: the key that signs assignments and receipts, for the client to keep.
        address: where members attend, "host:port".
        approval: whether an operator must approve a client before it gets work.
        clock: the time, aware.
    """

    def __init__(
        self,
        *,
        database: Database,
        executor: Executor,
        authority: Authority,
        coordinator_key: Ed25519PublicKey,
        address: str,
        approval: bool,
        clock: Callable[[], datetime],
    ) -> None:
        self._database = database
        self._in_thread = Threads(executor).run
        self._authority = authority
        self._coordinator_key = coordinator_key
        self._address = address
        self._approval = approval
        self._clock = clock

    async def Enroll(self, request: EnrollRequest, context: Context) -> EnrollResponse:  # noqa: N802 - the rpc's name
        """Exchanges a join string for a client certificate."""
        application = Application(
            secret=request.secret,
            csr=request.csr,
            signing_key=request.signing_key,
            proof=request.proof,
            software=request.software,
        )
        enrolled = await self._in_thread(self._enroll, application, host_of(context.peer()))
        return EnrollResponse(
            federation_id=self._authority.federation_id,
            client_id=enrolled.client_id,
            certificate=pem(enrolled.certificate),
            ca_certificate=pem(self._authority.ca),
            coordinator_key=self._coordinator_key.public_bytes_raw(),
            address=self._address,
            approval_pending=enrolled.state is ClientState.PENDING,
        )

    def _enroll(self, application: Application, peer: str) -> Enrolled:
        try:
            with self._database.begin() as session:
                return enroll(
                    session,
                    application,
                    authority=self._authority,
                    approval=self._approval,
                    peer=peer,
                    now=self._clock(),
                )
        except IntegrityError:  # another join string for the same name, at the same moment
            raise Refusal(
                "client-exists", "this client, or a client with this key, was enrolled at the same time"
            ) from None
