"""How much of one member's update a malicious coordinator can make a private sum show, found by an optimiser.

The optimiser chooses all that a coordinator may choose: the coefficients, the members whose masked vectors count as
lost, the member that it attacks, and the t members that collude, whose vectors it subtracts. The functions of
`federation.secure` decide what honest members accept, and blur and round their vectors.

| module | holds |
|---|---|
| `specification` | the run specification of a search |
| `members` | what honest members accept |
| `plan` | what a coordinator chooses, and small changes of it |
| `updates` | whose sums are read: ideal updates, and those of members that train |
| `target` | the cosine of what is left of the sums with the member's update, by formula |
| `reading` | the cosine of signs that are decoded from sums of blurred vectors |
| `failures` | whether a sum tells that a member's computation has failed |
| `optimizer` | the search: random ascents from extremal plans, and ascents along the gradient |
| `laboratory` | one run: its measures |
"""
