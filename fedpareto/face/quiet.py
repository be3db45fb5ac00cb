"""Logs: where the caller has set up none, a cell or script gets no line of ours on standard error."""

import logging

from fedpareto.code_path import PACKAGES


def without_log_lines() -> None:
    """Keeps Python from printing our warnings where no handler is set; what they say is in results and errors."""
    for package in PACKAGES:
        logger = logging.getLogger(package)
        if not logger.handlers:
            logger.addHandler(logging.NullHandler())
