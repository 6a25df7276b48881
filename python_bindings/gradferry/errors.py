"""The exceptions and the warning of gradferry.

Every message says what is wrong, which value, and what to do.
"""


class GradferryError(Exception):
    """Base of all errors that gradferry raises."""


class ConfigError(GradferryError, ValueError):
    """An argument, option or object cannot be used; nothing was changed."""


class RankMismatchError(GradferryError):
    """Ranks disagree on the configuration or on the model; the same text on every rank."""


class ProtocolError(GradferryError):
    """Received bytes are not what the wire format demands."""


class PeerError(GradferryError):
    """Another rank failed, left, or did not answer in time."""


class EchoError(PeerError):
    """This rank failed because another rank did; that rank's error has the cause."""


class StateError(GradferryError):
    """The object cannot do this in its present state."""


class DivergedError(GradferryError):
    """Parameters differ between ranks."""


class GradferryWarning(UserWarning):
    """A training goes on, but probably not as intended; the message says what to do."""
