import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dissensus as ds
from dissensus import objectives as obj
from dissensus.objectives.objective import Step

x = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
y = torch.arange(12) % 3


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def a_step(members: int = 2, own: bool = False, **streams) -> Step:
    return Step(torch.tensor(0), 10, own, torch.arange(members), torch.tensor(9), streams)


def test_fgsm_moves_every_input_by_epsilon_up_its_own_members_loss():
    ens = ds.DeepEnsemble(net, 2).eval()
    loss, parts = obj.Adversarial(obj.Independent(), epsilon=0.1)(ens.view(), x, y, a_step())
    total = 0.0
    for j in range(2):
        plain, inputs = ens.member(j), x.clone().requires_grad_()
        clean = F.cross_entropy(plain(inputs), y)
        (gradient,) = torch.autograd.grad(clean, inputs, retain_graph=True)
        attacked = F.cross_entropy(plain(x + 0.1 * gradient.sign()), y)
        torch.testing.assert_close(parts["loss"][j], clean.detach())
        torch.testing.assert_close(parts["adversarial_loss"][j], attacked.detach())
        assert attacked > clean
        total = total + (clean + attacked) / 2
    torch.testing.assert_close(loss, total)


def test_the_perturbed_input_takes_no_gradient():
    # Closed form: f(x) = w x with mse to 0 and x = 1; x' = 1 + eps, loss = (w² + w²(1+eps)²)/2, slope w(1 + (1+eps)²).
    ens = ds.DeepEnsemble(lambda: nn.Linear(1, 1, bias=False), 1)
    with torch.no_grad():
        ens.get_parameter("net.weight").fill_(3.0)
    one, zero = torch.ones(1, 1), torch.zeros(1, 1)
    loss, _ = obj.Adversarial(obj.Independent("mse"), epsilon=0.5)(ens.view(), one, zero, a_step(1))
    loss.backward()
    assert loss.item() == pytest.approx((9 + 9 * 1.5**2) / 2)
    assert ens.get_parameter("net.weight").grad.item() == pytest.approx(3 * (1 + 1.5**2))


def test_epsilon_as_a_fraction_of_range_scales_with_each_feature():
    data = torch.tensor([[0.0, -5.0], [1.0, 5.0]])
    prepared = obj.Adversarial(obj.Independent(), epsilon=0.01, of_range=True).prepare(data)
    torch.testing.assert_close(prepared.epsilon * prepared.ranges, torch.tensor([0.01, 0.1]))


def test_images_share_one_range_a_channel():
    images = torch.zeros(3, 2, 4, 4)
    images[1, 1, 2, 2] = 7.0
    prepared = obj.Adversarial(obj.Independent(), of_range=True).prepare(images)
    assert prepared.ranges.shape == (2, 1, 1)
    assert prepared.ranges.flatten().tolist() == [0.0, 7.0]


@pytest.mark.parametrize("wrap", [obj.Adversarial, obj.VirtualAdversarial])
def test_perturbed_passes_leave_batchnorm_as_one_clean_pass_does(wrap):
    clean, attacked = ds.DeepEnsemble(net, 2), ds.DeepEnsemble(net, 2)
    clean(x)
    wrap(obj.Independent())(attacked.view(), x, y, a_step())
    for a, b in zip(clean.buffers(), attacked.buffers(), strict=True):
        torch.testing.assert_close(a, b)


def linear_logits(weight):
    ens = ds.DeepEnsemble(lambda: nn.Linear(len(weight), 2, bias=False), 1).double()
    with torch.no_grad():
        ens.get_parameter("net.weight").copy_(torch.stack([torch.zeros_like(weight), weight])[None])
    return ens


def test_virtual_adversarial_finds_the_direction_that_changes_a_linear_classifier():
    # For logits (0, w·x) only the component of d along w changes the prediction, so r = ± eps w / |w|.
    weight = torch.tensor([3.0, 4.0, 0.0], dtype=torch.float64)
    ens = linear_logits(weight)
    inputs = torch.randn(5, 3, dtype=torch.float64)
    vat = obj.VirtualAdversarial(obj.Independent(), epsilon=0.7, xi=1e-3, iterations=2)
    got = vat.divergences(ens.view(), inputs, a_step(1)).mean(-1)

    def kl(shift):
        p = ens(inputs)[0].log_softmax(-1)
        q = ens(inputs + shift)[0].log_softmax(-1)
        return (p.exp() * (p - q)).sum(-1)

    direction = 0.7 * weight / weight.norm()
    low = torch.minimum(kl(direction), kl(-direction)).mean()
    high = torch.maximum(kl(direction), kl(-direction)).mean()
    assert low - 1e-9 <= got.item() <= high + 1e-9
    assert got > 0


