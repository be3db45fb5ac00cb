from tests.harness import python

# Prints how many heaps of threads there are: glibc places each at a multiple of 64 MiB, in a reserved range of that
# size. The used part is the mapping that starts there, and the rest is one without rights. Another mapping, such as the
# stack of a thread, may start there by chance.
_PROGRAM = """
import re, threading
from coordinator.thread_pool import share_heap
SHARE
barrier = threading.Barrier(9)
kept = []
def allocate():
    kept.append(bytearray(10_000))
    barrier.wait()
threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads:
    thread.start()
barrier.wait()
pattern = r"^([0-9a-f]+)-([0-9a-f]+) rw-p 00000000 00:00 0 *\\n\\2-([0-9a-f]+) ---p"
maps = re.findall(pattern, open("/proc/self/maps").read(), re.M)
size = 1 << 26
print(sum(int(start, 16) % size == 0 and int(end, 16) - int(start, 16) == size for start, _, end in maps))
"""


def test_threads_of_a_coordinator_share_one_heap() -> None:
    heaps = [int(python("-c", _PROGRAM.replace("SHARE", call)).stdout) for call in ("", "share_heap()")]
    assert heaps[0] > 0
    assert heaps[1] == 0
