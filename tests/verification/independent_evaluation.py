"""The means of a private evaluation, computed from docs/reference/private-protocol.md, sections 2a and 2b.

The sums are those of `independent_sums`.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tests.verification import independent_sums
from tests.verification.independent_verifier import File

Numbers = dict[str, float]
SPLITS = ("test", "validation", "train")  # a round is judged by the first that was measured


def of_private_model(file: File, replies: Sequence[Any], split_order: Sequence[str]) -> Numbers:
    """The metrics of a private evaluation."""
    answers = [file.answer(reply.digest, reply.said, reply.order) for reply in replies]
    summed = independent_sums.unmasked(answers, "<u4", lambda count: 2**32 // count)
    m, ready = len(summed.members), len(summed.ready)
    t, needed = (ready - 1) // 3, 2 * ready // 3 + 1
    sigma_noise = file.run["privacy"].get("evaluation_noise", 0.1)
    clip = math.sqrt(len(summed.total)) * (1 + 3 * sigma_noise)
    a = math.floor(2**32 / len(summed.agreed)) * 2.0**-32
    means = summed.total.view(np.int32) * 2.0**-28 / a * clip / m
    said = {one.name: one.said for one in answers if one.stage == "ready"}
    measured = np.min([[*said[name].measured] for name in summed.agreed], axis=0)
    found: Numbers = {"evaluated": m}
    if sigma_noise:
        found["evaluation/noise"] = sigma_noise / math.sqrt((needed - t) * m)
    by_key = dict(zip(entries(file, split_order), zip(means, measured, strict=True), strict=True))
    known = {key: min(max(mean, 0.0), 1.0) * most for (key, most), (mean, there) in by_key.items() if there}
    found |= {f"loss/{key.replace('/loss', '')}": value for key, value in known.items() if key.split("/")[1] == "loss"}
    of_first = {"accuracy": "accuracy/mean"} | {one.name: f"metric/{one.name}/mean" for one in file.about.metrics}
    of_first |= {f"accuracy/{name}": f"accuracy/objective/{name}" for name in file.objectives}
    for name, target in of_first.items():
        values = [known[f"{split}/{name}"] for split in SPLITS if f"{split}/{name}" in known]
        found |= {target: values[0]} if values else {}
    return found


def entries(file: File, splits: Iterable[str]) -> Iterator[tuple[str, float]]:
    """The coordinates of the vector of a private evaluation, with the largest value of each."""
    suffixes = ["", *(f"/{name}" for name in file.objectives if len(file.objectives) > 1)]
    for split in splits:
        for suffix in suffixes:
            yield f"{split}/loss{suffix}", 10.0
            yield f"{split}/accuracy{suffix}", 1.0
        yield from ((f"{split}/{metric.name}", metric.largest) for metric in file.about.metrics)
