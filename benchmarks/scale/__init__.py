"""Many nodes and many payloads, simulated with the code that decides and encodes in a real node."""
