"""The control-flow graph: basic blocks, and the order in which parted lanes run so that they meet again."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

BRANCH, EXIT = 1, 2


def blocks(
    n: int, control: Sequence[int], guarded: Sequence[bool], targets: Sequence[int]
) -> tuple[list[range], list[set[int]]]:
    """The basic blocks' instructions, and the blocks that may follow each."""
    leaders = {0} | {t for t in targets if t >= 0} | {i + 1 for i in range(n - 1) if control[i]}
    starts = sorted(leaders)
    spans = [range(start, end) for start, end in zip(starts, [*starts[1:], n], strict=True)]
    block = {start: b for b, start in enumerate(starts)}
    successors: list[set[int]] = []
    for b, span in enumerate(spans):
        last = span[-1]
        following: set[int] = set()
        if control[last] == BRANCH:
            following.add(block[targets[last]])
        if span.stop < n and (not control[last] or guarded[last]):
            following.add(b + 1)
        successors.append(following)
    return spans, successors


def order(
    n: int, control: Sequence[int], guarded: Sequence[bool], targets: Sequence[int]
) -> tuple[set[int], list[int]]:
    """Instructions that start a basic block, and every instruction's rank: of lanes at two places, the lower rank runs first.

    Blocks of one loop (a strongly connected component) keep program order; components are in topological order, nearest to
    program order, since a join may lie before the code that branches back to it.
    """
    spans, successors = blocks(n, control, guarded, targets)
    ranks = _running_order(successors)
    rank = [0] * n
    for b, span in enumerate(spans):
        rank[span.start : span.stop] = [ranks[b]] * len(span)
    return {span.start for span in spans}, rank


def _components(successors: Sequence[set[int]]) -> list[list[int]]:
    """Strongly connected components (Tarjan's algorithm, without recursion)."""
    n = len(successors)
    number, low, on_stack = [-1] * n, [0] * n, [False] * n
    stack: list[int] = []
    found: list[list[int]] = []
    count = 0
    for root in range(n):
        if number[root] >= 0:
            continue
        work = [(root, iter(sorted(successors[root])))]
        number[root] = low[root] = count
        count += 1
        stack.append(root)
        on_stack[root] = True
        while work:
            node, rest = work[-1]
            for s in rest:
                if number[s] < 0:
                    number[s] = low[s] = count
                    count += 1
                    stack.append(s)
                    on_stack[s] = True
                    work.append((s, iter(sorted(successors[s]))))
                    break
                if on_stack[s]:
                    low[node] = min(low[node], number[s])
            else:
                work.pop()
                if work:
                    parent = work[-1][0]
                    low[parent] = min(low[parent], low[node])
                if low[node] == number[node]:
                    members: list[int] = []
                    while not members or members[-1] != node:
                        members.append(stack.pop())
                        on_stack[members[-1]] = False
                    found.append(sorted(members))
    return found


def _running_order(successors: Sequence[set[int]]) -> list[int]:
    groups = _components(successors)
    of = {b: g for g, members in enumerate(groups) for b in members}
    after: list[set[int]] = [set() for _ in groups]
    waiting = [0] * len(groups)
    for b, following in enumerate(successors):
        for s in following:
            if of[s] != of[b] and of[s] not in after[of[b]]:
                after[of[b]].add(of[s])
                waiting[of[s]] += 1
    heap = [(members[0], g) for g, members in enumerate(groups) if not waiting[g]]
    heapq.heapify(heap)
    rank = [0] * len(successors)
    at = 0
    while heap:
        _, g = heapq.heappop(heap)
        for b in groups[g]:
            rank[b] = at
            at += 1
        for s in after[g]:
            waiting[s] -= 1
            if not waiting[s]:
                heapq.heappush(heap, (groups[s][0], s))
    return rank
