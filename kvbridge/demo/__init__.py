"""The main job on a real model: two inference processes share a cache through a running bridge."""
