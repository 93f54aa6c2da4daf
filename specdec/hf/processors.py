"""What transformers' logits processors and stopping criteria look at, so that verification can be as parallel as
they allow."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor
from transformers import TemperatureLogitsWarper

SCORES_ONLY = frozenset(
    {
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "MinPLogitsWarper",
        "SuppressTokensLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
    }
)
"""Pure functions of one row of scores."""

ROW_BY_ROW = SCORES_ONLY | {
    "ExponentialDecayLengthPenalty",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
    "WatermarkLogitsProcessor",
}
"""Functions of one row's tokens and scores, whatever the rest of the batch is."""

ROW_BY_ROW_CRITERIA = frozenset({"EosTokenCriteria", "MaxLengthCriteria", "MaxTimeCriteria", "StopStringCriteria"})


def scores_only(processors: Sequence[object]) -> bool:
    """Whether every processor is known to be a pure function of the scores."""
    return all(_known_as(processor) in SCORES_ONLY for processor in processors)


def looks_at_batch(processors: Sequence[object], criteria: Sequence[object]) -> bool:
    """Whether some processor or criterion may depend on the batch as a whole; unknown ones may."""
    return any(_known_as(processor) not in ROW_BY_ROW for processor in processors) or any(
        _known_as(criterion) not in ROW_BY_ROW_CRITERIA for criterion in criteria
    )


def temperature_of(processors: Sequence[object]) -> float:
    """What the processors divide the scores by, all in all."""
    return math.prod(part.temperature for part in processors if isinstance(part, TemperatureLogitsWarper))


def hold_rows(processors: Sequence[object], num_rows: int) -> bool:
    """Whether some processor may hold one value per batch row (a padding length, say), so that rows must keep their
    places."""
    held = (value for processor in processors for value in vars(processor).values())
    return any(isinstance(value, Tensor) and value.dim() > 0 and len(value) == num_rows for value in held)


def _known_as(part: object) -> str:
    """The class name, for transformers' own classes only: a user's class of the same name is not trusted."""
    kind = type(part)
    return kind.__name__ if kind.__module__.startswith("transformers.generation.") else ""
