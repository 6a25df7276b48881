"""How the scripts of examples/trainers begin and end."""

from __future__ import annotations

import re
import socket


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def expect_trained(code: int, said: str, errors: str = "") -> None:
    """One rank says how its training ended: far below ln 10, the loss of a guess."""
    assert code == 0, (said, errors)
    ((loss, ratio),) = re.findall(r"^loss (\d+\.\d+), ratio (\d+\.\d+)$", said, re.MULTILINE)
    assert float(loss) < 1
    # 4.3 bits per element; headers and biases, which stay as they are, take the rest.
    assert 6 < float(ratio) < 32 / 4.3
