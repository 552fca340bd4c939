"""Directories of every kind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.directory.servers import DirectoryServer, binaries, running_server
from tests.directory.worlds import AskingWorld, MemoryWorld, RedisWorld, World


@pytest.fixture(name="server", scope="module", params=sorted(binaries()))
def running_for_the_module(request: pytest.FixtureRequest) -> Iterator[DirectoryServer]:
    """Run one server of each kind for all tests of a module."""
    with running_server(request.param) as server:
        yield server


@pytest.fixture
def empty_server(server: DirectoryServer) -> Iterator[DirectoryServer]:
    """Lend the module's server, running and empty."""
    server.flush()
    yield server
    server.thaw()
    if server.process.poll() is not None:
        server.start()


@pytest.fixture(params=["memory", *sorted(binaries())])
def keeping(request: pytest.FixtureRequest) -> Iterator[World]:
    """Return a directory that somebody keeps."""
    if request.param == "memory":
        yield MemoryWorld()
        return
    with running_server(request.param) as server:
        yield RedisWorld(server)


@pytest.fixture(params=["memory", *sorted(binaries()), "static", "dns"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Return a directory of any kind."""
    if request.param == "memory":
        yield MemoryWorld()
    elif request.param in {"static", "dns"}:
        yield AskingWorld(by_name=request.param == "dns")
    else:
        with running_server(request.param) as server:
            yield RedisWorld(server)