def test_virtual_adversarial_divergence_holds_the_clean_prediction_fixed():
    # The gradient is that of KL(stopgrad p || q): zero for parameters that leave q's change alone.
    weight = torch.tensor([1.0, -2.0], dtype=torch.float64)
    ens = linear_logits(weight)
    inputs = torch.randn(4, 2, dtype=torch.float64)
    vat = obj.VirtualAdversarial(obj.Independent(), epsilon=0.5, xi=1e-3, iterations=3)
    step = a_step(1)
    vat.divergences(ens.view(), inputs, step).mean(-1).sum().backward()
    got = ens.get_parameter("net.weight").grad[0, 1]
    logits = inputs @ weight
    p = torch.sigmoid(logits)
    # Along ± w/|w| per input, whichever the noise led to: recover the sign by matching the value.
    candidates = []
    for signs in torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * 4):
        moved = inputs + signs[:, None] * 0.5 * weight / weight.norm()
        candidates.append((((torch.sigmoid(moved @ weight) - p)[:, None]) * moved).mean(0))
    distance = min((got - candidate).abs().max().item() for candidate in candidates)
    assert distance < 1e-6


def test_virtual_adversarial_reads_the_unlabelled_stream():
    ens = ds.DeepEnsemble(net, 2).eval()
    vat = obj.VirtualAdversarial(obj.Independent())
    far = 100 * torch.randn(12, 4)
    with_stream, _ = vat(ens.view(), x, y, a_step(unlabelled=far))
    without, _ = vat(ens.view(), x, y, a_step())
    assert with_stream != without


def test_norm_penalty_adds_each_members_unsquared_norm():
    ens = ds.DeepEnsemble(net, 2).eval()
    inner, _ = obj.Independent()(ens.view(), x, y, a_step())
    loss, parts = obj.NormPenalty(obj.Independent(), 0.1)(ens.view(), x, y, a_step())
    norms = [torch.cat([p.flatten() for p in ens.member(j).parameters()]).norm() for j in range(2)]
    torch.testing.assert_close(loss, inner + 0.1 * sum(norms))
    torch.testing.assert_close(parts["norm"], torch.stack(norms).detach())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: obj.Adversarial(obj.Independent(), epsilon=-1.0), "of at least 0"),
        (lambda: obj.VirtualAdversarial(obj.Independent(), xi=0.0), "above 0"),
        (lambda: obj.Adversarial(obj.NormPenalty(obj.Independent(), 1.0)), "objective on outputs"),
    ],
)
def test_bad_input_gets_one_clear_sentence(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_parts_that_are_no_real_numbers_have_no_range_and_stay():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x, mask):
            return self.layer(x * mask)

    inputs = {"x": x, "mask": x > 0}
    objective = obj.Adversarial(obj.Independent(), of_range=True)
    run = ds.fit(ds.DeepEnsemble(Masked, 2), (inputs, y), objective=objective, epochs=1, device="cpu")
    assert "adversarial_loss" in run.history.columns


def test_inputs_in_half_precision_stay_so():
    ens = ds.DeepEnsemble(lambda: nn.Linear(4, 3).bfloat16(), 2)
    for of_range in (False, True):
        objective = obj.Adversarial(obj.Independent(), of_range=of_range)
        ds.fit(ens, (x.bfloat16(), y), objective=objective, epochs=1, device="cpu", engine="eager")


@pytest.mark.parametrize(
    ("make", "data", "words"),
    [
        (
            lambda: nn.Sequential(nn.EmbeddingBag(9, 3)),
            torch.arange(12).reshape(6, 2) % 9,
            "moves real numbers; got inputs of",
        ),
        (lambda: nn.Conv1d(2, 3, 1), torch.randn(6, 2, 5), "takes one answer an input"),
    ],
)
def test_virtual_adversarial_says_what_it_cannot_move_or_compare(make, data, words):
    targets = torch.arange(6) % 3 if data.ndim == 2 else torch.zeros(6, 5, dtype=torch.int64)
    ens = ds.DeepEnsemble(make, 2)
    with pytest.raises(ValueError, match=words):
        ds.fit(ens, (data, targets), objective=obj.VirtualAdversarial(obj.Independent()), epochs=1, device="cpu")


def test_unlabelled_integers_beside_real_inputs_are_refused():
    for objective, settings in (
        (obj.VirtualAdversarial(obj.Independent()), {"unlabelled": torch.zeros(5, 4, dtype=torch.uint8)}),
        (obj.Disagree(torch.zeros(5, 4, dtype=torch.uint8)), {}),
    ):
        with pytest.raises(
            ValueError, match=r"real numbers where those are, \(batch, 4\) of torch.float32; got .* torch.uint8"
        ):
            ds.fit(ds.DeepEnsemble(net, 2), (x, y), objective=objective, epochs=1, device="cpu", **settings)
