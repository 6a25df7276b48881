"""Chooses a hook from several predictions, and explains the choice in a sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gradferry.core.codec_spec import parse_codec
from gradferry.forecast.hook_names import BACKEND_HOOKS, RULERS
from gradferry.forecast.predict import Prediction

# A prediction within this share of the fastest counts as equally fast.
TOLERANCE = 0.02
# The time that a prediction exposes is off by this share, or less.
DOUBT = 0.3
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
        least = other.seconds - DOUBT * other.exposed_s
        most = chosen.seconds + DOUBT * chosen.exposed_s
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
    """The verdict, one sentence.

    predictions: of every hook, including one of PyTorch's and one codec; ignores RULERS.
    needs_momentum: whether a hook trains well only in momentum mode and does not use it.
    to_ask: by exchange, what to tell attach so that it takes it; of those that it does not take
        anyway.
    """
    contestants = [p for p in predictions if p.hook not in RULERS]
    ready = [p for p in contestants if not needs_momentum(p.hook)]
    chosen = most_precise(ready)
    rival = min(filter(uses_backend, contestants), key=lambda p: p.seconds)
    if uses_backend(chosen):
        sentence = f"Do not compress: {_figures(chosen)}"
        if chosen.exposed_s > _HIDDEN * chosen.seconds:
            codecs = [p for p in ready if not uses_backend(p)]
            best = min(codecs, key=lambda p: p.seconds)
            sentence += f", and the fastest codec, {best.named}, would take {_ms(best)}"
        else:
            sentence += ": the backward pass hides its communication"
    else:
        sentence = (
            f"Use {chosen.named}: {_figures(chosen)}, {rival.seconds / chosen.seconds:.2f} times "
            f"faster than {rival.hook}, the best without gradferry"
        )
        if to_ask and chosen.exchange in to_ask:
            sentence += f"; for this exchange attach with {to_ask[chosen.exchange]}"
    fewer = [p for p in contestants if needs_momentum(p.hook)]
    further = min(fewer, key=lambda p: p.seconds, default=None)
    if further and further.seconds * (1 + TOLERANCE) < chosen.seconds:
        sentence += f"; in momentum mode {further.named} would take {_ms(further)}"
    return sentence + "."


def _ms(prediction: Prediction) -> str:
    return f"{1e3 * prediction.seconds:.1f} ms"


def _figures(prediction: Prediction) -> str:
    return (
        f"{prediction.named} takes {_ms(prediction)} per step, "
        f"{prediction.ratio_to_none:.2f} times a step without communication"
    )
