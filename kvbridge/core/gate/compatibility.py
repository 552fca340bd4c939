"""Checks that compare a cache with the consumer that wants to continue from it."""

from __future__ import annotations

from itertools import zip_longest

from kvbridge.core.context import NO_CONTEXT, context_digest
from kvbridge.core.gate.check import Check, Figures, Stage
from kvbridge.core.gate.geometries import geometry_difference, position_difference, unstated_geometry_problem
from kvbridge.core.gate.request import AcquireTerms, Question
from kvbridge.core.media import MediaItem
from kvbridge.core.reasons import Reason
from kvbridge.core.tags import AlignerTag
from kvbridge.core.tokens import TOKEN_ID_BYTES

_TOKENIZER_FIELD = "tokenizer_digest"
_DIGEST_DIGITS = 16


def _format_is_read(question: Question) -> str | None:
    version, newest = question.descriptor.format_version, question.terms.format_version_max
    return None if version <= newest else f"payload has format version {version}, consumer reads up to {newest}"


def _model_is_the_same(question: Question) -> str | None:
    if question.aligner is not None:
        return None  # Whether it bridges exactly these two is the aligners' checks' question.
    differences = question.terms.model.differences(question.descriptor.model)
    return "; ".join(str(difference) for difference in differences if difference.field != _TOKENIZER_FIELD) or None


def _tokenizer_is_the_same(question: Question) -> str | None:
    mine, theirs = question.terms.model.tokenizer_digest, question.descriptor.model.tokenizer_digest
    return None if mine == theirs else f"{_TOKENIZER_FIELD}: consumer has {mine!r}, payload has {theirs!r}"


def _aligner_is_there(question: Question) -> str | None:
    claimed = question.aligner
    if claimed is None or question.conditions.aligner.name_known:
        return None
    return f"the catalog has no aligner {claimed.name!r}"


def _aligner_version_fits(question: Question) -> str | None:
    claimed, expected, applied = question.aligner, question.terms.aligner, question.descriptor.aligner
    if claimed is None:
        return None
    differences = [
        *(
            str(each)
            for each in (expected.differences(applied) if expected is not None and applied is not None else ())
        ),
        *(f"source.{each}" for each in claimed.source.differences(question.descriptor.model)),
        *(f"target.{each}" for each in question.terms.model.differences(claimed.target)),
    ]
    if differences:
        return "; ".join(differences)
    standing = question.conditions.aligner
    if standing.entry is None:
        return _not_listed(claimed, standing.nearest)
    return standing.problem


def _not_listed(claimed: AlignerTag, nearest: AlignerTag | None) -> str:
    problem = f"the catalog does not have version {claimed.version!r} of {claimed.name!r} for exactly these models"
    if nearest is None:
        return problem
    differences = (f"{each.field} is {each.expected!r}, there {each.found!r}" for each in claimed.differences(nearest))
    return f"{problem}: {'; '.join(differences)}"


def _alignment_is_good_enough(question: Question) -> str | None:
    entry, policy = question.conditions.aligner.entry, question.conditions.policy
    if question.aligner is None or entry is None:
        return None  # Without an entry the version check has failed already.
    if entry.alignment_error > policy.alignment_error_max:
        return f"alignment error {entry.alignment_error:g} is over the route's {policy.alignment_error_max:g}"
    if entry.in_domain_share < policy.in_domain_share_min:
        return (
            f"{entry.in_domain_share:.1%} of the calibration data are in-domain, "
            f"under the route's {policy.in_domain_share_min:.1%}"
        )
    return None


def _alignment_figures(question: Question) -> Figures:
    entry, policy = question.conditions.aligner.entry, question.conditions.policy
    if question.aligner is None or entry is None:
        return {}
    return {
        "alignment_error": entry.alignment_error,
        "alignment_error_max": policy.alignment_error_max,
        "in_domain_share": entry.in_domain_share,
        "in_domain_share_min": policy.in_domain_share_min,
    }


def _tokens_are_the_prompts(question: Question) -> str | None:
    return _other_media(question) or _other_tokens(question) or _other_context(question)


def _other_tokens(question: Question) -> str | None:
    cached, prompt, offset = question.descriptor.tokens, question.terms.tokens, question.terms.token_offset
    if prompt is None:
        return None
    if offset is None:
        return "where the part starts in the prompt is not known, because the length of an earlier part is not"
    if offset == 0 and cached.count > prompt.count:
        return None  # The check of the valid length says this better.
    if prompt.continues_with(cached, offset):
        return None
    where = "a prefix of" if offset == 0 else f"those from token {offset} on of"
    problem = f"the {cached.count} cached tokens are not {where} the consumer's {prompt.count}"
    at = prompt.first_difference(cached, offset)
    return problem if at is None else f"{problem}: at index {at[0]} consumer has {at[1]}, payload has {at[2]}"


