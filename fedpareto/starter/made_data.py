"""The data that `fedpareto new` makes for each kind of task: three sites of unequal size, several rows a patient.

It is invented, and the same each time.
"""

import csv
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
SITES: Mapping[str, int] = {"site-a": 180, "site-b": 120, "site-c": 96}  # rows of each site
_ROWS = 2  # of each patient
_PIXELS = 12
_MISSING = 0.03  # the share of measurements that nobody took
_SHIFT = 0.3  # by which sites differ, in deviations
_USUAL = ("patient", "came", "visit", "seen", "by", "the", "nurse", "blood", "pressure", "taken", "plan", "follow")
_URGENT = ("chest", "pain", "severe", "bleeding", "collapse", "fever", "acute", "admitted")
_CALM = ("stable", "well", "better", "routine", "check", "normal", "no", "complaints")


def write(kind: str, directory: Path) -> list[Path]:
    """Writes the data of each site into a directory of its name; returns these directories."""
    written = []
    for number, (site, count) in enumerate(SITES.items()):
        random = np.random.default_rng([len(kind), number])
        patients = 1000 * (number + 1) + np.arange(count) // _ROWS
        labels = np.repeat(random.random(count // _ROWS) < 0.3, _ROWS).astype(np.int64)
        order = random.permutation(count)
        (directory / site).mkdir(parents=True)
        _WRITERS[kind](directory / site, patients[order], labels[order], random)
        written.append(directory / site)
    return written


def _visits(directory: Path, patients: Numbers, labels: Numbers, random: np.random.Generator) -> None:
    values = random.standard_normal((len(labels), 6)) + _SHIFT * random.standard_normal(6)
    values[:, 0] += 1.5 * labels
    values[:, 1] -= 1.0 * labels
    values = 100 + np.array([20, 15, 10, 5, 2, 1]) * values  # each in a unit of its own
    values[random.random(values.shape) < _MISSING] = np.nan
    with (directory / "visits.csv").open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["patient", *(f"measurement_{index + 1}" for index in range(6)), "comes_back"])
        for patient, row, label in zip(patients, values, labels, strict=True):
            rows.writerow([patient, *("" if np.isnan(value) else f"{value:.3f}" for value in row), label])


def _scans(directory: Path, patients: Numbers, labels: Numbers, random: np.random.Generator) -> None:
    images = 90 + 30 * random.standard_normal((len(labels), _PIXELS, _PIXELS)) + 20 * random.standard_normal()
    for image, label in zip(images, labels, strict=True):
        row, column = random.integers(2, _PIXELS - 4, 2)
        image[row : row + 3, column : column + 3] += 110 * label
    np.savez(directory / "scans.npz", x=images.clip(0, 255).astype(np.uint8), y=labels, patient=patients)


def _notes(directory: Path, patients: Numbers, labels: Numbers, random: np.random.Generator) -> None:
    with (directory / "notes.csv").open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["patient", "urgent", "text"])
        for patient, label in zip(patients, labels, strict=True):
            words = [*random.choice(_USUAL, 6), *random.choice(_URGENT if label else _CALM, 2)]
            rows.writerow([patient, label, " ".join(random.permutation(words))])


_WRITERS = {"tabular": _visits, "images": _scans, "text": _notes}
