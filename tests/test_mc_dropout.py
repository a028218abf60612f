"""MC dropout: reproducible draws, members that are functions, ordinary dropout in training."""

import copy

import pytest
import torch
from torch import nn
from training_helpers import net, norm_net, x, y

import dissensus as ds
from dissensus import architectures


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))

    def forward(self, x):
        return self.inner(x).mean(1)


class Twice(nn.Module):
    """One dropout layer used twice in a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return torch.cat([self.drop(x), self.drop(x)], 1)


NETS = {
    "mlp": (lambda: net(0.4), (4,)),
    "cnn": (architectures.cnn, (3, 32, 32)),
    "tokens": (Tokens, (7, 5)),
    "alpha": (lambda: nn.Sequential(nn.Linear(4, 16), nn.SELU(), nn.AlphaDropout(0.2), nn.Linear(16, 3)), (4,)),
    "twice": (Twice, (12,)),
}


@pytest.mark.parametrize("masks", ["member", "input"])
@pytest.mark.parametrize("name", NETS)
class TestEveryNetwork:
    def made(self, name, masks, **options):
        make, shape = NETS[name]
        torch.manual_seed(0)
        return ds.MCDropout(make(), 4, masks=masks, **options).eval(), torch.randn(6, *shape)

    def test_predictions_do_not_depend_on_batches_or_order(self, name, masks):
        ens, inputs = self.made(name, masks)
        outputs = ens(inputs)
        assert outputs.shape[:2] == (4, 6)
        assert torch.equal(ens(inputs), outputs)
        torch.testing.assert_close(ens(inputs.flip(0)).flip(1), outputs)
        torch.testing.assert_close(torch.cat([ens(inputs[:1]), ens(inputs[1:])], 1), outputs)

    def test_members_on_their_own_give_the_ensembles_outputs(self, name, masks):
        ens, inputs = self.made(name, masks)
        outputs = ens(inputs)
        for index in range(4):
            torch.testing.assert_close(ens.member(index)(inputs), outputs[index], rtol=1e-4, atol=1e-5)
        assert (outputs[0] - outputs[1]).abs().max() > 1e-3

    def test_adding_members_leaves_earlier_ones_as_they_were(self, name, masks):
        ens, inputs = self.made(name, masks)
        more = ds.MCDropout(copy.deepcopy(ens.soup()), 7, masks=masks).eval()
        torch.testing.assert_close(more(inputs)[:4], ens(inputs))

    def test_picked_members_and_inputs_of_their_own_give_the_right_rows(self, name, masks):
        ens, inputs = self.made(name, masks)
        outputs = ens(inputs)
        torch.testing.assert_close(ens.pick([3, 1])(inputs), outputs[[3, 1]])
        own = torch.stack([inputs, inputs.flip(0), inputs, inputs])
        torch.testing.assert_close(ens.each(own)[1], outputs[1].flip(0))

    def test_another_seed_draws_something_else(self, name, masks):
        ens, inputs = self.made(name, masks)
        other, _ = self.made(name, masks, seed=1)
        assert (other(inputs) - ens(inputs)).abs().max() > 1e-3


def test_a_member_drops_the_same_values_for_all_inputs_and_an_input_its_own():
    ones = torch.ones(50, 40) * torch.arange(1, 51)[:, None]
    same = ds.MCDropout(nn.Dropout(0.5), 2).eval()(ones)[0] != 0
    assert (same == same[0]).all()
    fresh = ds.MCDropout(nn.Dropout(0.5), 2, masks="input").eval()(ones)[0] != 0
    assert (fresh != fresh[0]).any(1)[1:].all()
    assert fresh.float().mean().item() == pytest.approx(0.5, abs=0.05)


def test_many_draws_average_to_the_network_without_dropout():
    # Closed form: dropout before a linear layer keeps its expectation.
    torch.manual_seed(0)
    linear = nn.Sequential(nn.Dropout(0.3), nn.Linear(20, 3))
    ens = ds.MCDropout(linear, 4000).eval()
    inputs = torch.randn(2, 20)
    torch.testing.assert_close(ens(inputs).mean(0), linear.eval()(inputs), atol=0.06, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.uint8])
def test_inputs_of_any_dtype_have_draws_of_their_own(dtype):
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(x.float() + 1)

    inputs = (torch.arange(60).reshape(3, 20) % 50).to(dtype)
    drawn = ds.MCDropout(Cast(), 2, masks="input").eval()(inputs)[0] == 0
    assert not torch.equal(drawn[0], drawn[1])


def test_training_is_that_of_the_network_with_ordinary_dropout():
    ens = ds.MCDropout(net(0.5), 5)
    assert ens(x).shape == (1, 100, 3)
    dropped = ds.MCDropout(nn.Dropout(0.25), 5)(torch.ones(200, 100))[0]
    assert (dropped == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    assert (dropped[0] != dropped[1]).any()
    one, many = (ds.MCDropout(copy.deepcopy(ens.soup()), count) for count in (1, 5))
    for members in (one, many):
        ds.fit(members, (x, y), epochs=2, batch_size=50)
    for name, tensor in one.named_parameters():
        assert torch.equal(tensor, many.get_parameter(name))


def test_engines_give_the_same_curve():
    torch.manual_seed(0)
    start, curves = net(0.3), []
    for engine in ("eager", "captured"):
        run = ds.fit(ds.MCDropout(start, 3), (x, y), epochs=4, batch_size=32, engine=engine)
        curves.append(torch.tensor(run.history.by_epoch("loss")))
    torch.testing.assert_close(*curves, rtol=1e-4, atol=1e-5)


def test_a_rate_is_set_on_dropout_layers_that_are_there():
    ens = ds.MCDropout(net(0.1), 2, p=0.7)
    assert ens.net[2].p == 0.7


def test_a_rate_puts_dropout_before_the_last_linear_layers():
    assert [
        name
        for name, _ in ds.MCDropout(architectures.resnet18(width=8), 2, p=0.1).net.named_modules()
        if "dropout" in name
    ] == ["head.dropout"]
    mlp = ds.MCDropout(architectures.mlp(4, [16, 16], 3), 3, p=0.2).eval()
    assert [name for name, _ in mlp.net.named_modules() if "dropout" in name] == ["2.dropout", "4.dropout"]
    outputs = mlp(x)
    assert (outputs[0] - outputs[1]).abs().max() > 1e-3
    torch.testing.assert_close(mlp.member(2)(x), outputs[2])


def test_a_member_drops_in_training_what_it_drops_in_evaluation():
    member = ds.MCDropout(net(0.4), 3).eval().member(1)
    torch.testing.assert_close(member.train()(x), member.eval()(x))


def test_the_soup_is_the_network_with_plain_dropout():
    given = net(0.4)
    soup = ds.MCDropout(given, 3).soup()
    assert type(soup[2]) is nn.Dropout
    torch.testing.assert_close(soup.eval()(x), given.eval()(x))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ds.MCDropout(norm_net(), 3), "no dropout layer.*give `p`"),
        (lambda: ds.MCDropout(nn.Linear(4, 3), 3, p=0.1), "no linear layer behind another"),
        (lambda: ds.MCDropout(net(0.2), 3, p=1.5), "`p` must be above 0"),
        (lambda: ds.MCDropout(net(0.2), 3, masks="batch"), "'member' or 'input'"),
        (lambda: ds.MCDropout(net(0.2), 0), "`num_members` must be a whole number of at least 1"),
        (lambda: ds.MCDropout(net, 3), "must be an nn.Module"),
    ],
)
def test_bad_input_gets_one_clear_sentence(make, message):
    with pytest.raises(ValueError, match=message):
        make()


class OwnDropout(nn.Dropout):
    def forward(self, x):
        return super().forward(x) + 0.0


@pytest.mark.parametrize("p", [None, 0.3])
def test_a_dropout_class_of_ones_own_is_refused_by_name(p):
    with pytest.raises(ValueError, match=r"class .*OwnDropout.*nn\.Dropout"):
        ds.MCDropout(nn.Sequential(nn.Linear(4, 8), OwnDropout(0.5), nn.Dropout(0.2), nn.Linear(8, 3)), 3, p=p)


class SecondAxis(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 16), nn.Dropout(0.3), nn.Linear(16, 3))

    def forward(self, x):
        return self.inner(x.transpose(0, 1)).mean(0)


@pytest.mark.parametrize("masks", ["member", "input"])
def test_a_batch_on_the_second_axis_is_refused(masks):
    ens = ds.MCDropout(SecondAxis(), 3, masks=masks).eval()
    # As many tokens as there are members, which keys alone would fit.
    with pytest.raises(ValueError, match=r"the batch, 12 rows, on the first axis .*\(3, 12, 16\)"):
        ens(torch.zeros(4, 3, 5))
    with pytest.raises(ValueError, match=r"the batch, 4 rows, on the first axis"):
        ens.member(0)(torch.zeros(4, 3, 5))


class Attends(nn.Module):
    """Drops weights of attention inside itself, and values by a layer where it has one that runs."""

    def __init__(self, p: float, runs: bool = True) -> None:
        super().__init__()
        self.inner, self.attention = nn.Linear(1, 8), nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        self.dropout, self.head, self.runs = nn.Dropout(p), nn.Linear(8, 3), runs

    def forward(self, x):
        z = self.inner(x[..., None])
        z = self.attention(z, z, z)[0].mean(1)
        return self.head(self.dropout(z) if self.runs else z)


def test_dropout_outside_of_layers_is_told_once():
    given, ens = torch.randn(6, 4), ds.MCDropout(Attends(0.3), 4).eval()
    with pytest.warns(UserWarning, match="outside dropout layers .*off in evaluation") as told:
        first = ens(given)
    assert len(told) == 1
    torch.testing.assert_close(ens(given), first)
    assert not any(module.training for module in ens.modules())


def test_a_network_of_whose_dropout_layers_none_runs_is_refused():
    ens = ds.MCDropout(Attends(0.3, runs=False), 4)
    for _ in range(2):
        with pytest.raises(ValueError, match="No dropout layer of the network runs"):
            ds.predict(ens, torch.randn(6, 4))


@pytest.mark.parametrize("runs", [lambda net, h: not net.training, lambda net, h: len(h) > 8])
def test_dropout_layers_may_run_in_some_passes_only(runs):
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.drop = nn.Linear(4, 3), nn.Dropout(0.5)

        def forward(self, x):
            h = self.layer(x)
            return self.drop(h) if runs(self, h) else h

    outputs = ds.predict(ds.MCDropout(Sometimes(), 5), torch.randn(20, 4))
    assert outputs.std(0).mean() > 0
