"""When a request that comes now would have its first token, as far as can be told. Pure."""

from __future__ import annotations

from router.policy.gate import Room


def first_token_in_s(tokens_in_front: float, num_tokens: int, place_in_s: float, room: Room) -> float:
    """Seconds. What is not known yet takes none, so that nobody is refused for a guess.

    Args:
        tokens_in_front: of prompts that go before.
        num_tokens: of the prompt; both without those that are found in caches.
        place_in_s: until there is a place for it in decode's batches.
    """
    if not room.tokens_per_s or not room.num_computing:
        return place_in_s
    return max(place_in_s, tokens_in_front / room.tokens_per_s / room.num_computing) + num_tokens / room.tokens_per_s
