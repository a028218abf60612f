"""Member kinds: architectures become modules that return `(members, batch, ...)`."""

from dissensus.members.deep_ensemble import DeepEnsemble
from dissensus.members.members import Members, View

__all__ = ["DeepEnsemble", "Members", "View"]
