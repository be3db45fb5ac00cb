"""Private rounds: arithmetic and byte formats that the coordinator and its members share.

In a private round, the coordinator learns the Gram matrix of sketches of unit updates and one weighted sum of the
updates, and nothing else of them. The phases of a session are READY, DEAL, OPEN (openings 0 to 2), MASK, CONFIRM and
UNMASK. The modules hold pure functions and frozen dataclasses, without messages, network and storage. Sections are
those of docs/reference/private-protocol.md.

The primitives are those of `cryptography`, and BLAKE3. No random generator is used: all randomness is derived from a
member's secret (`derivation`). Python and NumPy do not compute in constant time: integers of Python take a time that
depends on their size, and a stream of field elements on how many words it skips. Secrets pass through NumPy's integer
operations, which do not branch on values, and through the primitives. Python's integers carry only public points, and
shares that the coordinator has received.

| module | section |
|---|---|
| `hashing`, `derivation`, `errors` | 2a: digests, views, keys; the errors |
| `streams`, `wire`, `payloads`, `encryption` | 2a: streams, words, payloads, ciphertexts |
| `fields`, `shamir`, `berlekamp_welch` | 1, 2: arithmetic mod p and q, shares, correction |
| `sketch`, `openings` | 2.3, 2.4: sketches, the Gram matrix |
| `member_keys`, `dealing`, `blocks`, `masks`, `unmasking` | 2.2, 2.3, 2.5, 2.6: keys, shares, masked updates, sums |
| `verified_mode`, `checks` | 2.7, 2.8, 4: the checks of the coordinator |
| `thresholds`, `accusations` | 1, 2.4: numbers of a cohort, excluded members |
| `cover`, `bounds` | 3.5: the coefficients that a member accepts |
| `evaluation`, `blur`, `random_direction` | 2b, 2c, 2d: the vectors that a member enters, with their noise |
"""
