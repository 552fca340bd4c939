"""The running catalog: its file in one piece or not at all, the API, and the kill switch."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvbridge.catalog_file import CatalogFileError
from kvbridge.core.catalog import Catalog, ModelEntry, Route, RoutePolicy
from kvbridge.core.errors import WrongStateError
from kvbridge.node.catalog import CatalogKeeper
from kvbridge.node.catalog_watch import WatchedFile
from tests import builders

POLL_SECONDS = 0.01


def _declaring(*names: str) -> str:
    return "routes: [" + ", ".join(f"{{name: {name}, edge: {name}}}" for name in names) + "]"


def _names(catalog: Catalog) -> list[str]:
    return [route.name for route in catalog.routes]


def _replace(file: Path, text: str) -> None:
    """Put `text` in place of the file as careful writers do."""
    new = file.with_suffix(".new")
    new.write_text(text)
    new.replace(file)


def _remove(file: Path) -> None:
    file.unlink()


class Changes:
    """Waits for what a keeper tells its listeners."""

    def __init__(self, keeper: CatalogKeeper) -> None:
        self.queue: asyncio.Queue[Catalog] = asyncio.Queue()
        keeper.add_listener(self.queue.put_nowait)

    async def next(self) -> Catalog:
        """Return the catalog after the next change."""
        return await asyncio.wait_for(self.queue.get(), 10.0)


@asynccontextmanager
async def _keeping(file: Path) -> AsyncIterator[tuple[CatalogKeeper, Changes]]:
    keeper = CatalogKeeper(str(file), POLL_SECONDS)
    await keeper.start()
    try:
        yield keeper, Changes(keeper)
    finally:
        await keeper.close()


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10.0):
        while not condition():  # noqa: ASYNC110 - a refusal tells no listener
            await asyncio.sleep(POLL_SECONDS)


async def _refused(keeper: CatalogKeeper) -> str:
    await _until(lambda: keeper.file_problem != "")
    return keeper.file_problem


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Write a catalog file with one route."""
    path = tmp_path / "catalog.yaml"
    path.write_text(_declaring("a"))
    return path


async def test_a_new_content_runs_without_a_restart(file: Path) -> None:
    """Listeners are told, and version and time go on."""
    async with _keeping(file) as (keeper, changes):
        first = (keeper.version, keeper.catalog, keeper.changed_at)
        assert _names(keeper.catalog) == ["a"]
        _replace(file, _declaring("a", "b"))
        assert _names(await changes.next()) == ["a", "b"]
        assert keeper.version == first[0] + 1
        assert keeper.changed_at >= first[2]
        assert _names(first[1]) == ["a"]


