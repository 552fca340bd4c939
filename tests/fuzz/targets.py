"""Every decoder by its name."""

from __future__ import annotations

from tests.fuzz.cluster import CLUSTER
from tests.fuzz.files import FILES
from tests.fuzz.messages import MESSAGES
from tests.fuzz.sockets import SOCKETS

TARGETS = dict(sorted({**MESSAGES, **FILES, **SOCKETS, **CLUSTER}.items()))
