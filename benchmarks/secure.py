"""The secure round's arithmetic: CPU seconds and peak memory of each part for m = 20 members, on one thread.

Each part runs in a process of its own, best of several. Its memory is what the part adds to the process's peak; the
vectors of d coordinates that it is given or makes exist before. No training, no disk, no network.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from federation.secure import hashing, openings, sketch, unmasking, verification
from federation.secure.blocks import blocks
from federation.secure.checks import failures_of_sum
from federation.secure.dealing import DealShares, deal_shares
from federation.secure.derivation import confirm_key, deal_key
from federation.secure.fields import F_Q
from federation.secure.keys import check_keys, member_keys, pair_private_key, shared_secret
from federation.secure.masks import masked, masks_of_sum, member_masks, reals, unmask
from federation.secure.sealing import seal, unseal
from federation.secure.shamir import share
from federation.secure.streams import Stream
from federation.secure.thresholds import Mode, Thresholds
from federation.secure.wire import unpack

SESSION, VIEW, FINAL, TAU = hashing.session(b"terms"), b"v" * 32, b"f" * 32, b"t" * 32
Part = Callable[[], object]


class Round:
    """What the parts work on: m members of a session, one update, one sum.

    Attributes:
        numbers: of the cohort, mode `verified`.
        d: coordinates of an update.
    """

    def __init__(self, m: int, d: int) -> None:
        self.numbers, self.d = Thresholds(m, Mode.VERIFIED), d
        self.ids = [f"silo-{i:03}" for i in range(m)]
        self.secrets = [bytes([i]) * 32 for i in range(m)]
        self.keys = [member_keys(secret, SESSION) for secret in self.secrets]
        self.points = list(range(1, m + 1))

    def member(self) -> dict[str, Part]:
        """What one member computes."""
        numbers, d, ids, keys, me = self.numbers, self.d, self.ids, self.keys, self.ids[0]
        u = np.random.default_rng(0).standard_normal(d, dtype=np.float32)
        u /= np.linalg.norm(u)
        S = sketch.first_sketch(SESSION, blocks(u[:1000]), numbers.k)
        T = sketch.second_elements(TAU, blocks(u[:1000]))
        dealt = deal_shares(keys[0], S, numbers, self.secrets[0], VIEW)
        held = verification.check_shares(T, self.points, numbers.t, self.secrets[0], FINAL)
        publics_c = {name: key.public.c for name, key in zip(ids, keys, strict=True)}
        publics_s = {name: key.public.s for name, key in zip(ids, keys, strict=True)}
        challenge = verification.challenge(TAU)
        A = [2**32 // numbers.m] * numbers.m

        def deal() -> None:
            shares = deal_shares(keys[0], S, numbers, self.secrets[0], VIEW)
            for name, other, part in zip(ids[1:], keys[1:], shares[1:], strict=True):
                seal(deal_key(shared_secret(keys[0].c, other.public.c), VIEW, me, name), part.to_bytes(), VIEW)

        def take() -> None:
            for name, other, part in zip(ids[1:], keys[1:], dealt[1:], strict=True):
                key = deal_key(shared_secret(keys[0].c, other.public.c), VIEW, name, me)
                DealShares.from_bytes(unseal(key, seal(key, part.to_bytes(), VIEW), VIEW), numbers.k)

        def opening() -> None:
            noise = openings.noise(self.secrets[0], VIEW, numbers.k, numbers.m)
            masks = openings.open_masks(me, keys[0].c, publics_c, VIEW)
            shares = np.stack([part.sketch for part in dealt])
            openings.opening(shares, dict(zip(ids, self.points, strict=True)), me, noise, masks)

        def mask() -> None:
            own = member_masks(me, keys[0].s, publics_s, keys[0].sigma_b, VIEW)
            for block in masked(blocks(u), A[0], own):
                block.tobytes()  # goes to the payload

        def confirm() -> None:
            shares = verification.check_shares(T, self.points, numbers.t, self.secrets[0], FINAL)
            for name, other, part in zip(ids[1:], keys[1:], shares[1:], strict=True):
                seal(confirm_key(shared_secret(keys[0].c, other.public.c), FINAL, me, name), part.to_bytes(), FINAL)

        return {
            "check 2m keys": lambda: check_keys(key.public for key in keys),
            "S-sketch": lambda: sketch.first_sketch(SESSION, blocks(u), numbers.k),
            "shares and ciphertexts of DEAL": deal,
            "ciphertexts to shares": take,
            "elements of OPEN": opening,
            "masked update y": mask,
            "T-sketch": lambda: sketch.second_elements(TAU, blocks(u)),
            "shares and ciphertexts of CONFIRM": confirm,
            "answers of UNMASK": lambda: verification.check_answers(held, A, challenge),
        }

    def coordinator(self) -> dict[str, Part]:
        """What the coordinator computes, in a round in which two members were lost at MASK."""
        numbers, d, m, keys = self.numbers, self.d, self.numbers.m, self.keys
        V, lost = self.ids[: m - 2], self.ids[m - 2 :]
        total, y = np.ones(d, np.uint32), np.arange(d, dtype=np.uint32)
        sigma = np.concatenate([unpack(F_Q, key.sigma_b, 5) for key in keys])
        shares = share(F_Q, sigma, numbers.t_mask - 1, self.points, Stream(VIEW)).reshape(m, m, 5)
        lied = shares.copy()
        lied[0] = 1
        checks = [unmasking.commits(hashing.commitment(key.sigma_b)) for key in keys]
        elements = Stream(VIEW).elements(F_Q, numbers.m * (numbers.m + 1) // 2) & np.uint64(2**30 - 1)
        T = sketch.second_elements(TAU, blocks(np.full(100, 0.1)))
        dealt = [verification.check_shares(T, self.points, numbers.t, secret, FINAL) for secret in self.secrets]
        A, challenge = [2**32 // m] * m, verification.challenge(TAU)
        given = {
            name: verification.check_answers([row[i] for row in dealt], A, challenge) for i, name in enumerate(self.ids)
        }
        liars = given | {self.ids[0]: given[self.ids[1]]}
        points = dict(zip(self.ids, self.points, strict=True))

        def removed() -> None:
            private = {name: pair_private_key(keys[self.ids.index(name)].sigma_s, SESSION) for name in lost}
            publics = {name: key.public.s for name, key in zip(self.ids, keys, strict=True)}
            sigma_b = {name: key.sigma_b for name, key in zip(self.ids, keys, strict=True)}
            unmask(total, masks_of_sum(V, sigma_b, private, publics, VIEW))

        return {
            "add one y": lambda: np.add(total, y, out=total),
            "Gram matrix": lambda: openings.gram([elements] * m, m),
            "mask secrets": lambda: unmasking.recover(self.points, shares, checks, t_mask=numbers.t_mask, t=numbers.t),
            "mask secrets, one liar": lambda: unmasking.recover(
                self.points, lied, checks, t_mask=numbers.t_mask, t=numbers.t
            ),
            "masks removed, two lost": removed,
            "length of R": lambda: failures_of_sum((reals(block) for block in blocks(total)), [1.0]),
            "T-sketch of R": lambda: sketch.second_sketch(TAU, (reals(block) / 64 for block in blocks(total))),
            "norms and sums of `verified`": lambda: verification.examine(points, given, self.ids, numbers.t),
            "norms and sums, one liar": lambda: verification.examine(points, liars, self.ids, numbers.t),
        }


def resident(field: str) -> float:
    """Bytes of this process in memory: now (VmRSS), or at the most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * int(next(line for line in lines if line.startswith(field)).split()[1])