async def test_a_bad_content_is_refused_whole_and_once(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The running catalog stays, the problem names line and field, and is logged once until the content changes."""
    caplog.set_level(logging.ERROR)
    async with _keeping(file) as (keeper, changes):
        _replace(file, _declaring("b") + "\nmodels: [{tag: {}}]")
        problem = await _refused(keeper)
        assert "catalog.yaml:2: models[0].tag.name: must not be empty" in problem
        assert _names(keeper.catalog) == ["a"]
        _replace(file, _declaring("c"))
        assert _names(await changes.next()) == ["c"]
        assert keeper.file_problem == ""
    assert [record.getMessage() for record in caplog.records] == ["catalog file refused; the running catalog stays"]


async def test_the_former_content_ends_a_problem_without_a_change(file: Path) -> None:
    """Going back to what runs is no new version."""
    async with _keeping(file) as (keeper, changes):
        running = keeper.catalog
        _replace(file, "models: 1")
        await _refused(keeper)
        _replace(file, _declaring("a"))
        await _until(lambda: keeper.file_problem == "")
        assert keeper.catalog is running
        assert (keeper.version, changes.queue.qsize()) == (1, 0)


async def test_a_file_that_vanishes_leaves_the_running_catalog(file: Path) -> None:
    """It is missed, and taken again when it is back."""
    async with _keeping(file) as (keeper, changes):
        _remove(file)
        assert "cannot be read: No such file" in await _refused(keeper)
        assert _names(keeper.catalog) == ["a"]
        _replace(file, _declaring("back"))
        assert _names(await changes.next()) == ["back"]
        assert keeper.file_problem == ""


async def test_the_swap_of_a_link_is_a_change(tmp_path: Path) -> None:
    """A ConfigMap is updated by pointing the link of its folder elsewhere; the file's own path stays as it is."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "catalog.yaml").write_text(_declaring(name))
    stamps = (tmp_path / "a" / "catalog.yaml").stat()
    os.utime(tmp_path / "b" / "catalog.yaml", ns=(stamps.st_atime_ns, stamps.st_mtime_ns))
    link, new_link = tmp_path / "..data", tmp_path / "..new"
    link.symlink_to("a")
    (tmp_path / "catalog.yaml").symlink_to("..data/catalog.yaml")
    async with _keeping(tmp_path / "catalog.yaml") as (keeper, changes):
        assert _names(keeper.catalog) == ["a"]
        new_link.symlink_to("b")
        new_link.replace(link)
        assert _names(await changes.next()) == ["b"]


async def test_a_signal_need_not_wait_for_the_poll(file: Path) -> None:
    """Being told to look is enough, however rarely the file is polled."""
    keeper = CatalogKeeper(str(file), 3600.0)
    await keeper.start()
    changes = Changes(keeper)
    _replace(file, _declaring("b"))
    keeper.look_soon()
    assert _names(await changes.next()) == ["b"]
    await keeper.close()


async def test_a_node_does_not_start_on_a_bad_file(file: Path) -> None:
    """There is no running catalog to stay with, so the error stops the start."""
    _replace(file, "models: [{}]")
    with pytest.raises(CatalogFileError, match=r"catalog\.yaml:1: models\[0\]\.tag: is required"):
        await CatalogKeeper(str(file), POLL_SECONDS).start()
    with pytest.raises(CatalogFileError, match="cannot be read"):
        await CatalogKeeper(str(file.with_name("missing")), POLL_SECONDS).start()


async def test_what_a_file_declares_the_api_does_not_change(file: Path) -> None:
    """The refusal names the file, and nothing changes."""
    async with _keeping(file) as (keeper, _):
        with pytest.raises(WrongStateError, match=str(file)):
            keeper.change(lambda catalog: catalog.with_route(Route(name="b")))
        assert (_names(keeper.catalog), keeper.file) == (["a"], str(file))


async def test_without_a_file_the_api_changes_everything() -> None:
    """It starts empty, over the node's own defaults, and counts each change."""
    keeper = CatalogKeeper(None, POLL_SECONDS, built_in=RoutePolicy(tokens_min=7), clock=lambda: 12.5)
    await keeper.start()
    assert keeper.catalog == Catalog(defaults=RoutePolicy(tokens_min=7))
    entry = ModelEntry(tag=builders.model_tag())
    assert keeper.change(lambda catalog: catalog.with_model(entry)) == 1
    assert keeper.catalog.models == (entry,)
    assert (keeper.version, keeper.changed_at, keeper.file) == (1, 12.5, "")
    await keeper.close()


def _refuse(_: Catalog) -> Catalog:
    raise LookupError


async def test_a_change_that_is_refused_changes_nothing() -> None:
    """Version and listeners see successful changes alone."""
    keeper = CatalogKeeper("", POLL_SECONDS)
    changes = Changes(keeper)
    with pytest.raises(LookupError):
        keeper.change(_refuse)
    assert (keeper.version, changes.queue.qsize()) == (0, 0)


async def test_the_kill_switch_works_beside_a_file(file: Path) -> None:
    """It is set with a reason, and ended, whatever the catalog is read from."""
    async with _keeping(file) as (keeper, changes):
        assert keeper.kill_switch_reason() is None
        assert keeper.set_kill_switch(engaged=True, why="bad answers")
        assert keeper.kill_switch_reason() == "bad answers"
        assert await changes.next() is keeper.catalog
        assert keeper.set_kill_switch(engaged=True, why="")
        assert keeper.kill_switch_reason()
        assert not keeper.set_kill_switch(engaged=False, why="")
        assert keeper.kill_switch_reason() is None


async def test_a_declared_kill_switch_stays_until_the_file_ends_it(file: Path) -> None:
    """Ending what was set does not end what is declared."""
    _replace(file, "kill_switch: true")
    async with _keeping(file) as (keeper, changes):
        assert keeper.kill_switch_reason()
        assert keeper.set_kill_switch(engaged=False, why="")
        await changes.next()
        _replace(file, "kill_switch: false")
        await changes.next()
        assert keeper.kill_switch_reason() is None


def test_an_unchanged_file_is_not_read_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once its time stamp is old enough to tell two writes apart, a look costs one call."""
    old = file.stat().st_mtime_ns - 60_000_000_000
    os.utime(file, ns=(old, old))
    monkeypatch.setattr("kvbridge.files.signatures._SETTLED_NANOSECONDS", -(10**12))
    watched = WatchedFile(str(file))
    assert isinstance(watched.look(), Catalog)
    monkeypatch.setattr("kvbridge.node.catalog_watch.read_bytes", lambda _: pytest.fail("was read again"))
    assert watched.look() is None


def test_a_write_within_the_resolution_of_the_clock_is_seen(file: Path) -> None:
    """A content of the same size under the same time stamp is found as long as the stamp is young."""
    stamp = file.stat().st_mtime_ns
    watched = WatchedFile(str(file))
    assert isinstance(watched.look(), Catalog)
    assert watched.look() is None
    file.write_text(_declaring("b"))
    os.utime(file, ns=(stamp, stamp))
    found = watched.look()
    assert isinstance(found, Catalog)
    assert _names(found) == ["b"]


def test_the_same_problem_is_news_once(file: Path) -> None:
    """Looking again at the same bad content, or at the same gap, says nothing new."""
    watched = WatchedFile(str(file))
    file.write_text("nonsense: 1")
    assert isinstance(watched.look(), CatalogFileError)
    assert watched.look() is None
    file.unlink()
    assert isinstance(watched.look(), CatalogFileError)
    assert watched.look() is None
