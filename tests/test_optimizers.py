import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training_helpers import net, norm_net, x, y

import dissensus as ds

CASES = {
    "sgd": ("sgd", {}, torch.optim.SGD, {}),
    "momentum": ("sgd", {"momentum": 0.9}, torch.optim.SGD, {"momentum": 0.9}),
    "nesterov": ("sgd", {"momentum": 0.9, "nesterov": True}, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "dampening": ("sgd", {"momentum": 0.9, "dampening": 0.5}, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    "adam": ("adam", {}, torch.optim.Adam, {}),
    "adam betas": ("adam", {"betas": (0.5, 0.9), "eps": 1e-3}, torch.optim.Adam, {"betas": (0.5, 0.9), "eps": 1e-3}),
    "adamw": ("adamw", {}, torch.optim.AdamW, {}),
}


def plain_training(model, optimizer, steps, schedule=None, clip=None):
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * (1.0 if schedule is None else schedule(step))
        optimizer.zero_grad()
        F.cross_entropy(model(x.double()), y).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def started(optimizer):
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def compare(ens, plain, member):
    trained = ens.member(member).state_dict()
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(trained[name], tensor, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("case", CASES)
def test_every_member_follows_the_torch_optimizer_of_the_same_name(case, decay):
    name, options, kind, torch_options = CASES[case]
    ens = ds.DeepEnsemble(norm_net, 3).double()
    plain = [ens.member(j) for j in range(3)]
    ds.fit(
        ens,
        (x.double(), y),
        epochs=20,
        batch_size=100,
        batches="shared",
        optimizer=name,
        optimizer_options=options,
        lr=0.02,
        weight_decay=decay,
    )
    for j, model in enumerate(plain):
        plain_training(model, started(kind(model.parameters(), lr=0.02, weight_decay=decay, **torch_options)), 20)
        compare(ens, model, j)


def test_members_can_have_rates_of_their_own():
    ens = ds.DeepEnsemble(norm_net, 2).double()
    plain = [ens.member(j) for j in range(2)]
    ds.fit(ens, (x.double(), y), epochs=10, batch_size=100, batches="shared", lr=[0.1, 0.001], weight_decay=[0.0, 0.5])
    for j, (model, lr, decay) in enumerate(zip(plain, [0.1, 0.001], [0.0, 0.5], strict=True)):
        plain_training(model, started(torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay)), 10)
        compare(ens, model, j)


def grouped(named):
    named = list(named)
    return torch.optim.SGD(
        [
            {"params": [p for n, p in named if n.endswith("weight")], "weight_decay": 0.3, "lr": 0.05},
            {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0, "lr": 0.2},
        ],
        lr=0.1,
        momentum=0.5,
    )


FACTORIES = {
    "groups": grouped,
    "amsgrad runs member by member": lambda named: torch.optim.AdamW([p for _, p in named], lr=0.01, amsgrad=True),
    "rmsprop": lambda named: torch.optim.RMSprop([p for _, p in named], lr=0.01),
    "adafactor": lambda named: torch.optim.Adafactor([p for _, p in named], lr=0.01),
}


@pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES.keys())
def test_a_factory_of_one_members_parameters_trains_every_member_like_it(factory):
    # No BatchNorm: a bias before it has a gradient of rounding noise, which Adafactor scales up.
    ens = ds.DeepEnsemble(net, 2).double()
    plain = [ens.member(j) for j in range(2)]
    ds.fit(ens, (x.double(), y), epochs=10, batch_size=100, batches="shared", optimizer=factory)
    for j, model in enumerate(plain):
        plain_training(model, started(factory(model.named_parameters())), 10)
        compare(ens, model, j)


def test_any_torch_optimizer_class_works():
    ens = ds.DeepEnsemble(norm_net, 2).double()
    plain = ens.member(0)
    ds.fit(ens, (x.double(), y), epochs=5, batch_size=100, batches="shared", optimizer=torch.optim.NAdam, lr=0.01)
    plain_training(plain, started(torch.optim.NAdam(plain.parameters(), lr=0.01)), 5)
    compare(ens, plain, 0)


def test_gradients_are_clipped_member_by_member():
    ens = ds.DeepEnsemble(norm_net, 2).double()
    plain = [ens.member(j) for j in range(2)]
    ds.fit(ens, (x.double(), y), epochs=5, batch_size=100, batches="shared", optimizer="sgd", lr=1.0, clip_norm=0.05)
    for j, model in enumerate(plain):
        plain_training(model, started(torch.optim.SGD(model.parameters(), lr=1.0)), 5, clip=0.05)
        compare(ens, model, j)


def test_members_of_different_architectures_train_like_each_alone():
    nets = [norm_net().double(), nn.Sequential(nn.Linear(4, 3)).double()]
    ens = ds.DeepEnsemble.from_members(nets)
    ds.fit(ens, (x.double(), y), epochs=10, batch_size=100, batches="shared", optimizer="adam", lr=0.01, clip_norm=0.5)
    for j, model in enumerate(nets):
        plain_training(model, started(torch.optim.Adam(model.parameters(), lr=0.01)), 10, clip=0.5)
        compare(ens, model, j)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "lion"}, "sgd, adam, adamw"),
        ({"optimizer": "sgd", "optimizer_options": {"beta": 1}}, "no option 'beta'"),
        ({"lr": [0.1, 0.2, 0.3]}, "each of 2 members"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS"),
        ({"optimizer": torch.optim.RMSprop, "lr": [0.1, 0.2]}, "one number"),
        ({"optimizer": grouped, "weight_decay": 0.1}, "factory"),
    ],
)
def test_bad_input_gets_one_clear_sentence(options, message):
    with pytest.raises(ValueError, match=message):
        ds.fit(ds.DeepEnsemble(net, 2), (x, y), epochs=1, **options)
