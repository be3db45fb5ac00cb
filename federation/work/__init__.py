"""Kinds of work: the questions of a coordinator to a client. Each kind is one package.

`work.py` of a package defines the work: its needs, its reply and the actions of the client. `wire.py` turns it into its
protobuf message and back. Fleets and workers look kinds up in `federation.work.registry`; no other
module knows which kinds exist.
"""
