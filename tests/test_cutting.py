"""A network cut in two gives what it gave, whichever layer the cut is at."""

from importlib.util import find_spec

import pytest
import torch
from backbone_cases import Resnet, Vit, images
from torch import nn

import dissensus as ds


def whole(parts) -> nn.Module:
    backbone, make_head = parts
    return nn.Sequential(backbone, make_head()).eval()


CUTS = {
    "vit, last block's MLP, norm and head": (Vit, "blocks.2.norm2", {}),
    "vit, the same on the class token": (Vit, "blocks.2.norm2", {"token": 0}),
    "vit, mean of tokens": (lambda: Vit(pool="mean"), "blocks.2.norm2", {}),
    "vit, the last block": (Vit, "blocks.2", {}),
    "vit, the head": (Vit, "head", {}),
    "vit, two last layers": (Vit, 2, {}),
    "resnet, fc": (Resnet, "fc", {}),
    "resnet, last stage": (Resnet, "layer2", {}),
    "resnet, inside a stage": (Resnet, "layer1.1", {}),
    "resnet, three last layers": (Resnet, 3, {}),
    "anchored, its network's last layer": (lambda: ds.Anchored(Resnet(), images(), num_members=2).member(1), 1, {}),
    "a network in a network": (lambda: nn.Sequential(nn.Sequential(Resnet())), 2, {}),
    "sequential": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.ReLU(), nn.Linear(9, 5)), 2, {}),
}


@pytest.mark.parametrize(("make", "at", "options"), CUTS.values(), ids=CUTS.keys())
class TestCuts:
    def test_give_what_the_network_gives(self, make, at, options):
        model = make().eval()
        parts = ds.cut(model, at, fresh=False, example=images(), **options)
        torch.testing.assert_close(whole(parts)(images()), model(images()))

    def test_run_as_heads_in_one_program(self, make, at, options):
        model = make()
        ens = ds.HeadEnsemble(*ds.cut(model, at, **options), num_members=3).eval()
        outputs = ens(images())
        assert outputs.shape == (3, 12, 5)
        assert ens.heads.why_different is None
        assert (outputs[0] - outputs[1]).abs().max() > 1e-3
        torch.testing.assert_close(ens.member(2).eval()(images()), outputs[2], rtol=1e-4, atol=1e-5)

    def test_have_each_layer_on_one_side(self, make, at, options):
        model = make()
        backbone, make_head = ds.cut(model, at, **options)
        sizes = [sum(p.numel() for p in part.parameters()) for part in (backbone, make_head(), model)]
        assert sizes[0] + sizes[1] == sizes[2]


def test_a_class_token_makes_features_as_small_as_one_token():
    backbone, _ = ds.cut(Vit(), "blocks.2.norm2", token=0)
    assert backbone.eval()(images()).shape == (12, 8)


def test_fresh_heads_differ_and_others_start_from_the_network():
    model = Resnet()
    _, fresh = ds.cut(model, "layer2")
    _, copied = ds.cut(model, "layer2", fresh=False)
    assert not torch.equal(fresh().fc.weight, model.fc.weight)
    assert torch.equal(copied().fc.weight, model.fc.weight)
    assert copied().fc.weight is not model.fc.weight


def test_what_no_layer_resets_keeps_the_networks_values():
    model = Vit()
    with torch.no_grad():
        model.blocks[2].gamma.fill_(0.25)
    _, make_head = ds.cut(model, "blocks.2.norm2")
    values = [p for name, p in make_head().named_parameters() if "gamma" in name]
    assert len(values) == 1
    assert bool((values[0] == 0.25).all())


def test_a_reset_of_ones_own_is_used():
    _, make_head = ds.cut(Resnet(), "fc", reset=lambda layer: nn.init.constant_(layer.weight, 0.5))
    assert bool((make_head().fc.weight == 0.5).all())


def test_cut_heads_can_have_other_outputs():
    _, make_head = ds.cut(Resnet(), "layer2", outputs=7)
    assert make_head().eval()(torch.randn(2, 6, 8, 8)).shape == (2, 7)


