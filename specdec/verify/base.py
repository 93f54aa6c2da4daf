"""`Verifier`: which drafts survive."""

from __future__ import annotations

from abc import ABC, abstractmethod

from jaxtyping import Float
from torch import Tensor

from specdec.sampling import Sampler
from specdec.types import Verdict, Window


class Verifier(ABC):
    """Applies the acceptance law to a verified window.

    The law: walk from the root; at each visited node take one pick from the target's processed distribution; descend to
    the child that bears that token, or stop; the last pick is the next token.  A pick that ends the generation ends the
    walk too.  Equal logits and noise give equal verdicts from every verifier.
    """

    @abstractmethod
    def verify(self, logits: Float[Tensor, "b w v"], window: Window, sampler: Sampler) -> Verdict:
        """Return the verdict; the sampler's pending tokens are those the verdict emits.

        Raises `NonFiniteLogits` where a visited node has NaN logits.
        """
