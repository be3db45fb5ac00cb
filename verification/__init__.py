"""Verifies a bundle offline: an outsider recomputes a run from signed facts.

It reads a file, and needs neither a coordinator nor its database. Signatures and bindings (`envelopes`), the Gram
matrices and the models (`arithmetic`) are code of its own, so that it does not repeat mistakes of the coordinator. Of
the coordinator's code it uses the rules, which are pure functions of K, and the conversation of a private round.
"""
