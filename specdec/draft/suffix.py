"""Suffix drafting: find the longest end of the text that stood in it before, and draft what followed it then.

(SuffixDecoding, Oliaro et al. 2024, arXiv:2411.04975, with an online suffix automaton, Blumer et al. 1985, in place
of suffix trees.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, final

from jaxtyping import Float
from torch import Tensor

from specdec.config import build_config, require_int, require_number
from specdec.draft.base import DraftContext, Drafter
from specdec.draft.lookup import TextIndex, catch_up
from specdec.draft.tree import SEPARATOR, Continuation, Nodes, grow_tree
from specdec.types import MAX_WINDOW, Draft, Verdict, Window


@dataclass(frozen=True)
class SuffixConfig:
    """When suffix drafting drafts, and how much."""

    min_match: int = 1
    """Fewest last tokens that must have stood in the text before."""
    max_nodes: int = 32
    """Most nodes of a draft."""
    max_depth: int = 32
    """Deepest draft."""
    min_probability: float = 0.05
    """Nodes estimated less probable than this are not drafted, so that short matches give short drafts."""
    max_places: int = 16
    """Most earlier places whose continuations are compared."""
    memory_tokens: int = 0
    """Tokens of earlier outputs, of other generations, that are searched as well; 0 remembers nothing."""

    def __post_init__(self) -> None:
        require_int("min_match", self.min_match, 1, None)
        require_int("max_nodes", self.max_nodes, 1, MAX_WINDOW - 1)
        require_int("max_depth", self.max_depth, 1, MAX_WINDOW - 1)
        require_number("min_probability", self.min_probability, 0.0, 1.0)
        require_int("max_places", self.max_places, 1, None)
        require_int("memory_tokens", self.memory_tokens, 0, None)


@final
class SuffixAutomaton(TextIndex):
    """The smallest automaton that knows every substring of a growing text; appending costs O(1), amortised.

    A state stands for substrings that end at the same places.  Its link leads to their longest suffix that ends at more
    places, so the places of a state are those of the states below it in the tree of links.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._end = [-1]
        """Text length when the state was made; -1 for the start and for clones, which have no place of their own."""
        self._below: list[list[int]] = [[]]
        """States whose link led here when it was set; those whose link was moved since are passed over."""
        self._last = 0

    def append(self, token: int) -> None:
        self.text.append(token)
        new = self._add_state({}, self._length[self._last] + 1, len(self.text))
        state = self._last
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        self._set_link(new, 0 if state < 0 else self._exact(state, token))
        self._last = new

    def copy(self) -> SuffixAutomaton:
        twin = SuffixAutomaton()
        twin.text = list(self.text)
        twin._next = [dict(edges) for edges in self._next]
        twin._link, twin._length, twin._end = list(self._link), list(self._length), list(self._end)
        twin._below = [list(states) for states in self._below]
        twin._last = self._last
        return twin

    @property
    def repeated_suffix(self) -> tuple[int, int]:
        """State and length of the longest suffix of the text that stood in it before; (0, 0) without one."""
        state = max(self._link[self._last], 0)
        return state, self._length[state]

    def follow(self, match: tuple[int, int], token: int) -> tuple[int, int]:
        """State and length of the longest match of another text's end once it grows by `token`; amortised O(1)."""
        state, length = match
        while state > 0 and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state]
        if token not in self._next[state]:
            return 0, 0
        return self._next[state][token], length + 1

    def shorter(self, state: int) -> tuple[int, int]:
        """State and length of the longest suffix of a state's strings that ends at more places; (0, 0) at the start."""
        link = max(self._link[state], 0)
        return link, self._length[link]

    def places(self, state: int) -> Iterator[int]:
        """Places behind the occurrences of a state's strings, in no order, the end of the text included."""
        waiting = [state]
        while waiting:
            state = waiting.pop()
            if self._end[state] >= 0:
                yield self._end[state]
            waiting += [below for below in self._below[state] if self._link[below] == state]

    def _exact(self, state: int, token: int) -> int:
        """The state whose longest string is that of `state` and `token`, split off where it does not exist yet."""
        target = self._next[state][token]
        length = self._length[state] + 1
        if self._length[target] == length:
            return target
        clone = self._add_state(dict(self._next[target]), length, -1)
        self._set_link(clone, self._link[target])
        self._set_link(target, clone)
        while state >= 0 and self._next[state].get(token) == target:
            self._next[state][token] = clone
            state = self._link[state]
        return clone

    def _add_state(self, edges: dict[int, int], length: int, end: int) -> int:
        self._next.append(edges)
        self._length.append(length)
        self._end.append(end)
        self._link.append(-1)
        self._below.append([])
        return len(self._next) - 1

    def _set_link(self, state: int, link: int) -> None:
        self._link[state] = link
        self._below[link].append(state)


