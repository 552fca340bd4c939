"""Memory that processes share: arenas, slot headers, the descriptor socket, and what a client maps."""
