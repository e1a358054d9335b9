"""The local platform is reached directly, whatever proxy is set."""

import os
import urllib.request

import httpx
import pytest

from pipelines.core.settings import bypass_proxy_on_loopback

PROXY = "http://proxy.example:3128"


@pytest.fixture(autouse=True)
def proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(variable, "")  # so that what a test sets is undone
    for variable in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(variable, PROXY)


@pytest.mark.parametrize("variable", ["NO_PROXY", "no_proxy"])
def test_the_loopback_joins_what_is_there(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "corp.example, 10.0.0.1")
    bypass_proxy_on_loopback()
    bypass_proxy_on_loopback()
    names = "corp.example,10.0.0.1,127.0.0.1,localhost"
    assert (os.environ["NO_PROXY"], os.environ["no_proxy"]) == (names, names)


@pytest.mark.parametrize(("given", "direct"), [("", False), ("corp.example", True), ("*", True)])
def test_clients_heed_it(given: str, direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not urllib.request.proxy_bypass("127.0.0.1")
    monkeypatch.setenv("NO_PROXY", given)
    bypass_proxy_on_loopback()
    for host in ("127.0.0.1", "localhost"):
        assert urllib.request.proxy_bypass(host)  # what requests asks, and so MLflow
        with httpx.Client() as client:
            transport = client._transport_for_url(httpx.URL(f"http://{host}:5000"))
            assert transport is client._transport
    assert bool(urllib.request.proxy_bypass("corp.example")) is direct
