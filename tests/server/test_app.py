"""Where the server listens."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest

from headrace.engine.options import OptionError
from headrace.server import AddressError, ServerOptions, bind


def test_local_by_default(caplog: pytest.LogCaptureFixture) -> None:
    with bind(ServerOptions(port=0)) as bound:
        assert bound.getsockname()[0] == "127.0.0.1"
    assert caplog.records == []


def test_all_interfaces_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), bind(ServerOptions(host="0.0.0.0", port=0)):
        pass
    assert "without authentication" in caplog.text


@pytest.mark.parametrize("options", [ServerOptions(port=70000), ServerOptions(host="999.0.0.1")])
def test_impossible_addresses(options: ServerOptions) -> None:
    with pytest.raises(AddressError, match=r"port 70000 does not exist|cannot listen on 999"):
        bind(options)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"keep_alive": -1.0}, "keep_alive: is -1.0; give seconds"),  # a comment after less than no silence
        ({"keep_alive": math.nan}, "keep_alive: is nan; give seconds"),
        ({"api_keys": ["k", ""]}, "api_key: is empty; give a key"),
    ],
)
def test_options_that_nothing_can_keep_to(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ServerOptions(**fields)


def test_a_taken_port() -> None:
    with bind(ServerOptions(port=0)) as taken:
        taken.listen()
        with pytest.raises(AddressError, match="give another --port or --host"):
            bind(ServerOptions(port=taken.getsockname()[1]))
