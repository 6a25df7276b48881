"""Which ranks share a machine: found by each, told to all, and the same table on every rank."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from gradferry.core import nodes
from gradferry.core.nodes import (
    Identity,
    Nodes,
    check_option,
    choose_exchange,
    flat,
    identity,
    option_for,
    resolve,
)
from gradferry.errors import ConfigError
from on_ranks import on_ranks
from outcomes import attempt
from scenario import ChosenGradients, Scenario, Weight
from torch.nn.parallel import DistributedDataParallel
from world import World, Worlds

A, B = Identity("a", 1), Identity("b", 1)
A_ELSEWHERE = Identity("a", 2)  # on that machine, in another network namespace
HIDDEN = Identity(unread="no /proc")


def table(option: Any, *identities: Identity) -> Nodes:
    return resolve(check_option(option), range(len(identities)), identities)


ALONE = "every rank is on a node of its own"
FOUND = "nodes='auto' found several ranks on a node"


@pytest.mark.parametrize(
    ("option", "identities", "members", "reason"),
    [
        ("flat", (A, A, B, B), None, "nodes='flat'"),
        ("auto", (A, B, HIDDEN), None, ALONE),
        (1, (A, A), None, ALONE),
        ("auto", (A, A, A), None, "all ranks are on one node"),
        ("auto", (A, A, B, B), ((0, 1), (2, 3)), FOUND),
        ("auto", (A, B, A, B), ((0, 2), (1, 3)), FOUND),
        ("auto", (B, A, A), ((0,), (1, 2)), FOUND),
        ("auto", (A, A_ELSEWHERE, A), ((0, 2), (1,)), FOUND),
        ("auto", (HIDDEN, A, HIDDEN, A), ((0,), (1, 3), (2,)), FOUND),
        (2, (A, A, B, B), ((0, 1), (2, 3)), "nodes=2"),
        (3, (A, A, A), ((0, 1, 2),), "nodes=3"),
        (((0, 1), (2,)), (A, A, B), ((0, 1), (2,)), "a DeviceMesh says so"),
    ],
)
def test_ranks_of_one_machine_and_network_are_a_node_and_the_exchange_has_a_reason(
    option, identities, members, reason
):
    found = resolve(option, range(len(identities)), identities)
    chosen = Nodes(members) if members else flat(len(identities))
    for on_host in (True, False):
        exchange = choose_exchange(option, found, on_host=on_host)
        if on_host or reason != FOUND:
            assert (exchange.nodes, exchange.reason) == (chosen, reason)
        else:
            assert exchange.nodes.is_flat
            asked = "a device runs two levels where nodes= or a trial asks"
            assert asked in exchange.reason


def test_who_could_not_find_out_is_named_with_the_reason():
    assert not table("auto", A, B).note
    alone = table("auto", HIDDEN, A, HIDDEN, Identity(unread="odd"))
    assert alone.note == "machine unknown, so alone: ranks 0, 2 and 3 (no /proc)"
    given = table(2, HIDDEN, A, A, A)
    assert given == Nodes(((0, 1), (2, 3)))
    assert given.note == "machine unknown, so not checked: rank 0 (no /proc)"
    assert not table(1, HIDDEN, A).note
    assert not table("flat", HIDDEN, A).note


GROUP = (4, 5, 6, 7)  # global ranks


def test_rows_of_global_ranks_become_nodes_of_the_groups_ranks():
    assert resolve(((4, 6), (7, 5)), GROUP, [A, B, A, B]) == Nodes(((0, 2), (1, 3)))


APART = (A, A, A, B)  # ranks 6 and 7 are on different machines
ELSEWHERE = (A, A_ELSEWHERE, B, B)  # ranks 4 and 5 are in different network namespaces


@pytest.mark.parametrize(
    ("option", "identities", "message"),
    [
        ("flatt", APART, "nodes='flatt' must be 'auto', 'flat', a number of ranks per node, or a"),
        (True, APART, "nodes=True must be"),
        (2.0, APART, "nodes=2.0 must be"),
        (None, APART, "nodes=None must be"),
        ([[0, 1]], APART, r"nodes=\[\[0, 1\]\] must be"),
        (0, APART, "nodes=0: a node has 1 rank or more"),
        (-2, APART, "nodes=-2: a node has 1 rank or more"),
        (3, (A,) * 4, "nodes=3 must divide .*, 4; use another"),
        (8, (A,) * 4, "nodes=8 must divide .*, 4; use another"),
        (((4, 5), (6, 8)), (A,) * 4, "lacks rank 7, has besides rank 8"),
        (((4, 5),), (A,) * 4, "lacks ranks 6 and 7"),
        (((4, 5), (6, 4)), (A,) * 4, "lacks rank 7, has more than once rank 4"),
        (2, APART, "ranks 6 and 7 on one node.* different machines"),
        (2, ELSEWHERE, "ranks 4 and 5 .* different network namespaces"),
        (((4, 5), (6, 7)), APART, "ranks 6 and 7 on one node.* different machines"),
        (((4, 5), (6, 7)), ELSEWHERE, "ranks 4 and 5 .* different network namespaces"),
    ],
)
def test_nodes_that_there_cannot_be_are_refused(option, identities, message):
    with pytest.raises(ConfigError, match=message):
        # A tuple is what is left of a DeviceMesh.
        resolve(option if isinstance(option, tuple) else check_option(option), GROUP, identities)


def test_processes_of_this_machine_have_one_identity(world_of_2: World) -> None:
    assert world_of_2.run(identity) == [identity()] * 2
    assert not identity().unread


@pytest.mark.parametrize(
    ("hidden", "written", "reason"),
    [
        ("_BOOT_ID", None, "[Errno 2] No such file or directory: '"),
        ("_NETWORK", None, "[Errno 2] No such file or directory: '"),
        ("_BOOT_ID", b"\n", "boot_id is empty"),
        ("_BOOT_ID", b"\xff", "ascii"),
    ],
)
def test_what_cannot_be_read_is_a_reason(hidden, written, reason, tmp_path, monkeypatch):
    monkeypatch.setattr(nodes, hidden, tmp_path / "boot_id")
    if written:
        (tmp_path / "boot_id").write_bytes(written)
    assert reason in identity().unread


@on_ranks(4)
def test_rows_of_a_mesh_are_nodes() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "ranks"))
    cube = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicas", "nodes", "ranks"))
    assert check_option(mesh) == check_option(cube["nodes", "ranks"]) == ((0, 1), (2, 3))
    for wrong, count in ((mesh["ranks"], "1 dimension"), (cube, "3 dimensions")):
        outcome = attempt(lambda: check_option(wrong))  # noqa: B023
        assert outcome.error == "ConfigError"
        assert f"has a DeviceMesh of {count} and needs 2" in outcome.text


def case_attach(places: list[Identity], option: Any) -> dict[str, Any]:
    """Attaches where every rank is told where it runs."""
    import gradferry
    from gradferry.averaging import start

    ddp = DistributedDataParallel(ChosenGradients(Scenario((Weight("only", (40, 40)),))))
    with mock.patch.object(start, "identity", return_value=places[dist.get_rank()]):
        state = gradferry.attach(ddp, "q4", nodes=option)
    running = gradferry.ddp.state.bound_to(state).running
    return {"text": str(state), "nodes": running.nodes, "config_hash": running.config_hash}


def test_all_ranks_learn_at_attach_where_all_are(worlds: Worlds) -> None:
    def attached(option: Any, *places: Identity) -> list[dict[str, Any]]:
        return worlds(4).run(case_attach, places=places, option=option)

    answers = attached("auto", A, B, A, HIDDEN)
    for rank, answer in enumerate(answers):
        assert answer["nodes"] == Nodes(((0, 2), (1,), (3,)))
        within = "; within this node through shared memory" if rank in (0, 2) else ""
        assert (
            "  exchange: two levels, 3 nodes of 1 to 2 ranks, because nodes='auto' found several "
            f"ranks on a node{within}; machine unknown, so alone: rank 3 (no /proc)\n"
        ) in answer["text"]
    (config_hash,) = {answer["config_hash"] for answer in answers}
    # Messages tell tables of one option apart.
    assert attached("auto", A, B, A, B)[0]["config_hash"] != config_hash
    for option, places, text in (
        ("flat", (A, B, A, B), "flat between 4 ranks, because nodes='flat'"),
        (1, (A, B, A, B), f"flat between 4 ranks on 4 nodes of 1 rank, because {ALONE}"),
        ("auto", (A,) * 4, "flat between 4 ranks on 1 node of 4 ranks, because all ranks are on"),
        (4, (A,) * 4, "two levels, 1 node of 4 ranks, because nodes=4; within"),
    ):
        assert f"  exchange: {text}" in attached(option, *places)[0]["text"]


@pytest.mark.parametrize(
    ("members", "option"),
    [
        (((0,), (1,)), "flat"),
        (((0, 1), (2, 3)), 2),
        (((0, 2), (1, 3)), None),
        (((0, 1), (2,)), None),
    ],
)
def test_option_for_an_exchange(members, option):
    assert option_for(Nodes(members)) == option
