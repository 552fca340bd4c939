"""The other end of a plain socket: connects, and sends so many bytes for each byte that it gets.

`python -m benchmarks.raw_sender HOST PORT BYTES`
"""

from __future__ import annotations

import socket
import sys


def main() -> None:
    """Send until the connection ends."""
    host, port, nbytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    content = memoryview(bytearray(b"\1") * nbytes)
    with socket.create_connection((host, port)) as connection:
        while connection.recv(1):
            connection.sendall(content)


if __name__ == "__main__":
    main()
