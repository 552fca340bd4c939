"""K and V of layer 0 against the rows of the declared tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvbridge.core.layout import Role
from kvbridge.probe.finding import Evidence
from kvbridge.probe.limits import ANGLE_ERROR_PER_POSITION, CHANCE_FACTOR, limits_of
from kvbridge.probe.rotation import rotation
from kvbridge.probe.subject import Subject
from kvbridge.probe.tables import project, row_errors

if TYPE_CHECKING:
    from numpy.typing import NDArray

NAMES = {Role.KEY: "key", Role.VALUE: "value"}
"""How figures begin."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Fit:
    """How well the sample fits for one role."""

    off: NDArray[np.bool_]
    """Which sampled tokens are further from their rows than rounding explains."""
    median: float
    """Median error."""
    median_max: float
    """The most it may be."""

    @property
    def fits(self) -> bool:
        """Tell whether every token and the median are within their limits; an error that is no number is not."""
        return not self.off.any() and self.median <= self.median_max


def examine_layer_zero(subject: Subject) -> Evidence:
    """Return what layer 0 says of a sample of tokens."""
    evidence = Evidence()
    if 0 not in subject.descriptor.geometry.layers:
        evidence.notes.append("layer 0 is not in the payload, so nothing ties it to its tokens")
        return evidence
    index = subject.sample(subject.descriptor.geometry.group_of(0), tokens_max=subject.sample_tokens)
    if not len(index):
        evidence.notes.append("layer 0 stores none of the tokens that are text")
        return evidence
    evidence.figures["tokens_sampled"] = float(len(index))
    fits = {role: fit for role in Role if (fit := _fit(subject, role, index, evidence)) is not None}
    if not all(fit.fits for fit in fits.values()):
        evidence.problems.append(_problem(fits, index))
    return evidence


def _fit(subject: Subject, role: Role, index: NDArray[np.int64], evidence: Evidence) -> _Fit | None:
    """Compare one role, note its figures, and return None if it cannot decide anything."""
    known, group = subject.fingerprint.role(role), subject.descriptor.geometry.group_of(0)
    limits = limits_of(subject.fingerprint.dtype, group.dtype)
    if known.chance <= CHANCE_FACTOR * limits.token:
        evidence.notes.append(f"{role} of layer 0 is too alike for all tokens to tell them apart")
        return None
    values, positions = subject.read(0, role, index), subject.positions(index)
    slack: NDArray[np.floating] = np.zeros(len(index))
    if role is Role.KEY:
        turned = rotation(group.position_encoding, group.head_dim_k)
        if turned is None:
            evidence.notes.append("the declared rotation is not determined, so K of layer 0 was not compared")
            return None
        if group.position_encoding != subject.fingerprint.position_encoding:
            evidence.notes.append("the declared rotation is not the one that the fingerprint was made with")
        values = turned.undo(values, positions)
        slack = positions * ANGLE_ERROR_PER_POSITION * bool(len(turned.frequencies))
    projected = project(values, known.projection[subject.heads])
    rows = known.table[subject.ids[index]][:, subject.heads].astype(np.float32)
    errors = row_errors(projected, rows)
    off = ~(errors <= limits.token + slack)
    name, median = NAMES[role], float(np.median(errors))
    evidence.figures[f"{name}_error_median"] = median
    evidence.figures[f"{name}_error_max"] = float(errors.max())
    evidence.figures[f"{name}_tokens_off"] = float(off.sum())
    return _Fit(off=off, median=median, median_max=limits.median + float(np.median(slack)))


def _problem(fits: dict[Role, _Fit], index: NDArray[np.int64]) -> str:
    """Say what does not fit, and what that usually means."""
    wrong = {role: fit for role, fit in fits.items() if not fit.fits}
    off = np.logical_or.reduce([fit.off for fit in wrong.values()])
    what = " and ".join(wrong)
    meaning = ""
    if len(fits) == len(Role) and len(wrong) == 1:
        meaning = "; V fits, so positions or rotation are not as declared" if Role.KEY in wrong else "; K fits"
    medians = " and ".join(f"{fit.median:.2g} where {fit.median_max:.2g} is allowed" for fit in wrong.values())
    if not off.any():
        return f"{what} of layer 0 {'are' if len(wrong) > 1 else 'is'} off by {medians} in the median{meaning}"
    where = f"{int(off.sum())} of {len(index)} sampled tokens, first at token {int(index[off.argmax()])}"
    return f"{what} of layer 0 do not belong to the declared tokens at {where} (median error {medians}){meaning}"
