"""Keeps the running catalog: from a file that is watched, or as it is changed by the API."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvbridge.catalog_file import CatalogFileError
from kvbridge.core.catalog import Catalog, RoutePolicy
from kvbridge.core.errors import WrongStateError
from kvbridge.files import Poller
from kvbridge.node.catalog_watch import WatchedFile
from kvbridge.node.kill_switch_file import KillSwitchFile, KillSwitchFileError
from kvbridge.node.state_file import NotPersistedError

_log = logging.getLogger(__name__)

_DECLARED = "the catalog declares it"
_SET_WITHOUT_WHY = "it was set without a reason"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningCatalog:
    """The catalog in force, swapped as a whole."""

    catalog: Catalog
    """What is declared."""
    version: int
    """Counts the changes since the node started, those of the kill switch with them."""
    changed_at: float
    """When it was last changed, in seconds of Unix time."""


class CatalogKeeper:
    """The running catalog and the kill switch. Everything but reading the file happens on the event loop's thread."""

    def __init__(
        self,
        file: str | None,
        poll_seconds: float,
        *,
        built_in: RoutePolicy | None = None,
        switch_file: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Keep the catalog in `file`, or, without one, whatever the API puts into it.

        `built_in` are the defaults that hold unless the file has others; `switch_file`, if one is named, keeps the kill
        switch over restarts; `clock` gives seconds of Unix time.
        """
        self._clock = clock
        self._file = None if not file else str(Path(file).absolute())
        self._watched = None if self._file is None else WatchedFile(self._file, built_in)
        self._running = RunningCatalog(catalog=Catalog(defaults=built_in), version=0, changed_at=clock())
        self._file_problem = ""
        self._switch_why: str | None = None
        self._switch_order = ""
        self._no_room: str | None = None
        self._saving: set[asyncio.Task[None]] = set()
        self.on_kill_switch: Callable[[str | None], str] = lambda _: ""
        self._switch_file = KillSwitchFile(switch_file) if switch_file else None
        self._switch_writing = asyncio.Lock()
        self._listeners: list[Callable[[Catalog], None]] = []
        self._poller = Poller("catalog file", look=self._look, take=self._take, seconds=poll_seconds)

    def __repr__(self) -> str:
        """Show what runs, and whence it comes."""
        problem = ", newest content refused" if self._file_problem else ""
        return f"<CatalogKeeper of {self._file or 'the API'}: version {self.version}, {self.catalog!r}{problem}>"

    # Life

    async def start(self) -> None:
        """Put the kill switch back as it was, read the file, if there is one, and begin to watch it.

        Raises:
            CatalogFileError: what the file holds cannot run.
            KillSwitchFileError: the kill switch cannot be read or written.
        """
        self._load_kill_switch()
        if self._watched is None:
            return
        found = await asyncio.to_thread(self._watched.look)
        if isinstance(found, CatalogFileError):
            raise found
        assert found is not None, "the first look always finds something"
        self._swap(found)
        self._poller.start()

    async def close(self) -> None:
        """Stop watching."""
        await self._poller.close()
        await asyncio.gather(*self._saving)

    # What runs

    @property
    def catalog(self) -> Catalog:
        """Return the running catalog."""
        return self._running.catalog

    @property
    def version(self) -> int:
        """Return how often it has changed since the node started."""
        return self._running.version

    @property
    def changed_at(self) -> float:
        """Return when it was last changed, in seconds of Unix time."""
        return self._running.changed_at

    @property
    def file(self) -> str:
        """Return the file that it is read from; empty if the API changes it."""
        return self._file or ""

    @property
    def file_problem(self) -> str:
        """Return why the file's newest content was refused; empty if it runs."""
        return self._file_problem

    def kill_switch_reason(self) -> str | None:
        """Return why every handoff is text, or None if the kill switch is off."""
        if self._switch_why is not None:
            return self._switch_why
        if self._no_room is not None:
            return self._no_room
        return _DECLARED if self.catalog.kill_switch else None

    # Changes

    def add_listener(self, listener: Callable[[Catalog], None]) -> None:
        """Call `listener` on the event loop's thread after every change, with the catalog that runs then."""
        self._listeners.append(listener)

    def require_changeable(self) -> None:
        """Refuse to change what a file declares.

        Raises:
            WrongStateError: the catalog is read from a file.
        """
        if self._file is not None:
            raise WrongStateError("catalog", f"is read from {self._file}; change it there")

    def change(self, step: Callable[[Catalog], Catalog]) -> int:
        """Let what `step` makes of the running catalog run, and return its version; errors are those of `step`.

        Raises:
            WrongStateError: the catalog is read from a file.
        """
        self.require_changeable()
        self._swap(step(self.catalog))
        return self.version

    def set_kill_switch(self, *, engaged: bool, why: str) -> bool:
        """Turn every handoff into text, or end that, and tell whether every handoff is text now.

        What the catalog itself declares stays in force.
        """
        self._switch_why = (why or _SET_WITHOUT_WHY) if engaged else None  # In force first, and kept second.
        _log.warning("kill switch %s", "on" if engaged else "off", extra={"why": why} if why else None)
        self._swap(self.catalog)
        self._switch_order = self.on_kill_switch(self._switch_why)
        return self.kill_switch_reason() is not None

    def follow_kill_switch(self, why: str | None, *, order_id: str) -> None:
        """Set the kill switch as other nodes have it, by the order of that name; it is saved a little later."""
        if (why, order_id) == (self._switch_why, self._switch_order):
            return
        is_news = why != self._switch_why  # Otherwise another order says what this node was told or told others.
        self._switch_why, self._switch_order = why, order_id
        if is_news:
            _log.warning(
                "kill switch %s, as on other nodes", "off" if why is None else "on", extra={"why": why} if why else None
            )
            self._swap(self.catalog)
        task = asyncio.get_running_loop().create_task(self._save_followed())
        self._saving.add(task)
        task.add_done_callback(self._saving.discard)

    def restored_kill_switch(self) -> tuple[str, str] | None:
        """Return the name of the order, which may be empty, and why the kill switch has been on since the start."""
        return None if self._switch_why is None else (self._switch_order, self._switch_why)

    @property
    def failed_closed(self) -> bool:
        """Tell whether every handoff is text because something that must hold cannot."""
        return self._no_room is not None

    def fail_closed(self, why: str | None) -> None:
        """Let every handoff be text because something that must hold cannot, or end that."""
        self._no_room = why
        self._swap(self.catalog)

    async def save_kill_switch(self) -> None:
        """Let the kill switch, as it was set, outlive the node, if there is a file for that.

        Raises:
            NotPersistedError: it is in force but could not be written.
        """
        if self._switch_file is None:
            return
        try:
            async with self._switch_writing:
                await asyncio.to_thread(self._switch_file.write, self._switch_why, self._switch_order)
        except KillSwitchFileError as error:
            _log.exception("the kill switch is not persisted")
            raise NotPersistedError(f"the kill switch is set, but only until the node stops: {error}") from error

    def look_soon(self) -> None:
        """Read the file again without waiting for the next poll."""
        self._poller.look_soon()

    # Inside

    def _load_kill_switch(self) -> None:
        if self._switch_file is None:
            return
        self._switch_why = self._switch_file.read()
        self._switch_order = self._switch_file.order_id
        self._switch_file.write(
            self._switch_why, self._switch_order
        )  # What cannot be written now could not be when it matters.
        if self._switch_why is not None:
            _log.warning("kill switch on, as before the restart", extra={"why": self._switch_why})

    async def _save_followed(self) -> None:
        with suppress(NotPersistedError):  # It is in the log, and other nodes have it, too.
            await self.save_kill_switch()

    def _look(self) -> Catalog | CatalogFileError | None:
        assert self._watched is not None
        return self._watched.look()

    def _take(self, found: Catalog | CatalogFileError | None) -> None:
        if found is None:
            return
        if isinstance(found, CatalogFileError):
            self._file_problem = str(found)
            _log.error(
                "catalog file refused; the running catalog stays",
                extra={"file": self._file, "version": self.version, "problems": found.lines},
            )
            return
        self._file_problem = ""
        if found is not self.catalog:
            self._swap(found)
            _log.info("catalog changed", extra={"version": self.version, "catalog": repr(found)})

    def _swap(self, catalog: Catalog) -> None:
        self._running = RunningCatalog(catalog=catalog, version=self.version + 1, changed_at=self._clock())
        for listener in self._listeners:
            listener(catalog)
