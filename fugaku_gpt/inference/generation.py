"""Generates text: prompts are read at once, several of about equal length together, since products of more rows are
faster; and then the texts of several prompts grow together, token by token.

A replica works on as many texts at a time as its cache has slots; when one ends, the next prompt takes its slot.
"""

from __future__ import annotations

import time
from collections import deque
from itertools import islice
from typing import Callable, Dict, List, Sequence

import torch

from fugaku_gpt import ops
from fugaku_gpt.inference.continuation import (
    CONTEXT,
    END,
    INTERRUPT,
    LENGTH,
    STOP,
    Continuation,
    GenerationLimits,
    Speed,
)
from fugaku_gpt.inference.replica import ChooseTokens, ModelReplica
from fugaku_gpt.inference.sampling import Sampling
from fugaku_gpt.inference.text import stable_text
from fugaku_gpt.layout.memory import PREFILL_TOKENS
from fugaku_gpt.model.kv_cache import KeyValueCache

_MOST_PADDING = 0.1  # share of the tokens that are read


class Generator:
    """Continues prompts on one replica.

    Attributes:
        speed: of all prompts so far.
    """

    def __init__(
        self,
        replica: ModelReplica,
        decode_after: Callable[[Sequence[int], Sequence[int]], str],
        sampling: Sampling,
        limits: GenerationLimits,
    ) -> None:
        """Prepare to generate. ``decode_after`` returns the text of token ids that follow others."""
        self._replica, self._sampling, self._limits = replica, sampling, limits
        self._decode_after = decode_after
        self.speed = Speed()

    def run(
        self,
        prompts: Dict[int, List[int]],
        on_text: Callable[[int, str], None] = lambda prompt, text: None,
        on_end: Callable[[Continuation], None] = lambda text: None,
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> Dict[int, Continuation]:
        """Return the continuation of each prompt; collective over the replica.

        Args:
            prompts: number → token ids, at least one of each.
            on_text: called with a prompt's number and each further piece of its text.
            on_end: called with each text that has ended.
            is_interrupted: called before each further token, on every rank; if it returns True, which it must do on all
                or on none, all texts end as they are.
        """
        waiting = deque(Continuation(number, ids) for number, ids in prompts.items())
        growing: List[Continuation] = []
        results: Dict[int, Continuation] = {}

        def end(text: Continuation) -> None:
            results[text.prompt] = text
            on_end(text)

        longest = max((len(ids) for ids in prompts.values()), default=1) + self._limits.new_tokens
        capacity = min(self._replica.config.model.seq_len, longest)
        cache = self._replica.make_cache(max(1, min(self._limits.slots, len(prompts))), capacity)
        self.speed.cache_bytes = max(self.speed.cache_bytes, cache.bytes)
        with torch.no_grad():
            while (waiting or growing) and not is_interrupted():
                while waiting and len(growing) < len(cache.lengths):
                    free = len(cache.lengths) - len(growing)
                    count = _prompts_at_once([len(text.prompt_ids) for text in islice(waiting, free)])
                    growing += [waiting.popleft() for _ in range(count)]
                    started = range(len(growing) - count, len(growing))
                    self._read_prompts(growing, started, cache)
                    self._end_texts(growing, started, cache, end, on_text)
                if growing:
                    self._read_tokens(growing, cache)
                    self._end_texts(growing, range(len(growing)), cache, end, on_text)
        for text in (*growing, *waiting):
            text.reason = INTERRUPT
            end(text)
        return {number: results[number] for number in prompts}

    def _read_prompts(self, growing: List[Continuation], slots: range, cache: KeyValueCache) -> None:
        """Read the prompts of the last texts, into the slots behind the others."""
        started, texts = time.perf_counter(), growing[slots.start :]
        counts = [len(text.prompt_ids) for text in texts]
        longest = max(counts)
        # no token sees the padding behind it
        padded = [text.prompt_ids + text.prompt_ids[-1:] * (longest - len(text.prompt_ids)) for text in texts]
        new = cache.extend(slots.start, slots.stop, longest, counts)
        kept = ops.pooled_sizes()
        chosen = self._replica.next_tokens(torch.tensor(padded), cache, new, self._choice(texts))
        ops.release_tensor_pool(kept)  # else the pool would keep blocks for the length of each prompt
        for text, token in zip(texts, chosen):
            text.ids.append(token)
        self.speed.prefill_tokens += sum(counts)
        self.speed.prefill_seconds += time.perf_counter() - started

    def _read_tokens(self, growing: List[Continuation], cache: KeyValueCache) -> None:
        """Read the last token of each text, and choose the next."""
        started = time.perf_counter()
        tokens = torch.tensor([text.ids[-1:] for text in growing])
        new = cache.extend(0, len(growing), 1)
        chosen = self._replica.next_tokens(tokens, cache, new, self._choice(growing))
        for text, token in zip(growing, chosen):
            text.ids.append(token)
        self.speed.decode_tokens += len(chosen)
        self.speed.decode_seconds += time.perf_counter() - started

    def _choice(self, texts: Sequence[Continuation]) -> ChooseTokens:
        return lambda logits: [
            self._sampling.next_token(row, [*text.prompt_ids, *text.ids], text.prompt)
            for row, text in zip(logits, texts)
        ]

    def _end_texts(
        self,
        growing: List[Continuation],
        slots: Sequence[int],
        cache: KeyValueCache,
        end: Callable[[Continuation], None],
        on_text: Callable[[int, str], None],
    ) -> None:
        """Update the texts in ``slots`` by their newest token, and take out those that have ended, for which ``end`` is
        called; the last text takes their slot."""
        for slot in reversed(slots):
            text = growing[slot]
            before = text.text
            self._update(text)
            if text.text != before:
                on_text(text.prompt, text.text[len(before) :])
            if text.reason:
                end(text)
                cache.free_slot(slot, len(growing) - 1)
                growing[slot] = growing[-1]
                growing.pop()

    def _update(self, text: Continuation) -> None:
        limits = self._limits
        if text.ids[-1] in limits.stop_ids:
            text.reason = END
            text.ids.pop()
        elif len(text.ids) >= limits.new_tokens:
            text.reason = LENGTH
        elif len(text.prompt_ids) + len(text.ids) > self._replica.config.model.seq_len:
            text.reason = CONTEXT
        decoded = self._decode_after(text.prompt_ids, text.ids)
        stable = stable_text(decoded, limits.stop_strings)
        if stable.is_stopped:
            text.reason = STOP
        # at the end, nothing that follows can complete a character or a stop string
        final = decoded if text.reason and not stable.is_stopped else stable.text
        # some decoders remove spaces of what was shown, as WordPiece's before a comma; a text is whole at its end
        if text.reason or final.startswith(text.text):
            text.text = final


def _prompts_at_once(lengths: Sequence[int]) -> int:
    """Return how many of the next prompts, of these lengths, are read together: at least one, with few tokens in all
    and little padding to the length of the longest."""
    longest, total, count = 0, 0, 0
    for length in lengths:
        longest, total = max(longest, length), total + length
        padded = longest * (count + 1)
        if count and (padded > PREFILL_TOKENS or padded - total > _MOST_PADDING * padded):
            break
        count += 1
    return count
