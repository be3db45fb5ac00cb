"""The calls of the Federation service on keys: the next certificate, and the next signing key."""

from sqlalchemy.exc import IntegrityError

from coordinator.members.access.rpc_messages import Context
from coordinator.members.renewal import renew
from coordinator.members.rotation import rotate_key
from coordinator.services.base import Service
from federation.refusals import Refusal
from federation.trust.certificates import pem
from federation.v1 import federation_pb2 as messages


class KeyCalls(Service):
    """Renews certificates and replaces signing keys of members."""

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
