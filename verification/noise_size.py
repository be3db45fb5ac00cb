"""Checks the size of the noise that protects clients. The coordinator draws it alone, so no more can be verified."""

from federation.record.bundle import BundleReader
from federation.spec.noise_rows import noise_defect
from verification.errors import VerificationError

CHOSEN = "the coordinator chose the noise; the model is not verified"


def check_noise_length(bundle: BundleReader, noise: str) -> None:
    """Checks the length and the extremes of the noise of a step.

    The step adds `noise_scale` times this row, and `noise_scale` follows from the specification and the number of
    updates. So the row itself must have the size of standard normal numbers.

    Args:
        bundle: the record of the run.
        noise: the digest of the row.

    Raises:
        BlobAbsent: the noise is not in the bundle.
        VerificationError: it is not a row of float32 numbers, has another length, or has larger numbers than noise has.
    """
    if defect := noise_defect(bundle.rows(noise).values()):
        raise VerificationError(f"the noise {noise}: {defect}")
