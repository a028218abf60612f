"""Anchored networks: each input is shown as a reference and what is left of it, so that references make members."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from dissensus.data.sources import Array, device_of
from dissensus.members.anchored_features import FeatureEnsemble
from dissensus.members.anchored_intake import (
    as_ensemble,
    as_inputs,
    check_choices,
    check_dtype,
    check_settings,
)
from dissensus.members.anchored_net import AnchoredNet, TemperatureForm, anchor_temperature, paired
from dissensus.members.first_layer import Initialise, double_first_layers
from dissensus.members.members import Keys, Members, PythonState, View, keys_of
from dissensus.randomness import bits, derive, fold, permutation, uniform

MaskPer = Literal["batch", "example"]
MaskedTarget = Literal["label", "uniform"]

# Draws of a pass, told from those of dropout layers, which count from 0.
_REFERENCES, _MASKS = 1 << 32, (1 << 32) + 1
# Values in one evaluation pass over several references: 256 MiB of float32.
_VALUES_A_PASS = 1 << 26


class Anchored(Members):
    r"""Networks that see an input x through a reference r, as the pair $[r, x - r]$; references make members.

    $$f_k(x) = F([r_k, x - r_k])$$

    The first layer of the network is doubled: on its channels where it convolves, on its features where it is linear, wherever
    the network has moved them before (a patch embedding of either kind; `pair_axis` says on which axis of an input the two are
    joined). In training every example meets a reference drawn anew, with replacement; in evaluation the first
    `num_members` references give that many members. Of M networks each meets every one of them: there are then
    M * `num_members` members, network by network (member `m * K + k` is network m with reference k), and M rows of
    parameters, `num_trained`.

    With `mask_probability` the reference, and it alone, is now and then shown as zeros: $[0, x - r]$.

    Args:
        net: A network; or several, as a list or a `DeepEnsemble` (they are copied); or a function that makes one, called
            `num_nets` times.
        references: Inputs to see others through, `(references, ...)`, prepared like any input; usually training inputs without
            augmentation. They are stored with the weights. Evaluation takes the first ones: shuffle sorted data.
        num_members: References in evaluation, K.
        seed: Decides new weights and, outside of `fit`, the draws of references and masks.
        num_nets: How many networks to make with a function.
        mask_probability: Chance that the reference is masked in training.
        mask_per: Mask whole batches, with one draw a network and step, or single examples.
        masked_target: What masked examples are trained towards: their `"label"`, or the `"uniform"` distribution (`fit` then
            puts `objectives.MaskedUniform` around the objective, which must judge each network's outputs by themselves:
            `Joint`, `LossGuided` and `Adversarial` are refused).
        temperature: Divide the class logits of each network's K members by one temperature for each input,
            `anchor_temperature`; None leaves them alone. Not for regression.
        first_layer: Name of the layer to double, where it is not the first one that runs.
        initialise: `"fresh"`, for networks trained from scratch, draws the reference's half of the first layer anew, with the
            standard deviation of the layer's weights. `"sum"`, for pretrained networks, gives both halves its weights: the
            doubled network is the network as it was, whatever the reference, and starts from what it knows. From scratch
            `"sum"` hardly learns to tell references apart, and members then hardly differ.

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
    ) -> None:
        anchors = as_inputs(references)
        num_members = check_settings(anchors, num_members, mask_probability, temperature)
        check_choices(
            mask_per=(mask_per, ("batch", "example")),
            masked_target=(masked_target, ("label", "uniform")),
            temperature=(temperature, ("exponential", "deviation", None)),
            initialise=(initialise, ("fresh", "sum")),
        )
        given = as_ensemble(net, num_nets, seed)
        nets = [given.member(index) for index in range(given.num_members)]
        anchors = anchors.detach().to(device_of(given))
        for each in nets:
            check_dtype(each, anchors)
        seeds = [derive(seed, index) for index in range(len(nets))]
        pair_axis = double_first_layers(nets, anchors, first_layer, initialise, seeds)
        super().__init__(len(nets) * num_members, seed, num_trained=len(nets))
        self.num_anchors = num_members
        self.pair_axis = pair_axis
        self.mask_probability, self.mask_per, self.temperature = mask_probability, mask_per, temperature
        self.masked_target: MaskedTarget = masked_target
        # One network alone gains nothing from being run as a stack of one.
        execution = "loop" if len(nets) == 1 else given.execution
        inner = FeatureEnsemble.from_members(nets, seed, execution=execution)
        assert isinstance(inner, FeatureEnsemble)
        self.inner = inner
        self.register_buffer("references", anchors.clone())
        self.member_keys = self.member_keys.to(anchors.device)
        self.training = self.inner.training

    def run(
        self, tensors: Mapping[str, Tensor], x: Tensor, *, own: bool, rows: Tensor | None, keys: Keys
    ) -> Tensor:
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
        if own:
            raise ValueError(
                "A temperature compares what members say of one input; with inputs of their own they cannot."
            )
        if outputs.ndim != 3 or outputs.shape[-1] < 2:
            raise ValueError(
                "A temperature divides class logits, (members, batch, classes) of two classes or more; these networks give "
                f"{tuple(outputs.shape)}. Leave `temperature` out for regression."
            )
        logits = outputs.unflatten(0, (-1, self.num_anchors))
        heat = torch.stack([anchor_temperature(each, self.temperature) for each in logits])
        return (logits / heat[:, None, :, None]).flatten(0, 1)

    def run_one_pass(
        self, tensors: Mapping[str, Tensor], x: Tensor, *, own: bool, rows: Tensor | None, keys: Keys
    ) -> Tensor:
        """Run every network once, each example with a reference of its own: `(networks, batch, ...)`."""
        self.check_inputs(x, own)
        batch = x.shape[1 if own else 0]
        references = tensors["references"]
        chosen = bits(fold(keys(), _REFERENCES), batch).remainder(len(references))
        drawn = references.index_select(0, chosen.flatten()).unflatten(0, chosen.shape)
        shown = drawn
        if self.mask_probability > 0.0:
            hidden = self.masked(keys(), batch)
            shown = torch.where(hidden.reshape(*hidden.shape, *(1 for _ in x.shape[1 + own :])), 0.0, drawn)
        pairs = torch.cat([shown, x - drawn], dim=self.pair_axis)
        return self.run_pairs(tensors, pairs, own=True, rows=rows, keys=keys)

    def run_pairs(
        self, tensors: Mapping[str, Tensor], x: Tensor, *, own: bool, rows: Tensor | None, keys: Keys
    ) -> Tensor:
        """Run networks on pairs as they are, `[reference, residual]` joined on the axis `pair_axis` of an input.

        Arguments as those of `Members.run`, for networks: an objective has them run with `view.through(run_pairs, ...)`.
        """
        return self.inner.run(_inner(tensors), self._laid_out(x, own), own=own, rows=rows, keys=keys)

    def run_features(
        self, tensors: Mapping[str, Tensor], x: Tensor, *, own: bool, rows: Tensor | None, keys: Keys
    ) -> Tensor:
        """Run networks on pairs as `run_pairs`, and return what their last linear layers take, `(networks, batch, features)`."""
        x = self._laid_out(x, own)
        return self.inner.run_features(_inner(tensors), x, own=own, rows=rows, keys=keys)

    def _laid_out(self, x: Tensor, own: bool) -> Tensor:
        """Return pairs in the memory order in which GPUs convolve fastest."""
        if not (x.is_cuda and x.ndim == 4 + own and self.num_trained == 1):
            return x
        flat = x.flatten(0, 1) if own else x
        return flat.contiguous(memory_format=torch.channels_last).view(x.shape)

    def forward_pair(self, reference: Tensor, residual: Tensor) -> Tensor:
        """Run every network on given pairs, `(batch, ...)` each; a single reference serves all. Return `(networks, batch, ...)`.

        `forward_pair(r, x - r)` is what members say of x. A masked reference is zeros: `forward_pair(zeros, x - r)`.
        """
        self.check_inputs(residual, own=False)
        if reference.shape not in (residual.shape, residual.shape[1:], (1, *residual.shape[1:])):
            raise ValueError(
                f"`reference` must be shaped like the residual, {tuple(residual.shape)}, or like one of its inputs; got "
                f"{tuple(reference.shape)}."
            )
        pair = torch.cat([reference.to(residual.dtype).expand_as(residual), residual], dim=self.pair_axis)
        view = self.view()
        return view.through(self.run_pairs, pair)

    def draw_references(self, inputs: Tensor) -> None:
        """Fill the references with inputs in random order, each once before any comes again; their number stays."""
        self.check_inputs(inputs, own=False)
        order = permutation(torch.tensor(derive(self.seed, "references")), len(inputs))
        chosen = order[torch.arange(len(self.references)) % len(inputs)]
        self.references.copy_(inputs[chosen.to(inputs.device)])

    def masked(self, keys: Tensor, batch: int) -> Tensor:
        """Return whose references are masked in the pass with these keys, `(networks, batch)`."""
        per_example = self.mask_per == "example"
        draws = uniform(fold(keys, _MASKS), batch) if per_example else uniform(fold(keys, _MASKS), 1)
        return (draws < self.mask_probability).expand(len(keys), batch)

    def _run_all(self, tensors: Mapping[str, Tensor], x: Tensor, own: bool, rows: Tensor | None) -> Tensor:
        """Run networks with every reference: `(networks * K, batch, ...)`."""
        references = tensors["references"][: self.num_anchors]
        keys = self._no_keys(self.num_trained if rows is None else len(rows))
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
        return torch.cat(found, dim=1).flatten(0, 1)

    def run_members(self, tensors: Mapping[str, Tensor], x: Tensor, members: Tensor) -> Tensor:
        """Run some members in evaluation, each a network with its reference; `x` is shared or `(members, batch, ...)`."""
        if self.temperature is not None:
            raise ValueError(
                "A temperature needs all members of a network; run the whole ensemble instead of some members."
            )
        networks, anchors = members // self.num_anchors, members.remainder(self.num_anchors)
        pairs = paired(tensors["references"].index_select(0, anchors)[:, None], x, self.pair_axis)
        picked = self.inner.rows_of(_inner(tensors), networks)
        return self.inner.run(picked, pairs, own=True, rows=networks, keys=self._no_keys(len(members)))

    def picked(self, view: View, rows: Tensor) -> View:
        """Return some networks in training, some members in evaluation."""
        return super().picked(view, rows) if self.training else _SomeMembers(view, rows)

    def _no_keys(self, count: int) -> Keys:
        """Keys where no noise is drawn: evaluation runs more members than there are keys."""
        return lambda: self.member_keys.new_zeros(count)

    def check_inputs(self, x: Tensor, own: bool) -> None:
        """Refuse inputs of another shape or dtype than the references."""
        wanted = self.references.shape[1:]
        if x.shape[1 + own :] != wanted or x.dtype != self.references.dtype:
            lead = "members, batch" if own else "batch"
            raise ValueError(
                f"Inputs must be like the references, ({lead}, {', '.join(map(str, wanted))}) of {self.references.dtype}; got "
                f"{tuple(x.shape)} of {x.dtype}. Prepare both the same way."
            )

    @property
    def stacked(self) -> bool:
        """Whether networks are stored as one."""
        return self.inner.stacked

    def parameter_rows(self) -> list[tuple[list[int] | None, list[str]]]:
        """Return parameter names with the networks that own them."""
        return [(rows, [f"inner.{name}" for name in names]) for rows, names in self.inner.parameter_rows()]

    def rows_of(self, tensors: Mapping[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
        """Return copies of some networks' rows; the references stay whole."""
        inner = self.inner.rows_of(_inner(tensors), rows)
        return {**_outer(tensors), **{f"inner.{name}": tensor for name, tensor in inner.items()}}

    def put_rows(self, tensors: Mapping[str, Tensor], rows: Tensor, new: Mapping[str, Tensor]) -> None:
        """Write networks' rows that `rows_of` gathered back, in place."""
        self.inner.put_rows(_inner(tensors), rows, _inner(new))

    def settings(self) -> dict[str, object]:
        """Return what decides training beside the tensors; the members that a run validates are decided by references too."""
        return {
            **super().settings(),
            "anchors": self.num_anchors,
            "mask_probability": self.mask_probability,
            "mask_per": self.mask_per,
            "temperature": self.temperature,
        }

    def python_state(self) -> PythonState:
        """Return the plain attributes of the networks' modules."""
        return self.inner.python_state()

    def training_state(self) -> PythonState:
        """Return those of the networks that run in training."""
        return self.inner.training_state()

    def member(self, index: int) -> nn.Module:
        """Return one network with one reference as an independent plain module; it knows of no temperature."""
        network, anchor = divmod(self.check_index(index), self.num_anchors)
        net = self.inner.member(network)
        return AnchoredNet(net, self.references[anchor], self.pair_axis).train(self.training)

    def soup(self) -> nn.Module:
        """Return one plain module: the average of the networks' weights, with the first reference."""
        return AnchoredNet(self.inner.soup(), self.references[0], self.pair_axis).train(self.training)

    def keep_members(self, rows: Sequence[int]) -> None:
        """Go on with these networks only, in place, each with all its references."""
        self.inner.keep_members(rows)
        self.member_ids = tuple(self.member_ids[row] for row in rows)
        self.num_members = len(rows) * self.num_anchors
        self.member_keys = keys_of(self.seed, self.member_ids).to(self.references.device)

    def extra_repr(self) -> str:
        """Show what the references do."""
        return f"references={len(self.references)}, anchors={self.num_anchors}, mask_probability={self.mask_probability:g}"


class _SomeMembers(View):
    """Some members of a view in evaluation: rows of parameters are networks, so these are not rows of its own."""

    def __init__(self, whole: View, chosen: Tensor) -> None:
        super().__init__(
            whole.members, whole.parameters, whole.buffers, keys=whole.keys, whole=lambda: whole.whole
        )
        self.chosen = chosen

    @property
    def num_members(self) -> int:
        """How many members were picked."""
        return len(self.chosen)

    def pick(self, rows: Tensor | Sequence[int]) -> View:
        """Return some of them."""
        return _SomeMembers(self, self.chosen[torch.as_tensor(rows, device=self.chosen.device)])

    def _forward(self, x: Tensor, own: bool, run: Callable[..., Tensor] | None = None) -> Tensor:
        anchored = self.members
        assert isinstance(anchored, Anchored)
        anchored.check_inputs(x, own)
        return anchored.run_members({**self.parameters, **self.buffers}, x, self.chosen)


def _inner(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("inner."): t for name, t in tensors.items() if name.startswith("inner.")}


def _outer(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("inner.")}
