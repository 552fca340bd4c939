"""Tensor transforms that run in the producer's or the consumer's process, never in the node; they need torch."""
