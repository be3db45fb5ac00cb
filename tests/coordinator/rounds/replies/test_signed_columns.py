"""The columns that repeat what a member signed hold it as the comparison expects it, whatever the text."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from coordinator.rounds.replies import signed_columns
from federation.v1.common_pb2 import ConsentManifest, DeclineManifest, ReceiptManifest
from storage.columns import Prose, cleaned
from storage.models import Assignment, Base, Consent, Reply

# Protobuf carries any text but lone surrogates; the long ones need escapes, or a cut, or both.
TEXTS = st.text(st.characters(exclude_categories=["Cs"])).map(lambda text: text * 3) | st.builds(
    lambda part, times: part * times,
    st.sampled_from(["x", "\x1b", "\u202e", " ", "\n", "東", "🏥"]),
    st.integers(0, 900),
)


def kept(table: type[Base], signed: Mapping[str, object]) -> dict[str, object]:
    """What a database returns for these columns."""
    types = {name: table.__table__.columns[name].type for name in signed}
    return {
        name: cleaned(str(value), kind.length) if isinstance(kind := types[name], Prose) else value
        for name, value in signed.items()
    }


@given(reason=TEXTS, message=TEXTS)
def test_any_text_that_a_member_signs_is_kept_as_it_is_compared(reason: str, message: str) -> None:
    for table, signed in (
        (Assignment, signed_columns.of_decline(DeclineManifest(reason=reason, message=message))),
        (Assignment, signed_columns.of_decline(DeclineManifest(reason="error", message=message))),
        (Consent, signed_columns.of_consent(ConsentManifest(reason=reason, message=message))),
        (Consent, signed_columns.of_consent(ConsentManifest(reason="owner", message=message))),
        (Reply, signed_columns.of_receipt(ReceiptManifest(reason="limit:samples"))),
    ):
        assert kept(table, signed) == signed
