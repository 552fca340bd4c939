"""The asynchronous shell around the core: one bridge, its arenas, its sessions and its checks of bytes."""
