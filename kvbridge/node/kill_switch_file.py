"""The kill switch on disk: one that ended because a node was restarted would turn handoffs on again, unasked.

The file is one JSON object. Nobody but the node writes it.
"""

from __future__ import annotations

import json
from pathlib import Path

from kvbridge.core.errors import BridgeError
from kvbridge.node.state_file import content_of, replace_durably

FORMAT = 1
"""Version of the file's form."""
FILE_BYTES_MAX = 1 << 16
"""Largest file that is read."""


class KillSwitchFileError(BridgeError):
    """The file of the kill switch cannot be read or written, or holds what no node wrote."""


class KillSwitchFile:
    """Why every handoff is text, or that it is not, in one file."""

    def __init__(self, path: str) -> None:
        """Keep it at `path`, whose folder must exist."""
        self._path = Path(path)
        self.order_id = ""
        """By which order the kill switch was on when the file was read; empty if by none or nobody knows."""

    def __repr__(self) -> str:
        """Show where it is."""
        return f"<KillSwitchFile {self._path}>"

    def read(self) -> str | None:
        """Return why the kill switch is on, or None if it is off or there is no file yet.

        Raises:
            KillSwitchFileError: the file cannot be read or understood.
        """
        try:
            content = content_of(self._path, FILE_BYTES_MAX)
            why, self.order_id = (None, "") if content is None else _decode(content)
        except OSError as error:
            raise KillSwitchFileError(f"kill_switch_file: {error}") from error
        except (KeyError, RecursionError, TypeError, ValueError) as error:
            raise KillSwitchFileError(
                f"kill_switch_file: {self._path} does not hold a kill switch ({type(error).__name__}: {error}); "
                "repair it, or remove it to start with the kill switch off"
            ) from error
        return why

    def write(self, why: str | None, order_id: str = "") -> None:
        """Replace what is there; `order_id` names the order that holds on all nodes, if there is one.

        Raises:
            KillSwitchFileError: it cannot be written; what was there before still is.
        """
        state = {"format": FORMAT, "engaged": why is not None, "why": why or ""}
        content = json.dumps(state | ({"order": order_id} if order_id else {}), indent=2).encode()
        try:
            replace_durably(self._path, content)
        except OSError as error:
            raise KillSwitchFileError(f"kill_switch_file: {error}") from error


def _decode(content: bytes) -> tuple[str | None, str]:
    state = json.loads(content)
    if state["format"] != FORMAT:
        raise ValueError(f"format {state['format']} is not {FORMAT}")
    engaged, why, order_id = state["engaged"], state["why"], state.get("order", "")
    if type(engaged) is not bool or type(why) is not str or type(order_id) is not str:
        raise TypeError("engaged must be true or false, why and order strings")
    return (why, order_id) if engaged else (None, "")
