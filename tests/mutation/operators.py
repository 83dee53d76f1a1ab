"""Small changes of Python code: which nodes of a syntax tree can be changed, and into what.

Only code that runs is changed: no docstring, annotation, decorator, assertion, nor what a raised
error says. Outside functions only numbers and truth values are.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

Change = tuple[str, ast.AST]
"""An operator's name, and the node that takes the changed one's place."""

_COMPARE: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
}
_OTHER_NAME = {"min": "max", "max": "min", "any": "all", "all": "any"}
_NO_SWAP = {"cast", "isinstance", "getattr", "hasattr", "min", "max"}
"""Functions that take a type or a name, or that do not care about the order."""
_PRINTED = {"__repr__", "__str__", "__format__"}
Function = (ast.FunctionDef, ast.AsyncFunctionDef)


def runs(node: ast.AST, inside: bool) -> Iterator[tuple[ast.AST, bool]]:
    """A node and all nodes below it that run, each with whether it is inside a function."""
    yield node, inside
    for child in _children(node):
        yield from runs(child, inside or isinstance(node, (*Function, ast.Lambda)))


def _children(node: ast.AST) -> Iterator[ast.AST]:
    left_out: list[ast.AST | None] = []
    if isinstance(node, (*Function, ast.ClassDef)):
        if node.name in _PRINTED:
            return
        left_out += node.decorator_list
    if isinstance(node, Function):
        left_out.append(node.returns)
    elif isinstance(node, ast.AnnAssign):
        left_out.append(node.annotation)
    elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        left_out += [node.test, *node.body]
    # Columns inside an f-string are not to be relied on before Python 3.12.
    never = (ast.Assert, ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.arg)
    if isinstance(node, never):
        return
    for child in ast.iter_child_nodes(node):
        if not any(child is other for other in left_out):
            yield child


def changes(node: ast.AST, inside: bool) -> Iterator[Change]:
    """All changes of one node, in a fixed order."""
    yield from _of_constant(node)
    if not inside:
        return
    yield from _of_statement(node)
    yield from _of_operator(node)
    yield from _of_call(node)
    yield from _of_index(node)


def _of_constant(node: ast.AST) -> Iterator[Change]:
    if not isinstance(node, ast.Constant):
        return
    value = node.value
    if isinstance(value, bool):
        yield "truth", ast.Constant(not value)
    elif isinstance(value, int):
        yield "number", ast.Constant(value + 1)
        yield "number", ast.Constant(value - 1)
    elif isinstance(value, float):
        yield "number", ast.Constant(value + 1)


def _of_statement(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.Expr(ast.Constant()):
            return
        case ast.Expr(ast.Yield() | ast.YieldFrom()):  # a generator without it is another thing
            return
        case ast.Expr() | ast.Raise() | ast.AugAssign() | ast.Delete():
            yield "drop", ast.Pass()
        case ast.Assign() if not all(isinstance(target, ast.Name) for target in node.targets):
            if not any(isinstance(target, ast.Tuple) for target in node.targets):
                yield "drop", ast.Pass()
        case ast.Return(ast.expr()) if not _is(node.value, None):
            yield "return None", ast.Return(ast.Constant(None))
        case ast.Return(None):
            yield "drop", ast.Pass()
        case ast.Break():
            yield "loop", ast.Continue()
        case ast.Continue():
            yield "loop", ast.Break()


def _of_operator(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.Compare():
            for at, op in enumerate(node.ops):
                for other in _COMPARE[type(op)]:
                    ops = [*node.ops[:at], other(), *node.ops[at + 1 :]]
                    yield "compare", ast.Compare(node.left, ops, node.comparators)
        case ast.BoolOp(op, values):
            yield "and/or", ast.BoolOp(ast.And() if isinstance(op, ast.Or) else ast.Or(), values)
        case ast.UnaryOp(ast.Not() | ast.Invert() | ast.USub(), operand):
            yield "unary", operand
        case ast.BinOp(left, op, right):
            yield "arithmetic", ast.BinOp(left, _ARITHMETIC[type(op)](), right)
        case ast.AugAssign(target, op, value):
            yield "arithmetic", ast.AugAssign(target, _ARITHMETIC[type(op)](), value)
        case ast.IfExp(test, body, orelse):
            yield "condition", ast.IfExp(ast.UnaryOp(ast.Not(), test), body, orelse)


def _of_call(node: ast.AST) -> Iterator[Change]:
    if not isinstance(node, ast.Call):
        return
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    if name in _OTHER_NAME:
        other = ast.Name(_OTHER_NAME[name], ast.Load())
        yield "other function", ast.Call(other, node.args, node.keywords)
    stars = any(isinstance(arg, ast.Starred) for arg in node.args)
    if len(node.args) == 2 and not stars and name not in _NO_SWAP:
        yield "swap", ast.Call(node.func, node.args[::-1], node.keywords)


def _of_index(node: ast.AST) -> Iterator[Change]:
    if not isinstance(node, ast.Subscript):
        return
    index = node.slice
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    for at, part in enumerate(parts):
        for name, other in _of_part(part):
            whole: ast.expr = other
            if isinstance(index, ast.Tuple):
                whole = ast.Tuple([*parts[:at], other, *parts[at + 1 :]], ast.Load())
            changed = copy.copy(node)
            changed.slice = whole
            yield name, changed


def _of_part(part: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(part, ast.Slice):
        if part.lower is not None:
            yield "slice", ast.Slice(None, part.upper, part.step)
        if part.upper is not None:
            yield "slice", ast.Slice(part.lower, None, part.step)
        for bound in ("lower", "upper"):
            end = getattr(part, bound)
            if end is not None and not isinstance(end, (ast.Constant, ast.UnaryOp)):
                changed = copy.copy(part)
                setattr(changed, bound, ast.BinOp(end, ast.Add(), ast.Constant(1)))
                yield "index", changed
    elif isinstance(part, (ast.Name, ast.BinOp)):
        yield "index", ast.BinOp(part, ast.Add(), ast.Constant(1))


def _is(node: ast.AST | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value
