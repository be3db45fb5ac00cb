"""Private rounds, from the coordinator's side.

| module | what it holds |
|---|---|
| `phases` | one phase for each stage |
| `settled` | what a session is given, and what it settles |
| `session` | the conversation: from the invitation to the unmasked sum, with the checks of section 4 |
| `evaluation` | the session that sums the metrics of an evaluation |
| `verify` | verifies steps and evaluations from the signed replies on record |
| `objectives` | the sums of the algorithms over objectives |
| `step` | which sum an algorithm needs, and the step that it becomes |
"""
