"""Plain data of generated texts: where they end, what they are, and how fast they came. No PyTorch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import FrozenSet, List, Sequence

# why a text has ended
END, STOP, LENGTH, CONTEXT, INTERRUPT = "end", "stop", "length", "context", "interrupt"


@dataclass(frozen=True)
class GenerationLimits:
    """Where texts end.

    Attributes:
        new_tokens: tokens of a text at most.
        stop_ids: tokens that end a text, of which they are no part.
        stop_strings: texts that end a text, of which they are no part.
        slots: texts that grow at the same time.
    """

    new_tokens: int
    stop_ids: FrozenSet[int] = frozenset()
    stop_strings: Sequence[str] = ()
    slots: int = 8


@dataclass
class Continuation:
    """The text that follows a prompt.

    Attributes:
        prompt: number of the prompt.
        prompt_ids: its tokens.
        ids: the tokens that follow.
        text: their text.
        reason: why it has ended: ``end`` of the document, a ``stop`` string, ``length`` as asked for, the model's
            ``context`` is full, or the user's ``interrupt``; empty while it grows.
    """

    prompt: int
    prompt_ids: List[int]
    ids: List[int] = field(default_factory=list)
    text: str = ""
    reason: str = ""


@dataclass
class Speed:
    """Tokens and seconds of a replica: of prompts that were read, and of tokens that were generated after the first of
    each text; and the bytes of a rank's cache."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    cache_bytes: int = 0

    @classmethod
    def together(cls, speeds: Sequence["Speed"]) -> "Speed":
        """Return the speed of replicas that work at the same time: their tokens, in the time of the slowest."""
        return cls(
            prefill_tokens=sum(speed.prefill_tokens for speed in speeds),
            prefill_seconds=max(speed.prefill_seconds for speed in speeds),
            decode_tokens=sum(speed.decode_tokens for speed in speeds),
            decode_seconds=max(speed.decode_seconds for speed in speeds),
            cache_bytes=max(speed.cache_bytes for speed in speeds),
        )
