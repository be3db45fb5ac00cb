"""The calls of the Federation service on a membership: the next certificate and signing key, and its end."""

from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from coordinator.members.access.rpc_messages import Context
from coordinator.members.departures import leave, withdrawn
from coordinator.members.renewal import renew
from coordinator.members.rotation import rotate_key
from coordinator.services.base import Service
from coordinator.services.views import overview
from coordinator.thread_pool import to_the_end
from federation.refusals import Refusal
from federation.trust.certificates import pem
from federation.v1 import federation_pb2 as messages
from storage.models import Client


class KeyCalls(Service):
    """Renews certificates and replaces signing keys of members, and takes their withdrawals."""

    async def Renew(self, request: messages.RenewRequest, context: Context) -> messages.RenewResponse:
        """Issues the caller's next certificate."""
        caller = self._access.caller()
        certificate = await self._write(
            renew,
            caller.name,
            caller.serial,
            request.csr,
            request.proof,
            authority=self._home.authority,
            by=caller.uri,
            now=self._clock(),
        )
        return messages.RenewResponse(certificate=pem(certificate))

    async def RotateKey(self, request: messages.RotateKeyRequest, context: Context) -> messages.RotateKeyResponse:
        """Replaces the caller's signing key."""
        caller = self._access.caller()
        try:
            receipt, certificate = await self._write(
                rotate_key,
                caller.name,
                caller.serial,
                request.rotation,
                request.csr,
                request.proof,
                signing=self._home.signing,
                authority=self._home.authority,
                by=caller.uri,
                now=self._clock(),
            )
        except IntegrityError:
            raise Refusal("signing-key", "this signing key was registered at the same time") from None
        rotations = self._home.rotations
        return messages.RotateKeyResponse(receipt=receipt, certificate=pem(certificate), rotations=rotations)

    @to_the_end
    async def Leave(self, request: messages.LeaveRequest, context: Context) -> messages.LeaveResponse:
        """Takes the caller's withdrawal: its other calls end, and no round waits for it."""
        caller = self._access.caller()
        left, runs = await self._write(
            leave, caller.name, request.withdrawal, signing=self._home.signing, by=caller.uri, now=self._clock()
        )
        self._access.end_left(caller.name, await self._read(_withdrawn, caller.name))
        for run_id in {*runs, *await self._read(overview.active_runs)}:
            await self._in_thread(self._changes.notify, run_id)
        response = messages.LeaveResponse()
        response.left.FromDatetime(left)
        return response


def _withdrawn(session: Session, client_id: str) -> Refusal:
    return withdrawn(session, session.get_one(Client, client_id))
