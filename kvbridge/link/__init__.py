"""Between nodes: asking an owner for a payload, and bringing its bytes over."""
