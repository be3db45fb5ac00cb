"""The kinds "secure-...": the stages of a session, from the member's side.

| module | what it holds |
|---|---|
| `terms` | the terms of a session, and what a member signs with each reply |
| `vector` | the vector that a session sums: what it is made of, and how it is normalised or clipped |
| `journal` | what a member keeps of a session: durable, and erased with the attempt at the round |
| `refusals` | the checks of section 3 of docs/private-protocol.md |
| `work` | one class for each stage |
| `wire` | their messages |
"""
