"""The features of anchored networks, however they run, and tails of their law."""

import numpy as np
import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus import objectives as obj
from dissensus.members.anchored import giving_features
from dissensus.objectives.hard_delta import mahalanobis
from dissensus.objectives.objective import Step
from dissensus.randomness import Noise

x = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def anchored(execution="auto", make=net) -> ds.Anchored:
    return ds.Anchored(ds.DeepEnsemble(make, 3, execution=execution), x[:30], 2, initialise="fresh")


def features_by_hand(ens: ds.Anchored, pairs: torch.Tensor) -> torch.Tensor:
    nets = [ens.inner.member(index).train() for index in range(ens.num_trained)]
    return torch.stack([each[:-1](own) for each, own in zip(nets, pairs, strict=True)]).detach()


def mined(ens: ds.Anchored, law: str, **settings) -> tuple[torch.Tensor, Noise]:
    objective = obj.HardDelta(obj.Independent(), law=law, draws=6, **settings)
    noise = Noise(torch.arange(3))
    view = ens.view()
    with view.perturbed(), torch.no_grad():
        return objective._tails(view, ens, x[None], torch.Size((4,)), noise), noise


class WithAttention(nn.Module):
    """A transformer of one block; the projection inside its attention is an nn.Linear that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, 8, 4, stride=4)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def body(self, images):
        tokens = self.embed(images).flatten(2).transpose(1, 2)
        return self.attention(tokens, tokens, tokens, need_weights=False)[0].mean(1)

    def forward(self, images):
        return self.head(input=self.body(images))


class Gated(nn.Module):
    """A linear layer weighs channels, and a convolution is the head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.gate, self.head = nn.Conv2d(1, 6, 3), nn.Linear(6, 6), nn.Conv2d(6, 3, 1)

    def forward(self, images):
        found = self.body(images)
        weighed = found * self.gate(found.mean((2, 3)))[..., None, None]
        return self.head(weighed).mean((2, 3))


class TestFeatures:
    @pytest.mark.parametrize("execution", ["vectorised", "loop"])
    def test_they_are_what_the_last_layer_takes_however_networks_run(self, execution):
        ens = anchored(execution)
        pairs = torch.randn(3, 10, 8)
        wanted = features_by_hand(ens, pairs)
        torch.testing.assert_close(ens.view().through(ens.run_features, pairs, own=True), wanted)

    def test_they_are_those_of_the_networks_that_were_picked(self):
        ens = anchored()
        pairs = torch.randn(3, 10, 8)
        wanted = features_by_hand(ens, pairs)[[2, 0]]
        found = ens.view().pick([2, 0]).through(ens.run_features, pairs[[2, 0]], own=True)
        torch.testing.assert_close(found, wanted)

    def test_networks_give_outputs_again_afterwards(self):
        ens = anchored()
        pairs = torch.randn(3, 10, 8)
        before = ens.view().through(ens.run_pairs, pairs, own=True)
        ens.view().through(ens.run_features, pairs, own=True)
        torch.testing.assert_close(ens.view().through(ens.run_pairs, pairs, own=True), before)
        modules = [ens.inner, *(shell.net for shell in ens.inner._shells)]
        assert not any(part._forward_hooks for module in modules for part in module.modules())

    def test_a_layer_that_is_never_called_does_not_count(self):
        transformer = WithAttention()
        images = torch.randn(5, 1, 8, 8)
        with giving_features([transformer]):
            found = transformer(images)
        torch.testing.assert_close(found, transformer.body(images))

    def test_a_network_that_is_one_layer_gives_its_inputs(self):
        layer = nn.Linear(4, 3)
        with giving_features([layer]):
            assert layer(x) is x

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: nn.Sequential(nn.Conv2d(1, 3, 8), nn.Flatten()), "no nn.Linear runs"),
            (Gated, r"is not its head: it gives \(8, 6\), the network \(8, 3\)"),
        ],
    )
    def test_a_network_without_a_linear_head_is_refused(self, make, message):
        images, labels = torch.randn(16, 1, 8, 8), torch.arange(16) % 3
        ens = ds.Anchored(make, images, 1)
        objective = obj.HardDelta(obj.Independent(), law="features")
        with pytest.raises(ValueError, match=message):
            ds.fit(ens, (images, labels), objective=objective, epochs=1, batch_size=8)
        assert ens.eval()(images).shape == (1, 16, 3)


