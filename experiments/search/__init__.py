"""How much of one member's update a malicious coordinator can make a private sum show, found by an optimiser.

The optimiser chooses all that a coordinator may choose: the coefficients, the members whose masked vectors count as
lost, the member that it attacks, and the t members that collude, whose vectors it subtracts. The functions of
`federation.secure` decide what honest members accept.

| module | holds |
|---|---|
| `specification` | the run specification of a search |
| `members` | what honest members accept |
| `plan` | what a coordinator chooses, and small changes of it |
| `target` | the cosine of what is left of the sums with the member's update |
| `optimiser` | the search: random ascents from extremal plans, and ascents along the gradient |
| `laboratory` | one run: its measures |
"""
