"""Does a rule sacrifice a member? Nine rules on six tasks, honest and attacked, at rates chosen without test data.

| module | holds |
|---|---|
| `specification` | the specification of one run |
| `catalogue` | the names of the six tasks, and what is held out |
| `tasks` | the six tasks: ten members each, dealt anew by the seed |
| `laboratory` | one run: its measures |
| `attacks` | wrong targets, for every task |
| `scores` | the number by which runs are compared |
| `choice` | the rate of each rule and task, from the validation split |
| `verdict` | the procedure that says whether a rule is never dominated |
| `picture` | mean against worst member, a point a rule, a panel a task |
"""
