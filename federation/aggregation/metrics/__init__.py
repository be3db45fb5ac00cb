"""The metrics of a round, as pure functions of what was signed: the coordinator and a verifier call the same ones."""
