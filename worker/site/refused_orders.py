"""Keeps orders that an honest coordinator never gives as evidence, and alerts the owner."""

from pathlib import Path

from federation.durable_files import sync_directory
from federation.monitoring.events import Events
from federation.text import escaped
from federation.trust.keys import replace_private
from federation.v1.common_pb2 import AssignmentManifest, SignedEnvelope

_UPDATE = "what would show this member's update"
ATTACKS = {
    "cover": _UPDATE,
    "coefficients": _UPDATE,
    "policy:approved": "results in the clear, in a run whose specification asks for private rounds",
    "initial-model": "work from another model than the one with which the run asked",
    "evaluates-only": "other work than to measure the models of a run that only measures models",
}
"""By reason of a decline for which the owner is alerted, what the coordinator asked for."""
MAX_KEPT = 100  # orders; later ones are alerts without a file


class RefusedOrders:
    """The directory of a worker's home that holds refused orders, as their coordinator has signed them."""

    def __init__(self, directory: Path, events: Events) -> None:
        self._directory, self._events = directory, events

    def alert(self, order: SignedEnvelope, reason: str, message: str) -> None:
        """Alerts the owner of an order that was refused for a reason of `ATTACKS`, and keeps the order."""
        manifest = AssignmentManifest.FromString(order.manifest)
        occasion = f"run {escaped(manifest.run_id)} round {manifest.round}"
        # Section 3.5: as the coordinator signed it: with it, the owner can prove to others what was asked for.
        evidence = self._keep(f"{reason}-{manifest.assignment_id}.order", order)
        self._events.warn(
            "alert",
            f"{occasion}: the coordinator asked for {ATTACKS[reason]}, and was refused: {message}. "
            f"{evidence}. Ask the other members whether they were asked the same, and the coordinator's operator why",
            reason=reason,
            run_id=manifest.run_id,
            round=manifest.round,
            assignment_id=manifest.assignment_id,
        )

    def _keep(self, name: str, order: SignedEnvelope) -> str:
        """Writes an order to a file `name`, without separators. Returns a sentence with its path or the error."""
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            sync_directory(self._directory.parent)
            # A coordinator that goes on asking must not fill the disk.
            if len(list(self._directory.glob("*.order"))) >= MAX_KEPT:
                return f"{self._directory} holds {MAX_KEPT} orders already, so its signed order is not kept"
            path = self._directory / name.replace("/", "_").replace(":", "-")
            replace_private(path, order.SerializeToString(deterministic=True))
        except OSError as error:
            return f"Its signed order cannot be kept: {error.strerror or error}"
        return f"Its signed order is kept in {path}"
