"""Private rounds, from the coordinator's side.

| module | content |
|---|---|
| `phases` | the phases: whom each asks, for what work, and how many must reply |
| `settled` | the members of a session before the sum, and the sum |
| `session` | the conversation: from the invitation to the unmasked sum, with the checks of section 4 |
| `evaluation` | the session that sums the metrics of an evaluation |
| `repetition` | verifies steps and evaluations from the signed replies on record |
| `objectives` | the sums of the algorithms over objectives |
| `private_rule` | the sum that a rule over clients needs, and the step from it |
| `covered` | the coefficients that every member accepts |
| `gram` | the Gram matrix that a rule sees |
"""
