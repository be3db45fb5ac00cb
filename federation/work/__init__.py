"""Kinds of work: what a coordinator can ask of a client. Each kind is one package.

`work.py` of a package says what the work is, what it needs, what its reply holds and what the client does. `wire.py`
turns it into its protobuf message and back. Fleets and workers look kinds up in `federation.work.registry`; no other
module knows which kinds exist.
"""
