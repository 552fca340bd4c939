"""Ending a task that waits for somebody else's code."""

from __future__ import annotations

import asyncio
from typing import Any

_PATIENCE_SECONDS = 0.2


async def stop(task: asyncio.Task[Any] | None) -> None:
    """Cancel a task until it has ended: a client that has timeouts of its own now and then swallows a cancellation."""
    while task is not None and not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=_PATIENCE_SECONDS)
