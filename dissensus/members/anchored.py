"""Anchored networks: each input is shown as a reference and what is left of it, so that references make members."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from dissensus._signatures import checked, whole_number
from dissensus.data.sources import Array, device_of
from dissensus.data.trees import Output, Tree, as_tensor, join_rows, pick
from dissensus.members.deep_ensemble import DeepEnsemble, OnDeepEnsemble
from dissensus.members.members import Keys, Members, View, under
from dissensus.members.shared import fastest_layout
from dissensus.members.stacking import Tensors
from dissensus.nets.first_layer import Initialise, double_first_layers
from dissensus.randomness import bits, derive, fold, permutation, uniform
from dissensus.types import MemberLogits, Scores

TemperatureForm = Literal["exponential", "deviation"]

# Sigmoids that differ by less cannot be told from rounded ones in half precision.
_LEAST_DEVIATION = 1e-3


def paired(reference: Tensor, x: Tensor, axis: int) -> Tensor:
    """Return `[reference, x - reference]`, joined along an axis counted from the end; references spread over the inputs."""
    residual = x - reference
    return torch.cat([reference.expand_as(residual), residual], dim=axis)


class AnchoredNet(nn.Module):
    """One doubled network that sees every input through one reference."""

    reference: Tensor

    def __init__(self, net: nn.Module, reference: Tensor, axis: int | None = None) -> None:
        """Take a doubled network, a reference, and the axis on which pairs are joined, from the end; an input's first by default."""
        super().__init__()
        self.net, self.axis = net, -reference.ndim if axis is None else axis
        self.register_buffer("reference", reference.detach().clone())

    def forward(self, x: Tensor) -> Any:
        """Run the network on `[reference, x - reference]`."""
        return self.net(paired(self.reference, x, self.axis))


def anchor_temperature(logits: MemberLogits, form: TemperatureForm = "exponential") -> Scores:
    r"""Return how much one network's logits are cooled for each input, from how much they differ between references.

    With $c$ the mean over classes of the standard deviation (of a sample) over references of the *sigmoid* of the logits,
    `"exponential"` is $1 + e^c$ and `"deviation"` is $c$ itself, but at least 0.001: where all references agree, logits become a
    thousand times as large, not infinite.

    Args:
        logits: One network's outputs with each of at least two references, `(references, batch, classes)`.
        form: Which of the two.

    Returns:
        What to divide logits by, `(batch,)`; higher where references disagree. `"exponential"` is never below 2: it makes
        predictions less confident even where all references agree.

    Example:
        >>> anchor_temperature(torch.zeros(3, 4, 2))
        tensor([2., 2., 2., 2.])

    References:
        Thiagarajan et al., 2022, <https://arxiv.org/abs/2207.07235>.
    """
    if len(logits) < 2:
        raise ValueError(f"A temperature compares at least two references; got {len(logits)}.")
    spread = logits.sigmoid().std(0).mean(-1)
    return 1 + spread.exp() if form == "exponential" else spread.clamp_min(_LEAST_DEVIATION)


@contextmanager
def giving_features(nets: Iterable[nn.Module]) -> Iterator[None]:
    """Networks that are called inside give what their last linear layer took, in place of what they say.

    The features leave as the network's own output, so they go wherever outputs go: out of `functional_call`, `vmap`, a
    recorded step and a captured one, from none of which a tensor that is kept aside could be taken.
    """
    with ExitStack() as hooks:
        for net in nets:
            last: dict[str, Tensor] = {}
            # A network that is one linear layer notes first and gives then: hooks run in the order of their registration.
            for layer in (module for module in net.modules() if isinstance(module, nn.Linear)):
                hooks.enter_context(layer.register_forward_hook(partial(_note, last), with_kwargs=True))
            hooks.enter_context(net.register_forward_hook(partial(_give, last)))
        yield


def _note(last: dict[str, Tensor], layer: nn.Module, args: Any, kwargs: dict[str, Any], output: Tensor) -> None:
    last.update(taken=args[0] if args else kwargs["input"], given=output)


