"""The first import of the fork server, which collects no garbage while it imports: a fifth of its start.

What is imported stays. Each child collects garbage again (`forked.run`).
"""

import gc

gc.disable()
