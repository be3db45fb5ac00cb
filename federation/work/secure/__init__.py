"""The kinds "secure-...": the phases of a session, from the member's side.

| module | contents |
|---|---|
| `terms` | the terms of a session, and the statement that a member signs with each reply |
| `sessions` | the terms and the work of a session, from the specification, the round and the phase |
| `vector` | the vector that a session sums: its values, and how it is normalised or clipped |
| `journal` | the records of a member about a session: durable, and erased with the attempt at the round |
| `member_checks` | the checks of section 3 of docs/reference/private-protocol.md |
| `allowed` | the bounds on the coefficients of a run |
| `limits` | the owner's limits: sessions, sums and masked vectors of a data set and of a model |
| `failing` | computations that fail: what is sent in place of their results, and how they count |
| `orders` | the same rules, applied to recorded assignments |
| `ready`, `deal`, `sum` | one class for each phase; `stage` is their base |
| `wire` | their messages |
"""
