"""The `fedpareto` command as a process that outlives its parent, for a limited time: `python -m ... SECONDS ...`."""

import os
import runpy
import signal
import sys
import threading


def end_after(seconds: float) -> None:
    """Ends this process, as on SIGTERM, after this time."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    end_after(float(sys.argv.pop(1)))

    runpy.run_module("fedpareto", run_name="__main__", alter_sys=True)