@final
class OutputMemory:
    """Outputs of earlier generations behind one another; when they grow too many, the older half is forgotten."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._outputs: deque[list[int]] = deque()
        self.automaton = SuffixAutomaton()

    def remember(self, output: list[int]) -> None:
        """Add one output, or the end of it that fits."""
        output = output[-self._capacity :] if self._capacity else []
        if not output:
            return
        self._outputs.append(output)
        added = [output]
        if sum(map(len, self._outputs)) > self._capacity:
            while len(self._outputs) > 1 and sum(map(len, self._outputs)) > self._capacity // 2:
                self._outputs.popleft()
            self.automaton = SuffixAutomaton()
            added = list(self._outputs)
        for tokens in added:
            for token in (*tokens, SEPARATOR):
                self.automaton.append(token)


@dataclass
class _Row:
    """What the drafter knows of one row."""

    tokens: Sequence[int]
    """The row's live list of tokens, as it was given last."""
    prompt_length: int
    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    remembered: tuple[int, int] = (0, 0)
    """State and length of the longest match of the row's end in the memory."""


@final
class SuffixDrafter(Drafter):
    """Drafts what followed the longest repeated end of each row's text, in its own text and in remembered outputs."""

    def __init__(self, config: SuffixConfig | None = None) -> None:
        self.config = config or SuffixConfig()
        self._memory = OutputMemory(self.config.memory_tokens)
        self._rows: list[_Row] = []

    @staticmethod
    def of(**options: Any) -> SuffixDrafter:
        """Build from the options of `SuffixConfig`; unknown names raise `ConfigError`."""
        return SuffixDrafter(build_config(SuffixConfig, options))

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    def begin(self, prompts: tuple[Sequence[int], ...], max_length: int) -> None:
        self._rows = [_Row(prompt, len(prompt)) for prompt in prompts]

    def fork(self, source: int, copies: tuple[int, ...]) -> None:
        original = self._rows[source]
        self._read(original, original.tokens)
        for row in copies:
            self._rows[row].automaton = original.automaton.copy()
            self._rows[row].remembered = original.remembered

    def propose(self, context: DraftContext) -> Draft:
        rows = zip(context.rows, context.tokens, context.max_nodes, context.max_depths, strict=True)
        trees = [self._draft(self._rows[row], tokens, nodes, depth) for row, tokens, nodes, depth in rows]
        return Draft.trees(trees, context.roots.device)

    def observe(self, window: Window, features: tuple[Float[Tensor, "b w d"], ...], verdict: Verdict) -> None:
        """Nothing to learn: the next context holds the emitted tokens."""

    def end(self) -> None:
        """Remember the outputs, and let go of the rows."""
        for row in self._rows:
            self._memory.remember(list(row.tokens[row.prompt_length :]))
        self._rows = []

    def _draft(self, row: _Row, tokens: Sequence[int], max_nodes: int, max_depth: int) -> Nodes:
        self._read(row, tokens)
        if max_nodes < 1 or max_depth < 1:
            return []
        config = self.config
        continuations = self._continuations(row.automaton, row.automaton.repeated_suffix)
        continuations += self._continuations(self._memory.automaton, row.remembered)
        nodes, depth = min(max_nodes, config.max_nodes), min(max_depth, config.max_depth)
        return grow_tree(continuations, nodes, depth, config.min_probability)

    def _read(self, row: _Row, tokens: Sequence[int]) -> None:
        """Take in what the row has grown by."""
        row.tokens = tokens
        if self.config.memory_tokens:
            for token in tokens[len(row.automaton.text) :]:
                row.remembered = self._memory.automaton.follow(row.remembered, token)
        catch_up(row.automaton, tokens)

    def _continuations(self, automaton: SuffixAutomaton, match: tuple[int, int]) -> list[Continuation]:
        """Places behind the longest match in a text, then behind ever shorter ones, until there are enough."""
        found: dict[int, Continuation] = {}
        state, length = match
        while length >= self.config.min_match and len(found) < self.config.max_places:
            # One place more than wanted, since the end of the text is a place that nothing follows yet.
            for place in islice(automaton.places(state), self.config.max_places + 1):
                if place < len(automaton.text) and len(found) < self.config.max_places:
                    found.setdefault(place, Continuation(automaton.text, place, length))
            state, length = automaton.shorter(state)
        return list(found.values())
