"""What members hold: CPU-seconds of a member and of the coordinator for a run that describes data, and bytes.

`--size` is columns x samples x members. Each member has the same samples, half of its columns of float32 and half of
float64; the coordinator reads, adds up and shows what all have told, as `verify` does.
"""

import time

import numpy as np
from measuring import Document, cases, timed

from federation.statistics.data_columns import Column
from federation.statistics.held import chosen, held
from federation.statistics.result import result
from federation.statistics.rules import MemberRules
from federation.statistics.sums import encoded, sums_of

BINS = 20
FORMS = {"full": {"size": "1000x10000x8"}, "quick": {"size": "1000x1000x8"}, "smallest": {"size": "10x300x2"}}


def measure(size: str) -> Document:
    columns, samples, members = cases(size)[0]
    random = np.random.default_rng(0)
    names = tuple(Column(name=f"x{number}") for number in range(columns))
    data = random.normal(0.0, 1.0, (samples, columns))
    data[:, ::2] = data[:, ::2].astype(np.float32)
    told: list[bytes] = []

    def tell() -> None:
        rules, table = MemberRules(), held(data, data[:, 0])
        sums = [rules.told(sums_of(values, column, BINS)) for column, values in chosen(names, table)]
        told.append(encoded(samples, sums, names).tobytes())

    def show() -> int:
        return len(result(dict.fromkeys(map(str, range(members)), told[0]), names, BINS, ["train"]).document)

    member = timed(tell, time.process_time)
    coordinator = timed(show, time.process_time)
    return {
        "columns": columns,
        "samples": samples,
        "members": members,
        "member_cpu_seconds": member,
        "coordinator_cpu_seconds": coordinator,
        "reply_bytes": len(told[0]),
        "document_bytes": show(),
    }
