"""Chooses a hook from several predictions, and explains the choice in a sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gradferry.core.codec_spec import parse_codec
from gradferry.forecast.hook_names import BACKEND_HOOKS, RULERS
from gradferry.forecast.predict import Prediction

# A prediction within this share of the fastest counts as equally fast.
TOLERANCE = 0.02
MOST_RIVALS = 3
_HIDDEN = 0.01  # share of a step: less exposed time counts as hidden


def precision(hook: str) -> int:
    """Whole bits per fp32 element that a hook sends, without those of scales and exponents.

    So `q4` (4.3 bits) and `rht:bits=4` (4.1) are equals: their NMSE is 1.0 and 0.9 %.
    """
    if hook in BACKEND_HOOKS:
        return 8 * BACKEND_HOOKS[hook].itemsize
    return int(parse_codec(hook.partition("+")[0]).bits())


def most_precise(predictions: Sequence[Prediction], tolerance: float = TOLERANCE) -> Prediction:
    """The prediction of the highest precision among those within the tolerance of the fastest.

    Among equals it prefers backend hooks, which need no memory, then the fastest.
    """
    fastest = min(prediction.seconds for prediction in predictions)
    close = [p for p in predictions if p.seconds <= fastest * (1 + tolerance)]
    return max(close, key=lambda p: (precision(p.hook), p.hook in BACKEND_HOOKS, -p.seconds))


def rivals(predictions: Sequence[Prediction], chosen: Prediction) -> list[Prediction]:
    """What a measurement may prefer to the choice, and the choice: the most precise first.

    At most MOST_RIVALS, the fastest ones. Nothing but the choice where its communication is hidden:
    nothing is faster then.
    """

    def may_win(other: Prediction) -> bool:
        least = other.seconds - other.doubt_s
        most = chosen.seconds + chosen.doubt_s
        if precision(other.hook) > precision(chosen.hook):
            return least <= most
        return least * (1 + TOLERANCE) < most

    others = [p for p in predictions if p is not chosen and may_win(p)]
    fastest = sorted(others, key=lambda p: p.seconds)[: MOST_RIVALS - 1]
    return sorted([chosen, *fastest], key=lambda p: -precision(p.hook))


def uses_backend(prediction: Prediction) -> bool:
    """Whether a prediction is of a backend hook."""
    return prediction.hook in BACKEND_HOOKS


def advise(
    predictions: Sequence[Prediction],
    needs_momentum: Callable[[str], bool],
    to_ask: Mapping[str | None, str] | None = None,
) -> str:
    """The verdict, one sentence: what to use, the margin that decided, and what may be wrong.

    predictions: of every hook, including one of PyTorch's and a codec that does not need momentum;
        ignores RULERS.
    needs_momentum: whether a hook trains well only in momentum mode and does not use it.
    to_ask: by exchange, what to tell attach so that it takes it; of those that it does not take
        anyway.
    """
    contestants = [p for p in predictions if p.hook not in RULERS]
    ready = [p for p in contestants if not needs_momentum(p.hook)]
    chosen = most_precise(ready)
    fastest = min(ready, key=lambda p: p.seconds)
    sentence = (
        f"{chosen.named} takes {chosen.shown} per step, {chosen.ratio_to_none:.2f} times a step "
        f"without communication"
    )
    if uses_backend(chosen):
        sentence = f"Do not compress: {sentence}"
        if chosen.exposed_s <= _HIDDEN * chosen.seconds:
            sentence += ": the backward pass hides its communication"
        elif uses_backend(fastest) or precision(fastest.hook) >= precision(chosen.hook):
            best = min((p for p in ready if not uses_backend(p)), key=lambda p: p.seconds)
            sentence += f", and the fastest codec, {best.named}, would take {best.shown}"
    else:
        rival = min(filter(uses_backend, contestants), key=lambda p: p.seconds)
        sentence = (
            f"Use {chosen.named}: {sentence}, {rival.seconds / chosen.seconds:.2f} times faster "
            f"than {rival.hook}, the best without gradferry"
        )
        if to_ask and chosen.exchange in to_ask:
            sentence += f"; for this exchange attach with {to_ask[chosen.exchange]}"
    if precision(fastest.hook) < precision(chosen.hook) and fastest.seconds < chosen.seconds:
        sentence += (
            f"; {fastest.named} ({fastest.shown}) is less precise and less than {TOLERANCE:.0%} "
            f"faster"
        )
    close = [p.named for p in rivals(ready, chosen) if p is not chosen]
    if close:
        sentence += f"; a measurement may prefer {' or '.join(close)}"
    fewer = [p for p in contestants if needs_momentum(p.hook)]
    further = min(fewer, key=lambda p: p.seconds, default=None)
    if further and further.seconds * (1 + TOLERANCE) < chosen.seconds:
        sentence += f"; in momentum mode {further.named} would take {further.shown}"
    return sentence + "."
