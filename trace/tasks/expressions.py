"""Evaluate a one-line integer expression in x without executing it: tokens, `ast.parse`, and a walk over a whitelist.

    expression := integers, x, + - * // % **, unary minus and plus, parentheses, abs(a), min(a, b, ...), max(a, b, ...)

This judges the miniature coding tasks thousands of times a second as the reward of reinforcement learning, on text a
half-trained policy wrote. Nothing is compiled or called: no names but x, no attributes, no strings. What can grow is
bounded: length, depth, number of nodes, the size of every intermediate value and of every exponent, so `9**9**9` ends
as an error after one multiplication's worth of work. The token check runs before the parser: it also keeps the
parser's deprecation warnings (`1if x`) and its memory use on odd input out of the reward loop.
"""

import ast
import re
from collections.abc import Callable

MAX_LENGTH = 256
MAX_NODES = 64
MAX_EXPONENT = 16
MAX_MAGNITUDE = 10**18

_TOKENS = re.compile(r"(?:\s|//|[-+*%(),]|\d{1,19}(?![\w.])|(?:x|abs|min|max)(?!\w))*+", re.ASCII)
_FUNCTIONS: dict[str, tuple[Callable[..., int], int, int]] = {
    "abs": (abs, 1, 1),
    "min": (min, 2, 8),
    "max": (max, 2, 8),
}


class ExpressionError(ValueError):
    """The text is not an expression of the whitelist, or one of its values is undefined or out of bounds."""


def parse_expression(text: str) -> ast.expr:
    """The checked syntax tree of `text`; ExpressionError says what is not allowed."""
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"longer than {MAX_LENGTH} characters")
    source = text.strip()
    if not source:
        raise ExpressionError("empty")
    if not _TOKENS.fullmatch(source) or "\n" in source or "\r" in source:
        raise ExpressionError("contains something other than integers, x, + - * // % **, parentheses, abs, min, max")
    try:
        tree = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ExpressionError("not an expression") from None
    check_tree(tree)
    return tree


def check_tree(tree: ast.expr, *, argument: str = "x") -> None:
    """Raise ExpressionError unless every node of `tree` is of the whitelist, with `argument` as the only name."""
    remaining = [tree]
    num_nodes = 0
    while remaining:
        node = remaining.pop()
        num_nodes += 1
        if num_nodes > MAX_NODES:
            raise ExpressionError(f"more than {MAX_NODES} operations and operands")
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            remaining += (node.left, node.right)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
            remaining.append(node.operand)
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            if node.value > MAX_MAGNITUDE:
                raise ExpressionError("a number is too large")
        elif isinstance(node, ast.Name) and node.id == argument and argument not in _FUNCTIONS:
            pass
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
            _, fewest, most = _FUNCTIONS[node.func.id]
            if node.keywords or not fewest <= len(node.args) <= most:
                raise ExpressionError(f"{node.func.id} takes {fewest} to {most} values")
            remaining += node.args
        else:
            raise ExpressionError(f"{type(node).__name__} is not allowed")


def evaluate_expression(tree: ast.expr, x: int) -> int:
    """The value of a tree that passed `check_tree`; ExpressionError where it is undefined or leaves the bounds."""
    if type(x) is not int:
        raise ExpressionError(f"x must be an integer, not {type(x).__name__}")
    return _value(tree, x)


def _value(node: ast.expr, x: int) -> int:
    if isinstance(node, ast.Constant):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.Name):
        return x
    if isinstance(node, ast.BinOp):
        result = _BINARY[type(node.op)](_value(node.left, x), _value(node.right, x))
    elif isinstance(node, ast.UnaryOp):
        operand = _value(node.operand, x)
        return -operand if isinstance(node.op, ast.USub) else operand
    else:
        assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        result = _FUNCTIONS[node.func.id][0](*[_value(argument, x) for argument in node.args])
    if not -MAX_MAGNITUDE <= result <= MAX_MAGNITUDE:
        raise ExpressionError("a value is too large")
    return result


def _floor_divide(left: int, right: int) -> int:
    if right == 0:
        raise ExpressionError("division by zero")
    return left // right


def _modulo(left: int, right: int) -> int:
    if right == 0:
        raise ExpressionError("division by zero")
    return left % right


def _power(left: int, right: int) -> int:
    if not 0 <= right <= MAX_EXPONENT:
        raise ExpressionError(f"an exponent is outside 0..{MAX_EXPONENT}")
    return left**right


_BINARY = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.FloorDiv: _floor_divide,
    ast.Mod: _modulo,
    ast.Pow: _power,
}
