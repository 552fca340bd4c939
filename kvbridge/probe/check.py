"""Whether a cache can be that of its declared tokens, told from the bytes without running a model.

1. Of some payloads nothing can be said: those whose tokens are known by digest only, or that were aligned to another
   model. They are *not probed*, and the finding says why.
2. What the geometry declares is compared with the model's own shape.
3. In layer 0, keys are turned back by the declared rotation, keys and values of some tokens are projected, and both are
   compared with the table's rows of the declared token ids (`layer_zero`).
4. All layers are looked at for their order and for being there at all (`layers`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvbridge.core.descriptor import PayloadDescriptor
from kvbridge.probe.finding import Evidence, ProbeFinding
from kvbridge.probe.fingerprint import Fingerprint
from kvbridge.probe.layer_zero import examine_layer_zero
from kvbridge.probe.layers import examine_layers
from kvbridge.probe.limits import SAMPLE_TOKENS
from kvbridge.probe.subject import subject_of

if TYPE_CHECKING:
    from numpy.typing import NDArray


def check_tokens(
    fingerprint: Fingerprint,
    descriptor: PayloadDescriptor,
    slot: NDArray[np.uint8],
    *,
    sample_tokens: int | None = SAMPLE_TOKENS,
) -> ProbeFinding:
    """Return whether the payload in `slot` can be the cache of its tokens under the fingerprint's model version.

    It computes on the calling thread and changes nothing.

    Args:
        fingerprint: Of the version that the descriptor names; with another one nothing is probed.
        descriptor: What is declared.
        slot: All bytes of the slot, header included.
        sample_tokens: How many tokens of layer 0 to look at, at least 1; None for all. Of the other layers up to 64 are
            looked at.
    """
    assert sample_tokens is None or sample_tokens >= 1, sample_tokens
    # Whatever a producer wrote may overflow here, and an error that is not a number is within no limit.
    with np.errstate(all="ignore"):
        subject = subject_of(fingerprint, descriptor, slot, sample_tokens=sample_tokens)
        if isinstance(subject, ProbeFinding):
            return subject
        layer_zero, layers = examine_layer_zero(subject), examine_layers(subject)
    return Evidence(
        problems=layer_zero.problems + layers.problems,
        figures=layer_zero.figures | layers.figures,
        notes=layer_zero.notes + layers.notes,
    ).finding()
