"""The result of a run that has described data, as it is given to a simulation."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from federation.errors import ArgumentError
from federation.statistics.result import written
from federation.text_files import read_text
from federation.value_words import in_words
from fedpareto.simulation.simulate import Simulation


def statistics_of(given: object) -> bytes:
    """The document of a result: of a `History`, a dict, or the path of a JSON file; empty for None.

    Raises:
        ArgumentError: it is none of these, or the file cannot be read.
    """
    if given is None:
        return b""
    found = getattr(given, "statistics", given)
    if isinstance(found, str | Path):
        try:
            found = json.loads(read_text(Path(found)))
        except (OSError, ValueError, RecursionError) as error:  # EncodingError is a ValueError
            raise ArgumentError(f"statistics: cannot read {given}: {error}") from None
    if not isinstance(found, Mapping):
        raise ArgumentError(
            "statistics: needed is a History of a run that has described data, its `statistics`, or the path of a JSON "
            f"file; got {in_words(given)}"
        )
    try:
        return written(found)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"statistics: no result of a run: {error}") from None


def described_by(given: Path | None, **sources: Any) -> bytes:
    """As `statistics_of`; of a specification (SPEC.toml), the document of its run, which is simulated here.

    `sources` are the arguments of `Simulation` that say whose data are described.

    Raises:
        ArgumentError: the file is none of these, or nobody described data.
        Exception: as of `Simulation`.
    """
    if given is None or given.suffix != ".toml":
        return statistics_of(given)
    with (
        tempfile.TemporaryDirectory() as directory,
        Simulation(read_text(given).encode(), Path(directory, "home"), **sources) as simulation,
    ):
        history = simulation.run()
    if history.statistics is None:
        raise ArgumentError(
            f'{given}: the run ended {history.state}; needed: one of kind = "statistics" that describes'
        )
    return statistics_of(history)
