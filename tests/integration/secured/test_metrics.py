"""Scrapes beyond the loopback."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Iterator

import pytest

from tests.certificates import LOCAL, Secret
from tests.harness import BridgeProcess, running_bridge, wait_for
from tests.integration.secured.kit import ENGINE_A, TOKEN_A, TOKEN_METRICS, Kit

SCRAPER = "spiffe://cluster/scraper"


@pytest.fixture(name="scraped", scope="module")
def running_for_scrapes(kit: Kit) -> Iterator[BridgeProcess]:
    """Run a bridge whose metrics can be reached from everywhere."""
    with running_bridge(*kit.flags(), "--metrics-listen", "0.0.0.0:0") as bridge:
        yield bridge


def scrape(
    bridge: BridgeProcess, ca: str, *, path: str = "/metrics", shown: Secret | None = None, authorization: str = ""
) -> http.client.HTTPResponse:
    """Ask for a page and read it."""
    context = ssl.create_default_context(cafile=ca)
    if shown is not None:
        context.load_cert_chain(shown.certificate, shown.key)
    connection = http.client.HTTPSConnection("localhost", bridge.metrics_port, context=context, timeout=20)
    connection.request("GET", path, headers={"Authorization": authorization} if authorization else {})
    response = connection.getresponse()
    response.read()
    connection.close()
    return response


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        ("", 401),
        ("Bearer ", 401),
        (f"Bearer {'x' * 40}", 401),
        (f"Basic {TOKEN_METRICS}", 401),
        (f"Bearer {TOKEN_A}", 403),
        (f"Bearer {TOKEN_METRICS}", 200),
        (f"bearer {TOKEN_METRICS}", 200),
    ],
)
def test_a_token_of_the_right_role_is_asked_for(
    kit: Kit, scraped: BridgeProcess, authorization: str, status: int
) -> None:
    """Whether a token is missing, unknown or another's; health stays open, for those who only look at that."""
    response = scrape(scraped, kit.server.ca, authorization=authorization)
    assert response.status == status
    assert (response.headers["WWW-Authenticate"] == "Bearer") is (status == 401)
    assert scrape(scraped, kit.server.ca, path="/healthz").status == 200


def test_a_certificate_is_as_good_as_a_token(kit: Kit, scraped: BridgeProcess) -> None:
    """If its principal has the role; one of a stranger ends the connection."""
    assert scrape(scraped, kit.server.ca, shown=kit.secret(SCRAPER)).status == 200
    assert scrape(scraped, kit.server.ca, shown=kit.secret(ENGINE_A)).status == 403
    assert scrape(scraped, kit.server.ca, shown=kit.secret("nobody.example")).status == 401
    both = scrape(scraped, kit.server.ca, shown=kit.secret(SCRAPER), authorization=f"Bearer {TOKEN_METRICS}")
    assert both.status == 200
    two = scrape(scraped, kit.server.ca, shown=kit.secret(ENGINE_A), authorization=f"Bearer {TOKEN_METRICS}")
    assert two.status == 401
    with pytest.raises((ssl.SSLError, ConnectionError)):
        scrape(scraped, kit.server.ca, shown=kit.secret(SCRAPER, issuer=kit.stranger))


def is_believed(bridge: BridgeProcess, ca: str) -> bool:
    """Tell whether who trusts `ca` believes the certificate that scrapes are shown."""
    try:
        return scrape(bridge, ca, path="/healthz").status == 200
    except ssl.SSLCertVerificationError:
        return False


def test_scrapes_see_a_new_certificate(own_kit: Kit) -> None:
    """Even of another authority, which those who trust the old one alone do not believe."""
    with running_bridge(*own_kit.flags(), "--metrics-listen", "0.0.0.0:0") as bridge:
        assert scrape(bridge, own_kit.server.ca, path="/healthz").status == 200
        successor = own_kit.secret(*LOCAL, issuer=own_kit.stranger, trusts=own_kit.stranger)
        own_kit.server.put(own_kit.stranger.issue(*LOCAL), own_kit.stranger.certificate)
        old = own_kit.secret(SCRAPER)
        wait_for(lambda: is_believed(bridge, successor.ca))
        assert "certificate files changed" in bridge.log
        with pytest.raises(ssl.SSLCertVerificationError):
            scrape(bridge, old.ca, path="/healthz")
