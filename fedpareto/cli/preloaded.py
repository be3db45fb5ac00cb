"""The last import of the server of forks: makes once what each fork would make for itself, and inheriting it cheap.

A collection of garbage in a fork would touch, and so copy, the memory of everything imported (0.2 CPU seconds). The
finalizers that PyTorch's import registers would take its kernels out of tables that end with the process (0.03).
"""

import gc
from weakref import finalize

from sqlalchemy.orm import configure_mappers

from fedpareto.cli.main import program

configure_mappers()
program()
gc.freeze()
for finalizer in list(finalize._registry):  # type: ignore[attr-defined]
    finalizer.atexit = False
