"""The kinds "secure-...": the stages of a session, from the member's side.

| module | contents |
|---|---|
| `terms` | the terms of a session, and the statement that a member signs with each reply |
| `vector` | the vector that a session sums: its values, and how it is normalised or clipped |
| `journal` | the records of a member about a session: durable, and erased with the attempt at the round |
| `member_checks` | the checks of section 3 of docs/reference/private-protocol.md |
| `allowed` | the bounds on the coefficients of a run |
| `orders` | the same rules, applied to recorded assignments |
| `ready`, `deal`, `sum` | one class for each stage; `stage` is their base |
| `wire` | their messages |
"""