def _give(last: dict[str, Tensor], net: nn.Module, args: Any, output: Any) -> Tensor:
    taken, given = last.pop("taken", None), last.pop("given", None)
    if taken is None or given is None or given.shape != getattr(output, "shape", None):
        why = "no nn.Linear runs in this network"
        if given is not None:
            says = f"a {type(output).__name__}" if not isinstance(output, Tensor) else f"{tuple(output.shape)}"
            why = f"this network's is not its head: it gives {tuple(given.shape)}, the network {says}"
        raise ValueError(f"Features are what the last linear layer takes; {why}. Take a linear head, or law='outputs'.")
    return taken


def _as_ensemble(net: Any, num_nets: int, seed: int) -> DeepEnsemble:
    """Return what was given as networks as a deep ensemble of copies."""
    if isinstance(net, Members) and not isinstance(net, DeepEnsemble):
        raise ValueError(
            "`net` must be a network, a list of networks, a DeepEnsemble or a function that makes one; got a "
            f"{type(net).__name__}. Heads on a frozen backbone are anchored on its features: Anchored(ens.heads, "
            "features[:100]), with the features of ds.cache_features(backbone, data)."
        )
    makes = callable(net) and not isinstance(net, nn.Module)
    if whole_number("num_nets", num_nets, 1) != 1 and not makes:
        raise ValueError(f"num_nets={num_nets} asks for new networks, which only a function makes: `lambda: Net(...)`.")
    if isinstance(net, DeepEnsemble):
        return net
    if makes:
        return DeepEnsemble(net, num_nets, seed)
    return DeepEnsemble.from_members([net] if isinstance(net, nn.Module) else net, seed)


def _as_inputs(references: Array) -> Tensor:
    """Return references as one tensor of inputs, or say what is wrong with them."""
    if isinstance(references, list | tuple):
        raise ValueError(
            f"`references` must be one tensor or array of inputs, (references, ...); got a {type(references).__name__}. Of pairs and "
            "data sets hand over the inputs alone."
        )
    inputs = as_tensor(references, "references")
    finite = bool(inputs.isfinite().all())
    if inputs.ndim < 2 or len(inputs) == 0 or not inputs.is_floating_point() or not finite:
        raise ValueError(
            f"`references` must be one batch of inputs, (references, ...), finite real numbers; got {inputs.dtype} shaped "
            f"{tuple(inputs.shape)}{'' if finite else ', not all finite'}."
        )
    return inputs


MaskPer = Literal["batch", "example"]
MaskedTarget = Literal["label", "uniform"]

# Draws of a pass, told from those of dropout layers, which count from 0.
_REFERENCES, _MASKS = 1 << 32, (1 << 32) + 1
# Values in one evaluation pass over several references: 256 MiB of float32.
_VALUES_A_PASS = 1 << 26


