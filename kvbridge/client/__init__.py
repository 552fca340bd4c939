"""The SDK: publish and acquire KV-caches from any process. Loads torch only when a tensor is touched."""
