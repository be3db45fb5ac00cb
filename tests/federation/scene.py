"""The member and the keys in the corpora of the fuzz tests."""

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation.trust.key_chain import CoordinatorKeys
from federation.trust.keys import new_tls_key
from federation.trust.member_files import MemberFiles
from tests.scripted import CLIENT, FEDERATION

KEY = Ed25519PrivateKey.from_private_bytes(b"k" * 32)  # of the member and of the coordinator in the corpus
MEMBER = MemberFiles(
    federation_id=FEDERATION,
    addresses=("localhost:1",),
    ca=b"",
    certificate=b"",
    tls_key=new_tls_key(),
    client_id=CLIENT,
    signing_key=KEY,
    coordinator=CoordinatorKeys(FEDERATION, KEY.public_key()),
)
