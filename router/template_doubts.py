"""Whether a chat template treats texts only in ways that can be followed while it runs.

Read from its syntax tree. What Python's own strings do with others, as `"".join` or `"%s" %`, gives plain strings: of
these nobody could say any more what they depend on.
"""

from __future__ import annotations

from collections.abc import Sequence

import jinja2
from jinja2 import nodes

_FOLLOWED: tuple[type[nodes.Node], ...] = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.Const, nodes.Name, nodes.NSRef, nodes.Keyword),
    *(nodes.For, nodes.If, nodes.Assign, nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair, nodes.Slice, nodes.CondExpr),
    *(nodes.And, nodes.Or, nodes.Not, nodes.Add, nodes.Sub, nodes.Neg, nodes.Operand, nodes.Getattr, nodes.Getitem),
    *(nodes.Break, nodes.Continue),
)
"""Kinds of nodes that do with a stand-in what it allows, whatever is below them."""
_TESTS = frozenset(
    {"string", "defined", "undefined", "none", "mapping", "iterable", "sequence", "boolean", "number", "true", "false"}
    | {"eq", "equalto"}
)
_FILTERS = frozenset({"trim", "length", "count", "list", "first", "last", "default"})
_FILTER_TO_TEST_PLACE = {"select": 0, "reject": 0, "selectattr": 1, "rejectattr": 1}
"""Filters that test what they are given, and which of their arguments names the test."""
_LAST_FILTERS = frozenset({"tojson", "join"})
"""Those that make plain strings, which is harmless where these are only written."""
_FUNCTIONS = frozenset({"raise_exception", "namespace", "range"})
_OTHER_FUNCTIONS = frozenset({"strftime_now", "lipsum", "cycler", "joiner"})
"""What they give depends on more than the conversation, under whatever name they are called."""


def template_doubt(template: str) -> str | None:
    """What in a template may look at texts unseen; `None` if nothing does."""
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return _doubt(environment.parse(template), is_last=False)
    except (jinja2.TemplateError, RecursionError) as error:
        return f"the template cannot be read: {error}"


def _doubt(node: nodes.Node, *, is_last: bool) -> str | None:
    """The same of one node; `is_last`: what it gives is written and nothing else."""
    is_followed = isinstance(node, _FOLLOWED)
    match node:
        case nodes.Name(name=name, ctx=access):
            is_followed = name not in (_OTHER_FUNCTIONS if access == "load" else _FUNCTIONS)
        case nodes.Concat():
            is_followed = is_last
        case nodes.Test(name=name):
            is_followed = name in _TESTS
        case nodes.Filter(name=name, args=arguments):
            is_followed = (
                name in _FILTERS
                or (is_last and name in _LAST_FILTERS)
                or (name in _FILTER_TO_TEST_PLACE and _is_followed_test(arguments[_FILTER_TO_TEST_PLACE[name] :]))
            )
        case nodes.Compare(expr=left, ops=operands):
            # A string looks into a string, or a sequence asks its items.
            is_followed = isinstance(left, nodes.Const) or all(
                operand.op not in ("in", "notin") or isinstance(operand.expr, nodes.List | nodes.Tuple)
                for operand in operands
            )
        case nodes.Mod(right=right):
            is_followed = isinstance(right, nodes.Const) and isinstance(right.value, int)
        case nodes.Call(node=function, args=arguments, kwargs=options):
            is_known = isinstance(function, nodes.Name) and function.name in _FUNCTIONS
            has_only_constants = all(isinstance(argument, nodes.Const) for argument in arguments) and not options
            is_followed = is_known or (isinstance(function, nodes.Getattr) and has_only_constants)
    # Whose arguments come out of a list is called with nobody knows what.
    if not is_followed or getattr(node, "dyn_args", None) is not None or getattr(node, "dyn_kwargs", None) is not None:
        return f"line {node.lineno}: {type(node).__name__} {getattr(node, 'name', '')}".rstrip()
    is_last_below = isinstance(node, nodes.Output) or (is_last and isinstance(node, nodes.Concat | nodes.Add))
    for child in node.iter_child_nodes():
        doubt = _doubt(child, is_last=is_last_below)
        if doubt is not None:
            return doubt
    return None


def _is_followed_test(arguments: Sequence[nodes.Expr]) -> bool:
    """Whether the first of them names a test whose answer is seen; that of none is whether something is true."""
    return not arguments or (isinstance(arguments[0], nodes.Const) and arguments[0].value in _TESTS)
