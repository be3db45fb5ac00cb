"""The parameters that a run does not share, as assignments and the terms of private rounds say it."""

from federation.run_sections import ParametersSpec
from federation.v1.common_pb2 import UnsharedParameters


def unshared_parameters(chosen: ParametersSpec) -> UnsharedParameters:
    """The message; empty where the run shares all."""
    return UnsharedParameters(personal=chosen.personal, frozen=chosen.frozen, buffers=chosen.buffers)
