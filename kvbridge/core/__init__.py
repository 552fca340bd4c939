"""The pure core: no sockets, no clocks, no tensors. It takes `now` and messages and returns decisions."""
