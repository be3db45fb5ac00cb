"""The result of a run that has described data, as it is given to a simulation."""

import json
from collections.abc import Mapping
from pathlib import Path

from federation.errors import ArgumentError
from federation.statistics.result import written
from federation.text_files import read_text
from federation.value_words import in_words


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
