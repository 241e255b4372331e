"""GBNF, llama.cpp's form of grammars, made into Lark's. llguidance's parser reads it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache

from llguidance.gbnf_to_lark import ASTNode, GrammarParser, RuleNode, RuleRefNode, resolve

# Of so many grammars the outcome is remembered: whoever asks for one asks for it again.
_MAX_REMEMBERED = 32


@lru_cache(_MAX_REMEMBERED)
def lark_of(gbnf: str) -> str:
    """The same grammar in Lark's form. The time it takes is linear in the text.

    Raises an `Exception` of any kind where it cannot be read.
    """
    rules: dict[str, RuleNode] = GrammarParser().parse(gbnf)
    _mark_terminals(rules)
    resolve(rules)
    ordered = sorted(rules.values(), key=lambda rule: rule.order)
    return "\n".join(["%llguidance {}", "", *map(str, ordered), ""])


def _mark_terminals(rules: dict[str, RuleNode]) -> None:
    """Mark the rules that refer to none but terminals.

    `resolve` would find them as well, but goes over all rules once for each link of the longest chain of references.
    """
    num_open: dict[str, int] = {}
    used_by: dict[str, list[str]] = defaultdict(list)
    for name, rule in rules.items():
        used = set(_names_in(rule))
        num_open[name] = len(used)
        for other in used:
            used_by[other].append(name)
    ready = [name for name, num in num_open.items() if num == 0]
    while ready:
        if (name := ready.pop()) == "root":  # the start is no terminal
            continue
        rules[name].rule_is_terminal = True
        for other in used_by[name]:
            num_open[other] -= 1
            if num_open[other] == 0:
                ready.append(other)


def _names_in(rule: RuleNode) -> Iterator[str]:
    left: list[ASTNode] = [rule]
    while left:
        node = left.pop()
        if isinstance(node, RuleRefNode):
            yield node.name
        left += node.children()
