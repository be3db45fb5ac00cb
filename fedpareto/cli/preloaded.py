"""The last import of the fork server: it does once what each fork would repeat, and makes the inherited memory cheap.

A garbage collection in a fork would touch, and so copy, the memory of everything imported (0.2 CPU seconds). The
finalizers that PyTorch's import registers would remove its kernels from tables that end with the process (0.03).
"""

import gc
import sys
from weakref import finalize

from sqlalchemy.orm import configure_mappers

from fedpareto.cli.commands import TABLE, load
from fedpareto.cli.main import program
from fedpareto.on_first_use import what_waits

# Commands that train by themselves, for long, or need an extra.
_ALONE = {
    f"fedpareto.cli.{name}"
    for name in ("admin.console", "research.data", "research.experiment_run", "research.simulate")
}

configure_mappers()
program()
for target, _ in (row for rows in TABLE.values() for row in rows.values()):
    load(target)
for name, module in list(sys.modules.items()):
    if name.startswith("fedpareto.cli.") and name not in _ALONE:
        for value in vars(module).values():
            what_waits(value)
gc.freeze()
for finalizer in list(finalize._registry):  # type: ignore[attr-defined]
    finalizer.atexit = False
