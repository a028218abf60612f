"""Member kinds: architectures become modules that return `(members, batch, ...)`."""

from dissensus.members.deep_ensemble import DeepEnsemble
from dissensus.members.members import Members, View
from dissensus.members.single import SingleMember

__all__ = ["DeepEnsemble", "Members", "SingleMember", "View"]
