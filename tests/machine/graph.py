"""The control flow of a kernel: basic blocks, natural loops, and the ways through a loop."""

import re
from dataclasses import dataclass, field

from machine.listing import Instruction, Kernel

LEAVES = {"EXIT", "RET", "BRA", "BRX", "BRXU", "JMP", "JMX", "JMXU", "KILL", "BPT"}
TARGET = re.compile(r"\.L_x_\d+")


@dataclass
class Block:
    code: list[Instruction] = field(default_factory=list)
    next: list[int] = field(default_factory=list)  # numbers of blocks

    @property
    def calls(self) -> bool:
        return any(one.name in {"CALL", "RET"} and not leaves(one) for one in self.code)


def leaves(one: Instruction) -> bool:
    """Whether an instruction ends a block. A call of a place in the kernel itself is a branch: code
    for sm_80 leaves a loop so."""
    return one.name in LEAVES or (one.name == "CALL" and bool(TARGET.search(one.operands)))


def blocks(kernel: Kernel) -> list[Block]:
    starts = {kernel.code[0].at, *kernel.labels.values()}
    for one, following in zip(kernel.code, kernel.code[1:], strict=False):
        if leaves(one):
            starts.add(following.at)
    numbers = {at: n for n, at in enumerate(sorted(starts))}
    found = [Block() for _ in numbers]
    number = 0
    for one in kernel.code:
        number = numbers.get(one.at, number)
        found[number].code.append(one)
    for n, block in enumerate(found):
        if not block.code:
            continue
        last = block.code[-1]
        if last.opcode == "BRA.DIV":  # which only threads take that wait for others of their warp
            block.next = [n + 1]
            continue
        targets = TARGET.findall(last.operands) if leaves(last) and last.name != "RET" else []
        block.next = [numbers[kernel.labels[t]] for t in targets if t in kernel.labels]
        goes_on = not leaves(last) or last.guard or conditional(last)
        if goes_on and n + 1 < len(found):
            block.next.append(n + 1)
    return found


def conditional(branch: Instruction) -> bool:
    """Whether a branch without a guard may fall through: `BRA.U UP0, LABEL`, `BRA P0, LABEL`."""
    return branch.name == "BRA" and bool(re.match(r"!?U?P[0-9]", branch.operands))


def order_of(code: list[Block]) -> list[int]:
    """The blocks that are reached, each before what it leads to but for ways back."""
    order: list[int] = []
    seen = {0}
    stack = [(0, iter(code[0].next))]
    while stack:
        node, rest = stack[-1]
        for child in rest:
            if child not in seen:
                seen.add(child)
                stack.append((child, iter(code[child].next)))
                break
        else:
            stack.pop()
            order.append(node)
    return order[::-1]


def loops(code: list[Block]) -> dict[int, set[int]]:
    """The natural loops: the blocks of each, by the number of the first."""
    order = order_of(code)
    rank = {node: i for i, node in enumerate(order)}
    before: dict[int, list[int]] = {node: [] for node in order}
    for node in order:
        for child in code[node].next:
            before[child].append(node)
    above = dominators(order, rank, before)
    found: dict[int, set[int]] = {}
    for node in order:
        for head in code[node].next:
            if not dominates(head, node, above):
                continue
            body = found.setdefault(head, {head})
            todo = [node]
            while todo:
                one = todo.pop()
                if one not in body:
                    body.add(one)
                    todo += before[one]
    return found


def dominators(
    order: list[int], rank: dict[int, int], before: dict[int, list[int]]
) -> dict[int, int]:
    """The nearest block that every way to a block goes through (Cooper, Harvey, Kennedy 2001)."""
    above = {order[0]: order[0]}
    changed = True
    while changed:
        changed = False
        for node in order[1:]:
            known = [one for one in before[node] if one in above]
            nearest = known[0]
            for other in known[1:]:
                while nearest != other:
                    while rank[nearest] > rank[other]:
                        nearest = above[nearest]
                    while rank[other] > rank[nearest]:
                        other = above[other]
            if above.get(node) != nearest:
                above[node] = nearest
                changed = True
    return above


def dominates(head: int, node: int, above: dict[int, int]) -> bool:
    while node != head and above[node] != node:
        node = above[node]
    return node == head
