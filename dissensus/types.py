"""Shapes as types: the one axis order, `(members, batch, ...)`, written once.

The annotations are jaxtyping's. They are only evaluated where jaxtyping is already loaded (our test suite loads it and
checks every call against them) and by type checkers; a user neither needs the package nor pays for it.
"""

import sys
from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor

if TYPE_CHECKING or "jaxtyping" in sys.modules:
    from jaxtyping import Bool, Float, Int
else:

    class _Plain:
        """Stands in for a jaxtyping dtype: `Float[Tensor, "a b"]` is then `Tensor`."""

        def __class_getitem__(cls, item: tuple[type, str]) -> type:
            return item[0]

    Bool = Float = Int = _Plain

MemberOutputs: TypeAlias = Float[Tensor, "members batch ..."]
MemberLogits: TypeAlias = Float[Tensor, "members batch classes"]
MemberWeights: TypeAlias = Float[Tensor, " members"]
Probs: TypeAlias = Float[Tensor, "batch classes"]
Labels: TypeAlias = Int[Tensor, " batch"]
Scores: TypeAlias = Float[Tensor, " batch"]
Confidences: TypeAlias = Float[Tensor, " batch"]
Correct: TypeAlias = Bool[Tensor, " batch"]
Scalar: TypeAlias = Float[Tensor, ""]

__all__ = [
    "Bool",
    "Confidences",
    "Correct",
    "Float",
    "Int",
    "Labels",
    "MemberLogits",
    "MemberOutputs",
    "MemberWeights",
    "Probs",
    "Scalar",
    "Scores",
]
