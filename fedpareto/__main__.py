"""`python -m fedpareto`, for where the console script is not on the path."""

import os
import sys

# Python puts the current directory first on its path. Files of others may lie there, such as a bundle to be verified,
# and `--code .` is the way to name code of one's own. Nothing else is imported before this.
_PROJECT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:] = [entry for entry in sys.path if entry == _PROJECT or entry not in ("", os.getcwd())]

from fedpareto.cli.entry import main  # noqa: E402

if __name__ == "__main__":
    main()
