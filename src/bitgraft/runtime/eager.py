"""Keep a function out of `torch.compile`, as `torch.compiler.disable` does, without its two seconds of imports."""

from collections.abc import Callable
from functools import partial, wraps
from typing import ParamSpec, TypeVar

import torch
from torch._compile import _disable_dynamo

P = ParamSpec("P")
T = TypeVar("T")


def eager(function: Callable[P, T], *, recursive: bool = True) -> Callable[P, T]:
    """Never compile the function nor, if `recursive`, anything that it calls."""
    disabled = _disable_dynamo(function, recursive=recursive)

    @wraps(function)
    def call(*args: P.args, **named: P.kwargs) -> T:
        return disabled(*args, **named) if torch.compiler.is_compiling() else function(*args, **named)

    return call


eager_frame = partial(eager, recursive=False)
"""What the function calls may still be compiled."""
