"""The Enrollment service: a join string becomes a membership, an administrator's signature becomes a certificate."""

from sqlalchemy.exc import IntegrityError

from coordinator.front.listener import host_of
from coordinator.members.access.rpc_messages import Context
from coordinator.members.enrollment import Application, enroll
from coordinator.members.logins import log_in, prove_login
from coordinator.services.base import Service
from federation.refusals import Refusal
from federation.trust.certificates import pem
from federation.trust.identity import admin_uris
from federation.v1 import enrollment_pb2_grpc
from federation.v1.enrollment_pb2 import EnrollRequest, EnrollResponse, LoginRequest, LoginResponse
from storage.states import ClientState


class EnrollmentService(Service, enrollment_pb2_grpc.EnrollmentServicer):
    """Enrolls new clients and logs administrators in."""

    async def Enroll(self, request: EnrollRequest, context: Context) -> EnrollResponse:
        """Exchanges a join string for a client certificate."""
        home = self._home
        await self._in_thread(self._sequencer.sequence)  # a join string may have been made a moment ago
        application = Application(request.secret, request.csr, request.signing_key, request.proof, request.software)
        try:
            client, certificate = await self._write(
                enroll,
                application,
                authority=home.authority,
                rights=self._rights,
                approval=self._settings.approval,
                peer=host_of(context.peer()),
                now=self._clock(),
            )
        except IntegrityError:  # another call enrolled the same name at the same moment
            raise Refusal(
                "client-exists", "this client, or a client with this key, was enrolled at the same time"
            ) from None
        return EnrollResponse(
            federation_id=home.federation_id,
            client_id=client.client_id,
            certificate=pem(certificate),
            ca_certificate=pem(home.ca),
            coordinator_key=home.signing_key.public_key().public_bytes_raw(),
            addresses=(await self._addresses()).federation,
            approval_pending=client.state is ClientState.PENDING,
        )

    async def Login(self, request: LoginRequest, context: Context) -> LoginResponse:
        """Gives an administrator a certificate for some hours."""
        home = self._home
        administrator, _ = await self._read(prove_login, request.login)
        # Charged after the proof, so that strangers do not use up the logins of an administrator.
        self._access.charge(admin_uris(home.federation_id, administrator.name, ())[0], "Login")
        await self._in_thread(self._sequencer.sequence)  # it may have been issued a moment ago
        certificate = await self._write(
            log_in,
            request.login,
            authority=home.authority,
            rights=self._rights,
            lifetime=self._settings.admin_certificate_lifetime,
            now=self._clock(),
        )
        addresses = await self._addresses()
        return LoginResponse(
            certificate=pem(certificate),
            addresses=addresses.federation,
            enrollment_addresses=addresses.enrollment,
        )
