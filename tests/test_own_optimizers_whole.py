"""An optimizer of somebody's own has one member's parameters whole, by the network's names, and resumes with all that it keeps."""

import pytest
import torch
import torch.nn.functional as F
from backbone_cases import small_backbone
from torch import nn
from training_helpers import net, norm_net, x, y

import dissensus as ds
from dissensus.training import CheckpointError, optimizers


@pytest.fixture(params=[None, 64], ids=["one row", "short rows"])
def rows(request, monkeypatch):
    """Rows of a member's parameters as long as usual, or a parameter or two each."""
    if request.param is not None:
        monkeypatch.setattr(optimizers, "ROW_BYTES", request.param)


class Mixed(nn.Module):
    """Layers whose dtypes alternate."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 8).double(), nn.Linear(8, 8), nn.Linear(8, 3).double()

    def forward(self, x):
        return self.third(self.second(self.first(x.double()).tanh().float()).tanh().double())


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.only = nn.Linear(4, 3).double()

    def forward(self, x):
        return self.only(x.double())


class OneNorm(torch.optim.Optimizer):
    """Steps of one length, over all parameters together."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        pairs = [(p, group["lr"]) for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.double().square().sum() for p, _ in pairs]).sum().sqrt()
        for parameter, rate in pairs:
            parameter.sub_((rate * parameter.grad / norm).to(parameter.dtype))


def coupled(named):
    return OneNorm([parameter for _, parameter in named])


def by_position(kind):
    def factory(named):
        return kind([{"params": [p], "lr": 0.02 * 0.5**place} for place, (_, p) in enumerate(named)], lr=0.02)

    return factory


def by_name(named):
    named = dict(named)
    last = next(reversed(named))
    return torch.optim.RMSprop([{"params": [named.pop(last)], "lr": 0.05}, {"params": [*named.values()]}], lr=0.01)


def all_but_the_first(named):
    return torch.optim.AdamW([p for _, p in list(named)[1:]], lr=0.02)


FACTORIES = {
    "coupled": coupled,
    "rates by position, row by row": by_position(torch.optim.AdamW),
    "rates by position, one a member": by_position(torch.optim.RMSprop),
    "by name": by_name,
    "a part": all_but_the_first,
}
NETS = {"alike": [Mixed, Mixed, Mixed], "different": [Mixed, Small, Mixed]}


def members(nets, seed=0):
    torch.manual_seed(seed)
    return ds.DeepEnsemble.from_members([make() for make in NETS[nets]])


def alone(model, optimizer, steps, of=lambda: x):
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(of()), y).backward()
        optimizer.step()


@pytest.mark.parametrize("nets", NETS)
@pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES)
def test_every_member_trains_as_that_optimizer_trains_its_network(factory, nets, rows):
    ens = members(nets)
    plain = [ens.member(j) for j in range(3)]
    ds.fit(ens, (x, y), epochs=8, batch_size=100, batches="shared", optimizer=factory, device="cpu")
    for j, model in enumerate(plain):
        alone(model, factory(list(model.named_parameters())), 8)
        for name, tensor in ens.member(j).named_parameters():
            torch.testing.assert_close(tensor, model.get_parameter(name), rtol=1e-4, atol=1e-6)


def test_averages_of_weights_are_of_what_the_step_left(rows):
    ens, plain = ds.DeepEnsemble(net, 2).double(), ds.DeepEnsemble(net, 2).double()
    seen = []
    ds.fit(
        plain, (x.double(), y), epochs=4, batch_size=100, optimizer=coupled, device="cpu",
        callback=lambda run: seen.append(torch.cat([p.detach().flatten(1) for p in plain.parameters()], 1)),
    )  # fmt: skip
    ds.fit(ens, (x.double(), y), epochs=4, batch_size=100, optimizer=coupled, device="cpu", ema=0.5)
    wanted = sum(0.5 ** (3 - step) * weights for step, weights in enumerate(seen)) / sum(0.5**step for step in range(4))
    torch.testing.assert_close(torch.cat([p.flatten(1) for p in ens.parameters()], 1), wanted)


def two_heads(makes):
    made = iter(makes)
    return ds.HeadEnsemble(small_backbone(), lambda: next(made)(), 2)


def other_head():
    return nn.Sequential(nn.Linear(6, 3))


def head():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


