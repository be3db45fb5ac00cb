"""Makes runs: the measures of one attack on one federation."""

import time
from functools import lru_cache

from fedpareto.experiments.result_store import Measures
from leakage.federation import AttackedFederation
from leakage.gradient_inversion import GradientInversion
from leakage.label_inference import LabelInference
from leakage.specification import LeakageSpecification

_OF_THE_FEDERATION = ("seed", "rounds", "members", "colluders_at_most", "alpha", "shadow", "shadow_clients", "train")


def measure(specification: LeakageSpecification) -> tuple[Measures, list[Measures]]:
    """The measures of a run, and for gradient inversion a row for each of the first images.

    Returns:
        For labels: `labels/distance`, the total-variation distance between the guessed and the true histogram, a
        mean over the attacked members; `labels/top`, how often the most frequent label is right (%); `cosine`, of
        a difference of sums with the member's update. For images: `images/psnr` (dB, at most 50);
        `images/found`, the share of reconstructions whose nearest image of the same label is the true one (%).
        `epsilon` of all rounds that are read, and `noise`, sigma; `accuracy` of the attacked trained model
        (%), or with epsilon of one that members train with DP-SGD in as many rounds, which have
        `epsilon/training`; `seconds`.
        A row of an image has its number (`round`), `label`, `psnr`, `found`, and grey levels 0 to 16: `true/N` and
        `pixel/N`.
    """
    began = time.perf_counter()
    settings = specification.model_dump(include=set(_OF_THE_FEDERATION))
    federation = _federation(LeakageSpecification(name="", attack="labels", view="nothing", **settings))
    if specification.attack == "labels":
        final, rows = LabelInference(federation, specification).measures(), list[Measures]()
    else:
        final, rows = GradientInversion(federation, specification).measures()
    return {**final, "seconds": time.perf_counter() - began}, rows


@lru_cache(maxsize=1)
def _federation(specification: LeakageSpecification) -> AttackedFederation:
    """It is kept for the next run with the same seed and settings."""
    return AttackedFederation(specification)