class TestLaw:
    def test_distances_are_those_of_independent_values(self):
        known = torch.randn(200, 5) * torch.tensor([0.5, 1.0, 2.0, 3.0, 1.0]) + 3
        values = torch.randn(7, 5)
        gaps = (values.numpy() - known.numpy().mean(0)) / known.numpy().std(0, ddof=1)
        wanted = np.square(gaps).sum(-1)
        np.testing.assert_allclose(mahalanobis(values, known, diagonal=True), wanted, rtol=0.01)

    def test_features_that_never_vary_do_no_harm(self):
        known = torch.randn(20, 5) * torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0])
        assert torch.isfinite(mahalanobis(torch.randn(7, 5), known, diagonal=True)).all()
        assert torch.equal(mahalanobis(known * 0, known * 0, diagonal=True), torch.zeros(20))

    def test_with_more_values_than_residuals_a_full_covariance_would_order_them_worse(self):
        """What lies outside the span of the few residuals would decide; the true law here is a standard normal."""
        generator = torch.Generator().manual_seed(1)
        known, values = (torch.randn(128, 256, generator=generator) for _ in range(2))
        agreement = [
            np.corrcoef(mahalanobis(values, known, diagonal=each).numpy(), values.square().sum(-1).numpy())[0, 1]
            for each in (False, True)
        ]
        assert agreement[0] < 0.8 < 0.95 < agreement[1]


class TestTails:
    def test_they_are_the_residuals_with_the_least_likely_features(self):
        ens = anchored()
        tails, noise = mined(ens, "features", tails="real")
        partners = noise.at(2).uniform(len(x)).argsort(-1)
        real = x - x[partners]
        features = features_by_hand(ens, torch.cat([torch.zeros_like(real), -real], dim=2)).double().numpy()
        for found, residuals, each in zip(tails, real, features, strict=True):
            variances = each.var(0, ddof=1)
            distances = (np.square(each - each.mean(0)) / (variances + 1e-4 * variances.mean())).sum(-1)
            torch.testing.assert_close(found, residuals[np.argsort(-distances)[:8].copy()])

    def test_they_are_not_those_of_the_outputs(self):
        assert not torch.equal(mined(anchored(), "features")[0], mined(anchored(), "outputs")[0])

    def test_gradients_are_those_of_given_tails(self, monkeypatch):
        """No gradient goes through the choice: every weight gets that of the cross-entropy on what was chosen."""
        step = Step(torch.tensor(5), 10, False, torch.arange(3), torch.tensor(9))
        objective = obj.HardDelta(obj.Independent(), 0.7, law="features", draws=6)
        chosen = []
        choose = obj.HardDelta._tails
        monkeypatch.setattr(
            obj.HardDelta, "_tails", lambda self, *args: chosen.append(choose(self, *args)) or chosen[-1]
        )
        gradients = []
        for _ in range(2):
            ens = anchored()
            objective(ens.view(), x, y, step)[0].backward()
            gradients.append([parameter.grad for parameter in ens.parameters()])
            monkeypatch.setattr(obj.HardDelta, "_tails", lambda *_: chosen[0])
        assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients[0][-2:])
        torch.testing.assert_close(gradients[0], gradients[1])

    @pytest.mark.parametrize("inner", [obj.Joint(0.5), obj.LossGuided(active=2)], ids=str)
    def test_they_work_around_objectives_that_compare_or_pick(self, inner):
        objective = obj.HardDelta(inner, 0.1, law="features", draws=4)
        run = ds.fit(anchored(), (x, y), objective=objective, epochs=3, batch_size=16, lr=0.01)
        assert torch.isfinite(torch.tensor(run.history.by_epoch("tail"))).all()