def _other_media(question: Question) -> str | None:
    cached, start = question.descriptor, question.terms.token_offset or 0
    expected = tuple(
        MediaItem(token_index=item.token_index - start, digest=item.digest)
        for item in question.terms.media
        if start <= item.token_index < start + cached.valid_length
    )
    if expected == cached.media:
        return None
    mine, theirs = next(pair for pair in zip_longest(expected, cached.media) if pair[0] != pair[1])
    return f"media: consumer has {_medium(mine)}, payload has {_medium(theirs)}"


def _medium(item: MediaItem | None) -> str:
    return "none" if item is None else f"{item.digest.hex()[:_DIGEST_DIGITS]} at token {item.token_index} of the part"


def _other_context(question: Question) -> str | None:
    mine, theirs = _context(question.terms), question.descriptor.context_digest
    if mine is None:
        return "what stands before the part in the prompt is not known by id"
    if mine == theirs:
        return None
    return f"context before the first token: consumer has {_context_name(mine)}, payload has {_context_name(theirs)}"


def _context(terms: AcquireTerms) -> bytes | None:
    """Return the digest of what stands before the part in the consumer's prompt; None if it is not known."""
    if terms.token_offset == 0:
        return NO_CONTEXT
    if terms.token_offset is None:
        return None
    earlier = tuple(item for item in terms.media if item.token_index < terms.token_offset)
    if terms.tokens is None:
        return None if terms.earlier_ids is None else context_digest(terms.earlier_ids, earlier)
    ids = terms.tokens.packed_ids
    return None if ids is None else context_digest((memoryview(ids)[: terms.token_offset * TOKEN_ID_BYTES],), earlier)


def _context_name(digest: bytes) -> str:
    return digest.hex()[:_DIGEST_DIGITS] if digest else "none"


def _token_figures(question: Question) -> Figures:
    prompt = question.terms.tokens
    return {
        "cached_tokens": question.descriptor.tokens.count,
        "prompt_tokens": None if prompt is None else prompt.count,
        "token_offset": question.terms.token_offset,
        "cached_media": len(question.descriptor.media),
    }


def _geometry_is_accepted(question: Question) -> str | None:
    mine, found = question.geometry, question.descriptor.geometry
    if mine is found:
        return None
    return unstated_geometry_problem(found) if mine is None else geometry_difference(mine, found)


def _valid_length_fits(question: Question) -> str | None:
    valid_length, terms = question.descriptor.valid_length, question.terms
    if valid_length < terms.valid_length_min:
        return f"payload has {valid_length} valid tokens, consumer needs at least {terms.valid_length_min}"
    left = None if terms.tokens is None else terms.tokens.count - (terms.token_offset or 0)
    if left is not None and valid_length > left:
        return f"payload has {valid_length} valid tokens, more than the consumer's {left}"
    return None


def _length_figures(question: Question) -> Figures:
    return {
        "valid_length": question.descriptor.valid_length,
        "valid_length_min": question.terms.valid_length_min,
    }


def _positions_are_the_same(question: Question) -> str | None:
    descriptor, terms = question.descriptor, question.terms
    if terms.token_offset is None:
        return "the position of the part is not known, because the length of an earlier part is not"
    placed = terms.first_position + terms.token_offset
    if descriptor.first_position != placed:
        return f"first position: consumer has {placed}, payload has {descriptor.first_position}"
    mine = question.geometry
    if mine is None or mine is descriptor.geometry:
        return None
    return position_difference(mine, descriptor.geometry)


def _position_figures(question: Question) -> Figures:
    offset = question.terms.token_offset
    return {
        "payload_first_position": question.descriptor.first_position,
        "consumer_first_position": None if offset is None else question.terms.first_position + offset,
    }


CHECKS: tuple[Check, ...] = (
    Check(reason=Reason.FORMAT_UNSUPPORTED, stage=Stage.TERMS, problem=_format_is_read),
    Check(reason=Reason.MODEL_VERSION_MISMATCH, stage=Stage.TERMS, problem=_model_is_the_same),
    Check(reason=Reason.ALIGNER_MISSING, stage=Stage.TERMS, problem=_aligner_is_there),
    Check(reason=Reason.ALIGNER_VERSION_MISMATCH, stage=Stage.TERMS, problem=_aligner_version_fits),
    Check(
        reason=Reason.ALIGNMENT_ERROR_EXCEEDED,
        stage=Stage.TERMS,
        problem=_alignment_is_good_enough,
        figures=_alignment_figures,
    ),
    Check(reason=Reason.TOKENIZER_MISMATCH, stage=Stage.TERMS, problem=_tokenizer_is_the_same),
    Check(reason=Reason.TOKENS_MISMATCH, stage=Stage.TERMS, problem=_tokens_are_the_prompts, figures=_token_figures),
    Check(reason=Reason.GEOMETRY_MISMATCH, stage=Stage.TERMS, problem=_geometry_is_accepted),
    Check(reason=Reason.VALID_LENGTH_INVALID, stage=Stage.TERMS, problem=_valid_length_fits, figures=_length_figures),
    Check(
        reason=Reason.POSITION_ENCODING_MISMATCH,
        stage=Stage.TERMS,
        problem=_positions_are_the_same,
        figures=_position_figures,
    ),
)
"""These checks in order."""
