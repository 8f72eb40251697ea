"""Which ranks a preflight lets talk to each other, in which order, and who is to blame where they do not.

First the ranks of each node among themselves, then every node with its two neighbours in a ring, last all together.
Neighbours are tried in rounds in which no node is in two pairs, so that a pair has the fabric's links for itself; rank
i of a node talks to rank i of the other, which on a rail-optimised fabric tries every rail.
"""

from collections.abc import Mapping, Sequence

Edge = tuple[str, str]
IN_NODE, ALL = "in_node", "all"
Groups = dict[str, list[list[int]]]
"""Stage -> its groups of global ranks; no rank is in two groups of a stage."""


def stages(nodes: Mapping[str, Sequence[int]]) -> Groups:
    """The stages before the one of all, in their order.

    Args:
        nodes: node -> its global ranks, nodes in the order of the ring.
    """
    planned: Groups = {}
    if any(len(ranks) > 1 for ranks in nodes.values()):
        planned[IN_NODE] = [list(ranks) for ranks in nodes.values() if len(ranks) > 1]
    for stage, pairs in rounds(list(nodes)).items():
        rails = [rail for a, b in pairs for rail in zip(nodes[a], nodes[b], strict=False)]
        planned[stage] = [list(rail) for rail in rails]
    return planned


def rounds(nodes: Sequence[str]) -> dict[str, list[Edge]]:
    """Neighbours in a ring of nodes: two rounds, three where their number is odd; one pair of two nodes."""
    count = len(nodes)
    found: dict[str, list[Edge]] = {}
    for place in range(count if count > 2 else count - 1):
        closes_an_odd_ring = place == count - 1 and count % 2 == 1
        number = 2 if closes_an_odd_ring else place % 2
        found.setdefault(f"neighbours_{number}", []).append((nodes[place], nodes[(place + 1) % count]))
    return dict(sorted(found.items()))


def blame(worked: Mapping[Edge, bool], lost: set[str]) -> dict[str, str]:
    """Nodes that are at fault for pairs that did not work, with the reason.

    A pair with a lost node says nothing about the other one. Of a pair that failed, the node is to blame that works
    with nobody, if the other works with somebody; if both do, it is what lies between them, and if none does, nobody
    can tell: then both are named.

    Args:
        worked: pairs of nodes and whether they could talk.
        lost: nodes that did not answer any more.
    """
    judged = {pair: well for pair, well in worked.items() if not lost & set(pair)}
    well_with_somebody = {node for pair, well in judged.items() if well for node in pair}
    blamed: dict[str, str] = {}
    for (a, b), well in judged.items():
        if well:
            continue
        for node, other in ((a, b), (b, a)):
            if (node in well_with_somebody) == (other in well_with_somebody):
                blamed[node] = f"cannot talk to {other}, and which of the two it is cannot be told"
            elif node not in well_with_somebody:
                blamed.setdefault(node, f"cannot talk to {other}, which can talk to others")
    return blamed
