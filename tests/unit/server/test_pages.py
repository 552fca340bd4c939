"""Page tokens, and pages that end early because their entries are heavy."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvbridge.core.catalog import Catalog, Route
from kvbridge.core.errors import InvalidFieldError
from kvbridge.server import catalog as service
from kvbridge.server.pages import decode_page_token, encode_page_token
from kvbridge.v1 import catalog_service_pb2 as pb
from kvbridge.wire.catalog import encode_route


@given(st.lists(st.text(max_size=20), min_size=1, max_size=13).map(tuple))
def test_a_key_survives_its_token(key: tuple[str, ...]) -> None:
    """Whatever an entry is called, its page token leads behind it."""
    assert decode_page_token(encode_page_token(key)) == key


@given(st.one_of(st.text(max_size=40), st.binary(max_size=40).map(lambda raw: raw.decode("latin-1"))))
@example("W10=")
@example("W1tdXQ==")
@example("MQ==")
@example("A" * 100_000)
@example("W1tb" * 10_000)
def test_a_made_up_token_is_refused_by_field(token: str) -> None:
    """It never leads anywhere by accident but where a token of the service would."""
    try:
        key = decode_page_token(token)
    except InvalidFieldError as error:
        key = (error.field,)
    assert key == ("page_token",) or decode_page_token(encode_page_token(key) if key else "") == key


def test_a_page_of_heavy_entries_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """One entry always fits; the next page begins behind it, and the last one has no token."""
    monkeypatch.setattr(service, "PAGE_BYTES_MAX", 1)
    catalog = Catalog(routes=[Route(name=name, edge=name) for name in ("b", "a", "c")])
    request, names = pb.ListRoutesRequest(page_size=10), []
    for _ in range(3):
        [route], request.page_token = service._page(request, Catalog.routes_after, catalog, encode_route)
        names.append(route.name)
    assert names == ["a", "b", "c"]
    assert request.page_token == ""