def measured(m: int, d: int, repeats: int, who: str, name: str) -> dict[str, Any]:
    """One part, in this process."""
    part = getattr(Round(m, d), who)()[name]
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before, times = resident("VmRSS"), []
    for _ in range(repeats):
        start = time.process_time()
        part()
        times.append(time.process_time() - start)
    return {"who": who, "part": name, "m": m, "d": d, "seconds": min(times), "memory": resident("VmHWM") - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="m = 20, d = 0.8 million")
    parser.add_argument("--smallest", action="store_true", help="m = 5, d = 1000, once, in one process")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--part", nargs=5, help=argparse.SUPPRESS)  # m, d, repeats, who, name: in this process
    options = parser.parse_args()
    if options.part:
        m, d, repeats, who, name = options.part
        json.dump(measured(int(m), int(d), int(repeats), who, name), sys.stdout)
        return
    m, repeats = (5, 1) if options.smallest else (20, 3)
    lengths = (1_000,) if options.smallest else (800_000,) if options.quick else (800_000, 11_200_000)
    parts = [(who, name) for who in ("member", "coordinator") for name in getattr(Round(m, 1_000), who)()]
    table, environment = [], os.environ | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    for d in lengths:
        for who, name in parts:
            if options.smallest:
                table.append(measured(m, d, repeats, who, name))
                continue
            command = [sys.executable, __file__, "--part", str(m), str(d), str(repeats), who, name]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment)
            table.append(json.loads(done.stdout))
    if options.json:
        json.dump({"parts": table}, sys.stdout)
        print()
        return
    print(f"m = {m}, mode verified; CPU milliseconds, MB beside the vectors of d coordinates")
    print(f"{'who':<12} {'part':<34} {'d':>11} {'ms':>8} {'MB':>6}")
    for row in table:
        ms, mb = 1e3 * row["seconds"], row["memory"] / 1e6
        print(f"{row['who']:<12} {row['part']:<34} {row['d']:>11,} {ms:>8.1f} {mb:>6.1f}")


if __name__ == "__main__":
    main()
