"""Cells in a kernel of Jupyter, in the environment that has Jupyter's packages.

python tests/programs/jupyter_kernel.py run NOTEBOOK     prints the outputs of its cells as JSON
python tests/programs/jupyter_kernel.py hold FILE        has a kernel run the code of a file, until this is killed
"""

import json
import sys
from pathlib import Path

import nbformat
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

SECONDS = 280


def run(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=SECONDS).execute()
    json.dump([output for cell in notebook.cells for output in cell.get("outputs", [])], sys.stdout)


def hold(path: Path) -> None:
    manager = KernelManager()
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=SECONDS)
    client.execute(path.read_text())
    while (message := client.get_iopub_msg(timeout=None))["msg_type"] != "error":
        continue
    sys.exit("\n".join(message["content"]["traceback"]))


if __name__ == "__main__":
    {"run": run, "hold": hold}[sys.argv[1]](Path(sys.argv[2]))
