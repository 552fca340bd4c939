"""Those who run the nodes: they set the kill switch, and change the file of the catalog, sometimes into nonsense."""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.sim.node import Start
    from tests.sim.world import World

_SWITCHING_SHARE, _SWITCHING_SHARE_ROUGH, _DECLARING_SHARE = 0.35, 0.6, 0.2
_PAUSES_SECONDS, _PAUSES_SECONDS_ROUGH = (0.5, 4.0), (0.05, 1.0)
_ENGAGED_SECONDS = (0.05, 0.8)
_NONSENSE_SHARE = 0.3
_NONSENSE = "kill_switch: perhaps\n"


class Operators:
    """What people do to the nodes of one world, in some worlds."""

    def __init__(self, world: World) -> None:
        """Decide what they do in this world."""
        self._world = world
        self._chance = random.Random(f"{world.seed} operators")
        self._switches = self._chance.random() < (_SWITCHING_SHARE_ROUGH if world.rough else _SWITCHING_SHARE)
        self._directory = tempfile.TemporaryDirectory() if self._chance.random() < _DECLARING_SHARE else None
        self.declared = False
        """Whether the file's last good content sets the kill switch."""
        if self._directory is not None:
            self._write(engaged=False)

    @property
    def catalog(self) -> str:
        """Return where the catalog's file is; empty if this world has none."""
        return "" if self._directory is None else str(Path(self._directory.name, "catalog.yaml"))

    async def work(self) -> None:
        """Do things now and then."""
        while True:
            await asyncio.sleep(
                self._chance.uniform(*(_PAUSES_SECONDS_ROUGH if self._world.rough else _PAUSES_SECONDS))
            )
            if self._switches:
                await self._switch()
            if self._directory is not None and self._chance.random() < 0.5:
                self._declare()

    def calm_down(self) -> None:
        """Leave a good file behind."""
        if self._directory is not None:
            self._write(engaged=self._chance.random() < 0.5)

    def look_at_the_end(self, start: Start) -> None:
        """Look whether what was declared last is in force."""
        if self._directory is not None and start.bridge.catalog.catalog.kill_switch != self.declared:
            raise self._world.judge.broken(f"{start} never heard that the file declares {self.declared}")

    def clear(self) -> None:
        """Remove the file."""
        if self._directory is not None:
            self._directory.cleanup()

    async def _switch(self) -> None:
        start = self._world.starts[self._chance.choice(self._world.hosts)]
        start.bridge.catalog.set_kill_switch(engaged=True, why="a drill")
        start.switched = True
        self._world.trace(f"{start} hands nothing over any more")
        await asyncio.sleep(self._chance.uniform(*_ENGAGED_SECONDS))
        start.bridge.catalog.set_kill_switch(engaged=False, why="")
        start.switched = False
        self._world.trace(f"{start} hands over again")

    def _declare(self) -> None:
        if self._chance.random() < _NONSENSE_SHARE:
            Path(self.catalog).write_text(_NONSENSE, encoding="utf-8")
            self._world.trace("the catalog's file becomes nonsense")
            return
        self._write(engaged=not self.declared and self._chance.random() < 0.5)

    def _write(self, *, engaged: bool) -> None:
        Path(self.catalog).write_text(f"kill_switch: {str(engaged).lower()}\n", encoding="utf-8")
        self.declared = engaged
        self._world.trace(f"the catalog's file declares the kill switch {engaged}")
