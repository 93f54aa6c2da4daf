"""Streamers get one emitted token at a time, in order, as `model.generate` would put it."""

from __future__ import annotations

import torch
from transformers.generation.streamers import BaseStreamer


class StreamRelay:
    """Puts a column of tokens to a streamer once every row has reached it; rows that ended are padded."""

    def __init__(self, streamer: BaseStreamer, pad_token: int) -> None:
        self._streamer = streamer
        self._pad_token = pad_token
        self._num_put = 0

    def relay(self, emitted: list[list[int]], done: list[bool]) -> None:
        """Put all columns that are complete by now."""
        running = [len(tokens) for tokens, is_done in zip(emitted, done, strict=True) if not is_done]
        ready = min(running) if running else max(map(len, emitted))
        for column in range(self._num_put, ready):
            tokens = [row[column] if column < len(row) else self._pad_token for row in emitted]
            self._streamer.put(torch.tensor(tokens))
        self._num_put = max(self._num_put, ready)