KINDS = {
    "deep": (lambda: ds.DeepEnsemble(norm_net, 2), lambda ens, j: ens.member(j)),
    "deep, different": (
        lambda: ds.DeepEnsemble.from_members([norm_net(), nn.Sequential(nn.Linear(4, 3))]),
        lambda ens, j: ens.member(j),
    ),
    "heads": (lambda: two_heads([head, head]), lambda ens, j: ens.heads.member(j)),
    "heads, different": (lambda: two_heads([head, other_head]), lambda ens, j: ens.heads.member(j)),
    "anchored": (lambda: ds.Anchored([norm_net(), norm_net()], x, 3), lambda ens, j: ens.inner.member(j)),
    "anchored, different": (
        lambda: ds.Anchored([norm_net(), nn.Sequential(nn.Linear(4, 3))], x, 3),
        lambda ens, j: ens.inner.member(j),
    ),
    "one network": (lambda: ds.MCDropout(net(0.2), 2), lambda ens, j: ens.net),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_factory_is_called_once_a_member_with_its_names_in_its_network(kind, rows):
    make, network = KINDS[kind]
    ens, seen = make(), []

    def factory(named):
        seen.append([name for name, _ in named])
        return torch.optim.RMSprop([p for _, p in named], lr=0.01)

    ds.fit(ens, (x, y), epochs=1, optimizer=factory, device="cpu")
    count = 1 if kind == "one network" else 2
    assert seen == [[name for name, _ in network(ens, j).named_parameters()] for j in range(count)]


class InGroups(torch.optim.Optimizer):
    """Keeps what it knows in its groups and as plain numbers, as Prodigy and schedule-free optimizers do."""

    def __init__(self, parameters, lr=0.05):
        super().__init__(parameters, {"lr": lr, "k": 0, "d": 0.1, "first": True, "total": None, "betas": (0.9, None)})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            grads = torch.stack([p.grad.double().square().sum() for p in group["params"]]).sum()
            group["total"] = grads if group["first"] else group["total"] + grads
            group["first"], group["k"] = False, group["k"] + 1
            group["d"] *= 1 + 1 / (3 + group["k"])
            for parameter in group["params"]:
                state = self.state[parameter]
                state["factor"] = state.get("factor", 0.3) * 1.1
                state.setdefault("nothing", None)
                rate = group["lr"] * group["d"] * state["factor"] / (1 + group["total"].sqrt())
                parameter.sub_((rate * parameter.grad).to(parameter.dtype))


def in_two_groups(named):
    named = list(named)
    return InGroups([{"params": [p for _, p in named[:1]]}, {"params": [p for _, p in named[1:]], "lr": 0.2}])


class Stop(Exception):
    pass


def broken_off(run):
    if run.epoch == 3:
        raise Stop


@pytest.mark.parametrize("nets", NETS)
def test_what_an_optimizer_keeps_in_its_groups_resumes_to_the_last_digit(nets, rows, tmp_path):
    settings = {"epochs": 6, "batch_size": 30, "schedule": "cosine", "optimizer": in_two_groups, "device": "cpu"}
    whole = members(nets)
    ds.fit(whole, (x, y), **settings)
    with pytest.raises(Stop):
        ds.fit(members(nets), (x, y), checkpoint_dir=tmp_path, callback=broken_off, **settings)
    again = members(nets)
    ds.fit(again, (x, y), checkpoint_dir=tmp_path, resume=True, **settings)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


class Listing(InGroups):
    def step(self):
        super().step()
        self.param_groups[0].setdefault("history", []).append(0.0)


def test_what_a_checkpoint_cannot_keep_of_an_optimizer_is_refused(tmp_path):
    def factory(named):
        return Listing([p for _, p in named])

    ds.fit(ds.DeepEnsemble(net, 2), (x, y), epochs=1, optimizer=factory, device="cpu")
    epochs = []
    settings = {"epochs": 2, "optimizer": factory, "checkpoint_dir": tmp_path, "callback": epochs.append}
    with pytest.raises(
        ValueError, match=r"Listing keeps 'history' \(list\), and a checkpoint holds numbers and tensors"
    ):
        ds.fit(ds.DeepEnsemble(net, 2), (x, y), **settings, device="cpu")
    assert epochs == []


def test_state_by_other_names_is_refused(tmp_path, monkeypatch):
    settings = {"epochs": 4, "batch_size": 50, "optimizer": torch.optim.RMSprop, "device": "cpu"}
    state = optimizers.SeparateOptimizers.state
    with monkeypatch.context() as patch:
        # As checkpoints of earlier versions had it: by block, row and parameter.
        patch.setattr(
            optimizers.SeparateOptimizers,
            "state",
            lambda self: {name.replace(".state.", "."): t for name, t in state(self).items()},
        )
        with pytest.raises(Stop):
            ds.fit(ds.DeepEnsemble(net, 2), (x, y), checkpoint_dir=tmp_path, callback=broken_off, **settings)
    with pytest.raises(CheckpointError, match="of another version of dissensus"):
        ds.fit(ds.DeepEnsemble(net, 2), (x, y), checkpoint_dir=tmp_path, resume=True, **settings)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": coupled, "lr": [0.1, 0.2]}, "a list of `lr`"),
        ({"optimizer": coupled, "weight_decay": [0.1, 0.2]}, "sets rates, decay and options itself"),
        ({"optimizer": "sgd", "optimizer_options": {"nesterov": True}}, "`nesterov` needs a momentum above 0"),
        (
            {"optimizer": "sgd", "optimizer_options": {"nesterov": True, "momentum": 0.9, "dampening": 0.1}},
            "no dampening; got momentum=0.9 and dampening=0.1",
        ),
        ({"optimizer": "sgd", "optimizer_options": {"nesterov": "yes"}}, "`nesterov` must be True or False"),
        ({"optimizer": "sgd", "optimizer_options": {"momentum": -0.9}}, "`momentum` must be a number of at least 0"),
        ({"optimizer": "sgd", "optimizer_options": {"dampening": "a"}}, "`dampening` must be a number"),
        ({"optimizer": "adam", "optimizer_options": {"betas": 0.9}}, "`betas` must be two numbers"),
        ({"optimizer": "adamw", "optimizer_options": {"betas": (0.9,)}}, "`betas` must be two numbers"),
        ({"optimizer": "adamw", "optimizer_options": {"betas": (0.9, 1.0)}}, r"`betas\[1\]` must be .* below 1"),
        ({"optimizer": "adamw", "optimizer_options": {"eps": -1e-8}}, "`eps` must be a number of at least 0"),
        ({"optimizer": torch.optim.RMSprop, "on_divergence": "drop"}, "on_divergence='drop' needs sgd, adam or adamw"),
        ({"optimizer": torch.optim.RMSprop, "concurrent_members": 1}, "`concurrent_members` needs sgd, adam or adamw"),
    ],
)
def test_options_that_would_be_ignored_are_refused(options, message):
    ens = ds.DeepEnsemble(net, 2)
    before = {name: tensor.clone() for name, tensor in ens.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        ds.fit(ens, (x, y), epochs=1, device="cpu", **options)
    assert all(torch.equal(tensor, before[name]) for name, tensor in ens.state_dict().items())


def test_a_group_that_torch_takes_as_it_is_trains_one_optimizer_a_member():
    def factory(named):
        first, *others = [p for _, p in named]
        # torch looks at its defaults only: without momentum `nesterov` changes nothing.
        return torch.optim.SGD(
            [{"params": [first], "momentum": 0.0}, {"params": others}], lr=0.1, momentum=0.9, nesterov=True
        )

    ens = ds.DeepEnsemble(net, 2).double()
    plain = ens.member(1)
    ds.fit(ens, (x.double(), y), epochs=5, batch_size=100, batches="shared", optimizer=factory, device="cpu")
    alone(plain, factory(plain.named_parameters()), 5, of=lambda: x.double())
    for name, tensor in ens.member(1).named_parameters():
        torch.testing.assert_close(tensor, plain.get_parameter(name))


SHARED = {
    "MCDropout": lambda: ds.MCDropout(net(0.2), 3),
    "BatchEnsemble": lambda: ds.BatchEnsemble(net, 3),
    "Masksembles": lambda: ds.members.KINDS["masksembles"](lambda: net(0.2), 3),
    "SWAG": lambda: ds.SWAG(net, 3),
}


@pytest.mark.parametrize("kind", SHARED)
def test_batches_of_members_own_are_refused_where_there_is_one_pass(kind):
    with pytest.raises(ValueError, match="runs all members on one batch"):
        ds.fit(SHARED[kind](), (x, y), epochs=1, batches="own", device="cpu")
    assert ds.fit(SHARED[kind](), (x, y), epochs=1, device="cpu").epoch == 1


@pytest.mark.parametrize("kind", [ds.SnapshotEnsemble, ds.SWAG])
def test_averaged_weights_are_refused_where_members_are_kept_on_the_way(kind):
    with pytest.raises(ValueError, match=f"`ema` averages .* {kind.__name__} keeps members"):
        ds.fit(kind(net, 3), (x, y), epochs=3, ema=0.9, device="cpu")
