"""A producer and a consumer that meet at a bridge."""

from __future__ import annotations

from typing import Any

from kvbridge import Bridge, Handoff, Publication, Reason
from kvbridge.integrations.transformers import ModelPort
from tests.integration.transformers.tiny import prefill, token_ids, tokenizer

IDS = token_ids(24)
PREFIX = 20


class Handover:
    """Two ports, which are one if only a producer is given."""

    def __init__(self, bridge: Bridge, producer: Any, consumer: Any = None, **port: Any) -> None:
        self.bridge = bridge
        self.producer = ModelPort(producer, tokenizer(), **port)
        self.consumer = self.producer if consumer is None else ModelPort(consumer, tokenizer())
        self._count = 0

    def publish(self, cache: Any, ids: list[int] = IDS[:PREFIX], **options: Any) -> Publication:
        """Publish a cache under a key of its own."""
        self._count += 1
        return self.producer.publish(self.bridge, f"fault/{id(self)}/{self._count}", cache, tokens=ids, **options)

    def acquire(self, slot: Publication, ids: list[int] = IDS, **options: Any) -> Handoff:
        """Ask for what was published."""
        assert slot.published, slot.detail
        return self.consumer.acquire(self.bridge, slot.key, tokens=ids, timeout=10, **options)

    def refusal(self, ids: list[int] = IDS) -> tuple[Reason | None, str]:
        """Publish what the producer computes, ask for it, and return why there is no cache."""
        with self.acquire(self.publish(prefill(self.producer._model, IDS[:PREFIX])), ids) as handoff:
            assert handoff.kv is None
            return handoff.reason, handoff.detail