@checked
class Anchored(OnDeepEnsemble):
    r"""Networks that see an input x through a reference r, as the pair $[r, x - r]$; references make members.

    $$f_k(x) = F([r_k, x - r_k])$$

    The first layer of the network is doubled; `pair_axis` says on which axis of an input the two are joined. In training every example
    meets a reference drawn anew; in evaluation the first K = `num_members` give that many members. Of M networks, `num_trained`, each
    meets every one of them: member `m * K + k` is network m with reference k.

    Args:
        net: A network; or several, as a list or a `DeepEnsemble` (they are copied); or a function that makes one, called
            `num_nets` times.
        references: Inputs to see others through, `(references, ...)`, prepared like any input; usually training inputs without
            augmentation. They are stored with the weights. Evaluation takes the first ones: shuffle sorted data.
        num_members: References in evaluation, K.
        seed: Decides new weights and, outside of `fit`, the draws of references and masks.
        num_nets: How many networks to make with a function.
        mask_probability: Chance that the reference, and it alone, is shown as zeros in training: $[0, x - r]$.
        mask_per: Mask whole batches, with one draw a network and step, or single examples.
        masked_target: What masked examples are trained towards: their `"label"`, or the `"uniform"` distribution (`fit` then
            puts `objectives.MaskedUniform` around the objective, which must judge each network by itself).
        temperature: Divide the class logits of each network's K members by one temperature for each input,
            `anchor_temperature`; None leaves them alone. Not for regression.
        first_layer: Name of the layer to double, where it is not the first one that runs.
        initialise: `"fresh"`, for networks trained from scratch, draws the reference's half of the first layer anew, with the
            standard deviation of the layer's weights. `"sum"`, for pretrained networks, gives both halves its weights: the
            doubled network is the network as it was. From scratch members would then hardly differ.
        output: What is scored of networks that return several tensors: a key, an index or a function.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> x = torch.randn(16, 3)
        >>> ens = Anchored(net, references=x, num_members=4, initialise="sum").eval()
        >>> ens(x).shape, torch.allclose(ens(x)[2], net(x), atol=1e-5)
        (torch.Size([4, 16, 2]), True)

    References:
        Thiagarajan et al., 2022, <https://arxiv.org/abs/2207.07235>; Narayanaswamy et al., 2024,
        <https://arxiv.org/abs/2406.00529>.
    """

    one_pass = True
    rows_in = "inner"
    decisive = ("mask_probability", "mask_per", "temperature")
    shared_buffers = frozenset({"references"})
    references: Tensor

    def __init__(
        self,
        net: nn.Module | Sequence[nn.Module] | Callable[[], nn.Module],
        references: Array,
        num_members: int = 1,
        seed: int = 0,
        *,
        num_nets: int = 1,
        mask_probability: float = 0.0,
        mask_per: MaskPer = "batch",
        masked_target: MaskedTarget = "label",
        temperature: TemperatureForm | None = None,
        first_layer: str | None = None,
        initialise: Initialise = "fresh",
        output: Output = None,
    ) -> None:
        anchors = _as_inputs(references)
        if not (1 if temperature is None else 2) <= num_members <= len(anchors):
            raise ValueError(
                f"`num_members` must be a number from 1 to that of references, {len(anchors)}, at least two with a temperature; "
                f"got {num_members}."
            )
        if not 0.0 <= mask_probability <= 1.0:
            raise ValueError(f"`mask_probability` must be a number in [0, 1]; got {mask_probability!r}.")
        given = _as_ensemble(net, num_nets, seed)
        nets, anchors = list(given), anchors.detach().to(device_of(given))
        seeds = [derive(seed, index) for index in range(len(nets))]
        pair_axis = double_first_layers(nets, anchors, first_layer, initialise, seeds, partial(pick, output=output))
        super().__init__(len(nets) * num_members, seed, num_trained=len(nets))
        self.output = output
        self.num_anchors, self.pair_axis, self.temperature = num_members, pair_axis, temperature
        self.mask_probability, self.mask_per, self.masked_target = mask_probability, mask_per, masked_target
        # One network alone gains nothing from being run as a stack of one.
        execution = "loop" if len(nets) == 1 else given.execution
        self.inner = DeepEnsemble.from_members(nets, seed, execution=execution, output=output)
        self.register_buffer("references", anchors.clone())
        self.member_keys = self.member_keys.to(anchors.device)
        self.training = self.inner.training

    def run(self, tensors: Tensors, x: Tensor, *, own: bool, rows: Tensor | None, keys: Keys) -> Tensor:
        """Run networks, in evaluation with each of K references; see `Members.run`. `rows` are networks."""
        self.check_inputs(x, own)
        if self.training:
            if rows is None and self.num_trained == 1:
                raise ValueError(
                    "The objective compares members, and this is one anchored network: nothing to compare it with. Anchor "
                    "several, Anchored(make_net, references, num_nets=5), or take an objective such as Independent."
                )
            return self.run_one_pass(tensors, x, own=own, rows=rows, keys=keys)
        outputs = self._run_all(tensors, x, own, rows)
        if self.temperature is None:
            return outputs
        if own or isinstance(outputs, Tree) or outputs.ndim != 3 or outputs.shape[-1] < 2:
            raise ValueError(
                f"A temperature divides class logits for shared inputs; these networks give {tuple(outputs.shape)}. Leave it out."
            )
        logits = outputs.unflatten(0, (-1, self.num_anchors))
        heat = torch.stack([anchor_temperature(each, self.temperature) for each in logits])
        return (logits / heat[:, None, :, None]).flatten(0, 1)

    def run_one_pass(self, tensors: Tensors, x: Tensor, *, own: bool, rows: Tensor | None, keys: Keys) -> Tensor:
        """Run every network once, each example with a reference of its own: `(networks, batch, ...)`."""
        pairs = self.training_pairs(tensors, x, own=own, keys=keys)
        return self.run_pairs(tensors, pairs, own=True, rows=rows, keys=keys)

    def training_pairs(self, tensors: Tensors, x: Tensor, *, own: bool, keys: Keys) -> Tensor:
        """Return each example with the reference drawn for it, masked where that is drawn: `(networks, batch, ...)`."""
        self.check_inputs(x, own)
        batch = x.shape[1 if own else 0]
        references = tensors["references"]
        chosen = bits(fold(keys(), _REFERENCES), batch).remainder(len(references))
        drawn = references.index_select(0, chosen.flatten()).unflatten(0, chosen.shape)
        shown = drawn
        if self.mask_probability > 0.0:
            hidden = self.masked(keys(), batch)
            shown = torch.where(hidden.reshape(*hidden.shape, *(1 for _ in x.shape[1 + own :])), 0.0, drawn)
        return torch.cat([shown, x - drawn], dim=self.pair_axis)

    def run_pairs(self, tensors: Tensors, x: Tensor, *, own: bool, rows: Tensor | None, keys: Keys) -> Tensor:
        """Run networks on pairs as they are, `[reference, residual]` joined on the axis `pair_axis` of an input.

        Arguments as those of `Members.run`, for networks: an objective has them run with `view.through(run_pairs, ...)`.
        """
        if self.num_trained == 1 and x.is_cuda:
            x = fastest_layout(x.flatten(0, 1)).view(x.shape) if own else fastest_layout(x)
        return self.inner.run(under("inner.", tensors), x, own=own, rows=rows, keys=keys)

    def run_features(self, tensors: Tensors, x: Tensor, *, own: bool, rows: Tensor | None, keys: Keys) -> Tensor:
        """Run networks on pairs as `run_pairs`, and return what their last linear layers take, `(networks, batch, features)`."""
        with giving_features(self.inner.networks()):
            return self.run_pairs(tensors, x, own=own, rows=rows, keys=keys)

    def forward_pair(self, reference: Tensor, residual: Tensor) -> Tensor:
        """Run every network on given pairs, `(batch, ...)` each; a single reference serves all. Return `(networks, batch, ...)`.

        `forward_pair(r, x - r)` is what members say of x. A masked reference is zeros: `forward_pair(zeros, x - r)`.
        """
        self.check_inputs(residual, own=False)
        if reference.shape not in (residual.shape, residual.shape[1:], (1, *residual.shape[1:])):
            wanted, got = tuple(residual.shape), tuple(reference.shape)
            raise ValueError(f"`reference` must be shaped like the residual, {wanted}, or one input of it; got {got}.")
        pair = torch.cat([reference.to(residual.dtype).expand_as(residual), residual], dim=self.pair_axis)
        return self.view().through(self.run_pairs, pair)

    def draw_references(self, inputs: Tensor) -> None:
        """Fill the references with inputs in random order, each once before any comes again; their number stays."""
        self.check_inputs(inputs, own=False)
        order = permutation(torch.tensor(derive(self.seed, "references")), len(inputs))
        chosen = order[torch.arange(len(self.references)) % len(inputs)]
        self.references.copy_(inputs[chosen.to(inputs.device)])

    see = draw_references

    def masked(self, keys: Tensor, batch: int) -> Tensor:
        """Return whose references are masked in the pass with these keys, `(networks, batch)`."""
        draws = uniform(fold(keys, _MASKS), batch if self.mask_per == "example" else 1)
        return (draws < self.mask_probability).expand(len(keys), batch)

    def _run_all(self, tensors: Tensors, x: Tensor, own: bool, rows: Tensor | None) -> Tensor:
        """Run networks with every reference: `(networks * K, batch, ...)`."""
        references = tensors["references"][: self.num_anchors]
        keys = self.no_keys(self.num_trained if rows is None else len(rows))
        if own:
            x = x.unflatten(0, (-1, self.num_anchors))
            pairs = paired(references[:, None], x, self.pair_axis).flatten(1, 2)
            outputs = self.run_pairs(tensors, pairs, own=True, rows=rows, keys=keys)
            return outputs.unflatten(1, (self.num_anchors, -1)).flatten(0, 1)
        at_once = max(_VALUES_A_PASS // (2 * x.numel() or 1), 1)
        found = []
        for few in references.split(at_once):
            # Block by block: all inputs with the first reference, then all with the second.
            pairs = paired(few[:, None], x, self.pair_axis).flatten(0, 1)
            outputs = self.run_pairs(tensors, pairs, own=False, rows=rows, keys=keys)
            found.append(outputs.unflatten(1, (len(few), len(x))))
        return cast("Tensor", join_rows(found, axis=1).flatten(0, 1))

    def picked(self, view: View, rows: Tensor) -> View:
        """Return some networks in training, some members in evaluation."""
        if self.training:
            return super().picked(view, rows)
        return _SomeMembers(view, view.chosen[rows] if isinstance(view, _SomeMembers) else rows)

    def no_keys(self, count: int) -> Keys:
        """Keys where no noise is drawn: evaluation runs more members than there are keys."""
        return lambda: self.member_keys.new_zeros(count)

    def check_inputs(self, x: Any, own: bool) -> None:
        """Refuse inputs of another shape or dtype than the references."""
        if isinstance(x, Tree):
            raise ValueError("Anchored takes one tensor, and these inputs are several. Join them, or use DeepEnsemble.")
        wanted = self.references.shape[1:]
        if x.shape[1 + own :] != wanted or x.dtype != self.references.dtype:
            lead = "members, batch" if own else "batch"
            raise ValueError(
                f"Inputs must be like the references, ({lead}, {', '.join(map(str, wanted))}) of {self.references.dtype}; got "
                f"{tuple(x.shape)} of {x.dtype}. Prepare both the same way."
            )

    def adapt(self, objective: Any) -> Any:
        """Return an objective that trains masked examples as `masked_target` says; a temperature is for class logits only."""
        if self.temperature is not None and objective.likelihood.kind != "classes":
            raise ValueError(
                f"A temperature divides class logits; got {objective.likelihood.name!r}. Leave `temperature` out for regression."
            )
        return objective.uniform_where_masked() if self.masked_target == "uniform" else objective

    def identity(self) -> dict[str, str]:
        """Return what decides training beside the tensors; the members that a run validates are decided by references too."""
        return {**super().identity(), "anchors": repr(self.num_anchors)}

    def member(self, index: int) -> nn.Module:
        """Return one network with one reference as an independent plain module; it knows of no temperature."""
        network, anchor = divmod(self.check_index(index), self.num_anchors)
        return AnchoredNet(self.inner.member(network), self.references[anchor], self.pair_axis).train(self.training)

    def soup(self) -> nn.Module:
        """Return one plain module: the average of the networks' weights, with the first reference."""
        return AnchoredNet(self.inner.soup(), self.references[0], self.pair_axis).train(self.training)


class _SomeMembers(View):
    """Some members of a view in evaluation: rows of parameters are networks, so these are not rows of its own."""

    def __init__(self, whole: View, chosen: Tensor) -> None:
        super().__init__(whole.members, whole.parameters, whole.buffers, keys=whole.keys, whole=lambda: whole.whole)
        self.chosen = chosen

    @property
    def num_members(self) -> int:
        """How many members were picked."""
        return len(self.chosen)

    def through(self, run: Callable[..., Tensor] | None, x: Any, *, own: bool = False) -> Tensor:
        """Run these members as they are in evaluation, whatever the pass."""
        anchored = self.members
        assert isinstance(anchored, Anchored)
        anchored.check_inputs(x, own)
        if anchored.temperature is not None:
            raise ValueError("A temperature needs all members of a network: run the whole ensemble.")
        networks, anchors = self.chosen // anchored.num_anchors, self.chosen.remainder(anchored.num_anchors)
        pairs = paired(self.buffers["references"].index_select(0, anchors)[:, None], x, anchored.pair_axis)
        picked = anchored.inner.rows_of(under("inner.", {**self.parameters, **self.buffers}), networks)
        keys = anchored.no_keys(len(networks))
        return anchored.inner.run(picked, pairs, own=True, rows=networks, keys=keys)