def test_cutting_leaves_the_network_as_it_was():
    model = Resnet().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ds.cut(model, "layer2", example=images())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("make", "at", "options", "match"),
    [
        (Vit, "blocks.2.mlp", {}, "One tensor must cross the cut; at 'blocks.2.mlp' it is 2"),
        (Vit, "blocks.7", {}, "There is no layer 'blocks.7' in Vit"),
        (nn.ReLU, 1, {}, "`forward` of ReLU calls 0"),
        (lambda: nn.Sequential(nn.Linear(3, 3)), 1, {}, "`forward` of Sequential calls 1"),
        (Resnet, 0, {}, "leave a layer on both sides"),
        (Resnet, 9, {}, "leave a layer on both sides"),
        (lambda: Vit(pool="mean"), "blocks.2.norm2", {"token": 0, "example": images()}, "do not give what"),
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Softmax(-1)), 1, {}, "can be given new weights"),
    ],
)
def test_what_cannot_be_cut_is_said(make, at, options, match):
    with pytest.raises(ValueError, match=match):
        ds.cut(make(), at, **options)


class MakesTensors(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.last(self.first(x) * torch.arange(5.0)) + torch.tensor([1.0, 2.0, 3.0])


def test_tensors_that_forward_makes_are_on_the_side_that_uses_them():
    model, inputs = MakesTensors(), torch.randn(6, 4)
    backbone, make_head = ds.cut(model, "last", fresh=False, example=inputs)
    assert torch.equal(make_head()(backbone(inputs)), model(inputs))
    (before,), (behind,) = backbone.buffers(), make_head().buffers()
    assert (before.tolist(), behind.tolist()) == ([0.0, 1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0])
    assert not dict(model.named_buffers())
    # A part of a network can be cut once more, and runs as heads.
    again = nn.Sequential(backbone, make_head())
    assert torch.equal(whole(ds.cut(again, "1", fresh=False))(inputs), model(inputs))
    assert ds.HeadEnsemble(*ds.cut(model, "last"), num_members=2)(inputs).shape == (2, 6, 3)


def test_a_token_needs_tokens():
    backbone, _ = ds.cut(Resnet(), "avgpool", token=1)
    with pytest.raises(ValueError, match="picks one of"):
        backbone(images())


def test_a_forward_that_looks_at_values_cannot_be_traced():
    class Peeking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            x = self.a(x)
            return self.b(x) if x.sum() > 0 else self.b(-x)

    with pytest.raises(ValueError, match="Peeking cannot be traced"):
        ds.cut(Peeking(), "b")


@pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")
@pytest.mark.parametrize(
    ("name", "at", "token"),
    [
        ("deit3_small_patch16_224", "blocks.11.norm2", 0),
        ("vit_tiny_patch16_224", "blocks.11.norm2", 0),
        ("vit_tiny_patch16_224", "head", None),
        ("resnet18", "layer4", None),
        ("resnet18", 1, None),
    ],
)
def test_networks_of_timm(name, at, token):
    import timm

    inputs = torch.randn(2, 3, 224, 224)
    model = timm.create_model(name, pretrained=False, num_classes=7).eval()
    parts = ds.cut(model, at, fresh=False, token=token, example=inputs)
    with torch.no_grad():
        torch.testing.assert_close(whole(parts)(inputs), model(inputs), rtol=1e-3, atol=1e-4)
    ens = ds.HeadEnsemble(*ds.cut(model, at, token=token), num_members=2).eval()
    assert ens(inputs).shape == (2, 2, 7)


@pytest.mark.skipif(find_spec("torchvision") is None, reason="torchvision is not installed")
@pytest.mark.parametrize(
    ("name", "at", "token"),
    [
        ("vit_b_16", "encoder.layers.encoder_layer_11.ln_2", 0),
        ("vit_b_16", "heads", None),
        ("resnet18", "layer4", None),
        ("regnet_y_400mf", "fc", None),
    ],
)
def test_networks_of_torchvision(name, at, token):
    import torchvision

    inputs = torch.randn(2, 3, 224, 224)
    model = torchvision.models.get_model(name, weights=None, num_classes=7).eval()
    parts = ds.cut(model, at, fresh=False, token=token, example=inputs)
    with torch.no_grad():
        torch.testing.assert_close(whole(parts)(inputs), model(inputs), rtol=1e-3, atol=1e-4)
    ens = ds.HeadEnsemble(*ds.cut(model, at, token=token), num_members=2).eval()
    assert ens(inputs).shape == (2, 2, 7)
