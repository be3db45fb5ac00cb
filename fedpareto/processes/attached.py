"""The `fedpareto` command as a child that ends with its parent: `python -m fedpareto.processes.attached PID ...`.

On Linux the kernel kills it when the parent dies for any reason. On other systems the parent's own clean-up ends it.
"""

import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Lets the kernel kill this process when the parent dies; ends it now if the parent is dead already."""
    if sys.platform == "linux":
        import ctypes  # noqa: PLC0415 - only this function needs it

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    die_with(int(sys.argv.pop(1)))

    runpy.run_module("fedpareto", run_name="__main__", alter_sys=True)
