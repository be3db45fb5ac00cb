"""A plugin of mypy that adds nothing to it: it keeps garbage from being collected, a sixth of the CPU time of a run.

mypy then takes 0.9 GB of memory, where it takes 0.75 GB otherwise.
"""

import gc

from mypy.plugin import Plugin


def plugin(version: str) -> type[Plugin]:
    """What mypy calls before it reads the files that it checks."""
    gc.set_threshold(1_000_000_000)  # mypy enables it again now and then
    return Plugin
