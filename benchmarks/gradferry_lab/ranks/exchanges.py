"""Which exchanges a benchmark compares, between ranks that share hosts."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence

from gradferry.core.nodes import AUTO, FLAT, TWO_LEVEL, Exchange, Nodes, choose_exchange
from gradferry.errors import ConfigError

from gradferry_lab.output.table import Column, Row

EXCHANGES = (FLAT, TWO_LEVEL, AUTO)


def add_exchange(parser: argparse.ArgumentParser) -> None:
    """Declares --exchange."""
    parser.add_argument(
        "--exchange",
        nargs="+",
        choices=EXCHANGES,
        default=[AUTO],
        help="of codecs, where ranks share hosts: 'flat' between all ranks, 'two-level' between "
        "the sums of hosts, 'auto' what attach chooses; several are compared (default: auto)",
    )


def with_exchanges(
    names: Iterable[str], exchanges: Iterable[str], not_ours: Callable[[str], bool]
) -> list[tuple[str, str | None]]:
    """Every name with each of the exchanges; None: it is none of gradferry's."""
    asked = list(exchanges)
    return [(name, each) for name in names for each in ([None] if not_ours(name) else asked)]


def check_exchange(exchange: str, hosts: Nodes) -> None:
    """Raises ConfigError when TWO_LEVEL has nothing to add up."""
    if exchange == TWO_LEVEL and hosts.is_flat:
        raise ConfigError(
            f"--exchange {TWO_LEVEL}: every rank is alone on its host, so there is only the flat "
            "exchange; put several ranks on a host, with --ranks-per-host under --link"
        )


def nodes_option(exchange: str, hosts: Nodes) -> object:
    """The option `nodes` of attach for an exchange between ranks on these hosts. Raises
    ConfigError.
    """
    check_exchange(exchange, hosts)
    if exchange != TWO_LEVEL:
        return exchange
    per_host = hosts.smallest
    ranks = range(hosts.world_size)
    even = tuple(tuple(ranks[first : first + per_host]) for first in ranks[::per_host])
    if hosts.members != even:
        raise ConfigError(
            f"--exchange {TWO_LEVEL}: {hosts.describe()}, which attach takes only where it finds "
            f"them itself: use {AUTO}, or start as many ranks on every host, one host after another"
        )
    return per_host


def exchange_among(exchange: str, hosts: Nodes, *, on_host: bool) -> Exchange:
    """What attach takes for it: as with `nodes_option`, but hosts may have any sizes. Raises
    ConfigError.
    """
    check_exchange(exchange, hosts)
    option = hosts.members if exchange == TWO_LEVEL else exchange
    return choose_exchange(option, hosts, on_host=on_host)


def exchange_columns(rows: Sequence[Row]) -> list[Column]:
    """A column each with the exchange that was asked for, and with what was chosen, where there was
    a choice.
    """
    shared = any(1 < row.get("hosts", 1) < row["ranks"] for row in rows)
    # Older files do not say.
    asks = shared or any((row.get("exchange") or AUTO) != AUTO for row in rows)
    names = [str(row.get("hook") or row.get("codec")) for row in rows]
    chose = any(row.get("chosen") for row in rows)
    columns = []
    if asks:
        columns.append(Column("exchange", lambda row: row.get("exchange") or "-", is_number=False))
    if chose and (asks or any(name.startswith(AUTO) for name in names)):
        columns.append(
            Column("chosen", lambda row: row.get("chosen") or "-", is_number=False, detail=1)
        )
    return columns
