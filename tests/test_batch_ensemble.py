"""BatchEnsemble: shared weights with factors of rank one, folded into plain members."""

import copy

import pytest
import torch
from torch import nn
from training_helpers import net, norm_net, weights, x, y

import dissensus as ds
from dissensus import architectures


class Attention(nn.Module):
    """Reads the weight of a layer without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.embed(x)
        x = self.encoder(x + self.attention(x, x, x, need_weights=False)[0])
        return self.head(x.mean(1))


def grouped():
    return nn.Sequential(
        nn.Conv2d(4, 6, 3, groups=2),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False),
        nn.Flatten(),
        nn.Linear(24, 3),
    )


NETS = {
    "mlp": (lambda: net(0.2), (4,)),
    "norm": (norm_net, (4,)),
    "resnet18": (lambda: architectures.resnet18(width=8), (3, 8, 8)),
    "grouped": (grouped, (4, 4, 4)),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(2, 5, 3), nn.Tanh(), nn.Flatten(), nn.Linear(30, 3)), (2, 8)),
    "attention": (Attention, (7, 5)),
}


@pytest.mark.parametrize("name", NETS)
class TestEveryNetwork:
    def made(self, name, num_members=3):
        make, shape = NETS[name]
        ens = ds.BatchEnsemble(make, num_members, seed=0).eval()
        return ens, torch.randn(5, *shape, generator=torch.Generator().manual_seed(0))

    def test_members_with_folded_weights_give_the_ensembles_outputs(self, name):
        ens, inputs = self.made(name)
        with torch.no_grad():
            for parameter in ens.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
            outputs = ens(inputs)
            for index in range(3):
                torch.testing.assert_close(ens.member(index)(inputs), outputs[index], rtol=1e-3, atol=1e-4)
        assert (outputs[0] - outputs[1]).abs().max() > 1e-3

    def test_a_member_is_the_network_that_the_factory_makes(self, name):
        ens, _ = self.made(name)
        made = NETS[name][0]()
        assert {n: t.shape for n, t in ens.member(1).state_dict().items()} == {
            n: t.shape for n, t in made.state_dict().items()
        }

    def test_adding_members_leaves_earlier_ones_as_they_were(self, name):
        ens, inputs = self.made(name)
        torch.testing.assert_close(self.made(name, 5)[0](inputs)[:3], ens(inputs), rtol=1e-4, atol=1e-5)

    def test_picked_members_and_inputs_of_their_own_give_the_right_rows(self, name):
        ens, inputs = self.made(name)
        outputs = ens(inputs)
        torch.testing.assert_close(ens.pick([2, 0])(inputs), outputs[[2, 0]], rtol=1e-4, atol=1e-5)
        own = torch.stack([inputs, inputs.flip(0), inputs])
        torch.testing.assert_close(ens.each(own)[1], outputs[1].flip(0), rtol=1e-4, atol=1e-5)

    def test_a_deep_copy_is_independent(self, name):
        ens, inputs = self.made(name)
        before = ens(inputs).detach()
        twin = copy.deepcopy(ens)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.mul_(2)
        assert torch.equal(ens(inputs), before)
        assert not torch.allclose(twin(inputs), before)


def test_outputs_are_those_of_the_weights_times_a_matrix_of_rank_one():
    ens = ds.BatchEnsemble(lambda: nn.Linear(4, 3), 2, seed=3)
    factors, weight = ens.net.factors, ens.net.weight
    for index in range(2):
        own = weight * torch.outer(factors.s[index], factors.r[index])
        torch.testing.assert_close(ens(x)[index], x @ own.T + factors.bias[index])


def test_factors_start_as_signs_that_differ_between_members():
    factors = ds.BatchEnsemble(lambda: nn.Linear(200, 100), 4).net.factors
    for values in (factors.r, factors.s):
        assert set(values.unique().tolist()) == {-1.0, 1.0}
        assert values.mean().abs() < 0.2
        assert (values[0] * values[1]).mean().abs() < 0.3
    assert (factors.bias == factors.bias[0]).all()


def test_members_cost_little_more_than_one():
    ens = ds.BatchEnsemble(lambda: architectures.resnet18(width=16), 4)
    plain = sum(p.numel() for p in architectures.resnet18(width=16).parameters())
    assert sum(p.numel() for p in ens.parameters()) < 1.05 * plain


@pytest.mark.parametrize(("batches", "rows"), [("whole", 3), ("split", 1)])
def test_training_shows_members_whole_batches_or_their_share(batches, rows):
    ens = ds.BatchEnsemble(norm_net, 3, batches=batches)
    assert ens(x).shape == (rows, 100, 3)
    before = ens.net[0].factors.r.detach().clone()
    ds.fit(ens, (x, y), epochs=2, batch_size=50, lr=0.01)
    assert ((ens.net[0].factors.r - before).abs().amax(1) > 0).all()


def test_engines_give_the_same_curve():
    curves = []
    for engine in ("eager", "captured"):
        run = ds.fit(ds.BatchEnsemble(lambda: net(0.2), 3), (x, y), epochs=4, batch_size=32, engine=engine)
        curves.append(torch.tensor(run.history.by_epoch("loss")))
    torch.testing.assert_close(*curves, rtol=1e-4, atol=1e-5)


def test_checkpoints_resume(tmp_path):
    settings = {"batch_size": 32, "engine": "eager", "epochs": 2}
    whole, resumed = ds.BatchEnsemble(norm_net, 3), ds.BatchEnsemble(norm_net, 3)
    ds.fit(whole, (x, y), checkpoint_dir=tmp_path, **settings)
    ds.fit(resumed, (x, y), checkpoint_dir=tmp_path, resume=True, **settings)
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, resumed.state_dict()[name])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ds.BatchEnsemble(norm_net(), 3), "must be a function"),
        (lambda: ds.BatchEnsemble(nn.ReLU, 3), "no linear layer or convolution"),
        (lambda: ds.BatchEnsemble(norm_net, 0), "`num_members` must be a whole number of at least 1"),
        (lambda: ds.BatchEnsemble(norm_net, 3, batches="some"), "'split' or 'whole'"),
        (lambda: ds.BatchEnsemble(lambda: "net", 3), "must be an nn.Module"),
        (lambda: ds.BatchEnsemble(norm_net, 3).soup(), "share their weights"),
    ],
)
def test_bad_input_gets_one_clear_sentence(make, message):
    with pytest.raises(ValueError, match=message):
        make()
