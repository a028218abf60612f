"""LoRA ensembles against the weights written out, against peft, and on a model of transformers."""

import pytest
import torch
from torch import nn
from training_helpers import x, y

import dissensus as ds
from dissensus.randomness import seeded


def net():
    with seeded(0):
        return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 3))


def trained(base=None, **options):
    ens = ds.LoRAEnsemble(base or net(), 3, rank=2, alpha=4.0, **options)
    ds.fit(ens, (x, y), epochs=2, lr=0.05, batch_size=25, engine="eager")
    return ens


def test_a_member_is_the_network_with_corrected_weights():
    base, ens = net(), trained()
    for member in range(3):
        with torch.no_grad():
            plain = net().eval()
            for index in (0, 3):
                adapter = ens.net[index]
                plain[index].weight += 2.0 * adapter.b[member] @ adapter.a[member]
            torch.testing.assert_close(ds.predict(ens, x)[member], plain(x))
    torch.testing.assert_close(ens.net[0].base.weight, base[0].weight)


def test_members_start_as_the_network():
    ens, base = ds.LoRAEnsemble(net(), 3), net().eval()
    for row in ds.predict(ens, x):
        torch.testing.assert_close(row, base(x).detach())


def test_the_network_is_held_once_and_untouched():
    base = net()
    ens = trained(base)
    assert ens.net[0].base.weight is base[0].weight
    assert isinstance(base[0], nn.Linear)
    assert not any(p.requires_grad for p in base.parameters())
    count = {m: sum(p.numel() for p in ds.LoRAEnsemble(net(), m, 2).parameters()) for m in (1, 5)}
    own = 2 * (4 + 16) + 2 * (16 + 3)
    assert count[1] == sum(p.numel() for p in base.parameters()) + own
    assert count[5] - count[1] == 4 * own


def test_layers_are_chosen_by_name():
    ens = ds.LoRAEnsemble(net(), 3, 2, layers="0", own="3")
    assert [name for name, _ in ens.adapters()] == ["net.0", "net.3"]
    assert ens.net[3].weight.shape == (3, 3, 16)
    with pytest.raises(ValueError, match="'query' matches none of 0, 3"):
        ds.LoRAEnsemble(net(), 3, layers="query")
    with pytest.raises(ValueError, match="`rank` must be"):
        ds.LoRAEnsemble(net(), 3, rank=0)


def test_members_can_be_clipped_dropped_and_given_rates_of_their_own(tmp_path):
    ens = ds.LoRAEnsemble(net(), 3, 2)
    ds.fit(ens, (x, y), epochs=1, lr=[0.01, 0.1, 0.0], clip_norm=1.0, on_divergence="drop", engine="eager")
    torch.testing.assert_close(ds.predict(ens, x)[2], net().eval()(x).detach())
    ens.keep_members([2, 0])
    assert ds.predict(ens, x).shape[0] == 2


def test_a_run_on_another_network_is_not_resumed(tmp_path):
    ds.fit(ds.LoRAEnsemble(net(), 2), (x, y), epochs=1, checkpoint_dir=tmp_path)
    other = net()
    with torch.no_grad():
        other[0].weight.neg_()
    with pytest.raises(ds.training.CheckpointError, match="network"):
        ds.fit(ds.LoRAEnsemble(other, 2), (x, y), epochs=1, checkpoint_dir=tmp_path, resume=True)


def tiny_bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=3
    )  # fmt: skip
    with seeded(0):
        return transformers.BertForSequenceClassification(config)


TOKENS = {"input_ids": torch.arange(60).reshape(10, 6) % 40, "attention_mask": torch.ones(10, 6).long()}


@pytest.mark.slow
def test_adapters_on_a_model_of_transformers():
    ens = ds.LoRAEnsemble(tiny_bert(), 4, 2, layers=["*.query", "*.value"], own="classifier", output="logits")
    with torch.no_grad():
        start = tiny_bert().eval()(**TOKENS).logits
    for row in ds.predict(ens, TOKENS):
        torch.testing.assert_close(row, start)
    labels = torch.arange(10) % 3
    run = ds.fit(ens, (TOKENS, labels), epochs=10, lr=0.05, batch_size=10, engine="eager")
    losses = run.history.by_epoch("loss")
    assert losses[-1] < losses[0]
    found = ds.predict(ens, TOKENS)
    with torch.no_grad():
        torch.testing.assert_close(ens.member(2).eval()(**TOKENS).logits, found[2], rtol=1e-4, atol=1e-5)
    assert found.std(0).max() > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's own
def test_a_member_is_what_peft_makes_of_its_matrices():
    peft = pytest.importorskip("peft")
    layers = ["query", "value"]
    ens = ds.LoRAEnsemble(tiny_bert(), 2, 2, alpha=4.0, layers=[f"*.{name}" for name in layers], output="logits")
    for _, adapter in ens.adapters():
        nn.init.normal_(adapter.b)
    model = peft.get_peft_model(tiny_bert(), peft.LoraConfig(r=2, lora_alpha=4, target_modules=layers)).eval()
    for member in range(2):
        for name, adapter in ens.adapters():
            theirs = model.base_model.model.get_submodule(name.removeprefix("net."))
            theirs.lora_A["default"].weight.data.copy_(adapter.a[member])
            theirs.lora_B["default"].weight.data.copy_(adapter.b[member])
        with torch.no_grad():
            torch.testing.assert_close(ds.predict(ens, TOKENS)[member], model(**TOKENS).logits)


def randomised(ens):
    with torch.no_grad():
        for parameter in ens.parameters():
            if parameter.requires_grad:
                parameter.copy_(
                    torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
                )
    return ens


def corrected(ens, member, index):
    layer = ens.net[index]
    return layer.base.weight + layer.scale * layer.b[member] @ layer.a[member]


def by_hand(ens, members):
    """The network with the mean of these members' weights, layer by layer."""
    plain = net().eval()
    with torch.no_grad():
        plain[0].weight.copy_(torch.stack([corrected(ens, member, 0) for member in members]).mean(0))
        plain[3].weight.copy_(ens.net[3].weight[members].mean(0))
        plain[3].bias.copy_(ens.net[3].bias[members].mean(0))
    return plain


def test_a_soup_has_the_mean_of_the_members_weights():
    ens = randomised(ds.LoRAEnsemble(net(), 3, rank=2, layers="0", own="3"))
    soup = ens.soup()
    assert (soup[0].a.shape, soup[0].b.shape) == ((1, 6, 4), (1, 16, 6))
    torch.testing.assert_close(soup(x), by_hand(ens, [0, 1, 2])(x), rtol=1e-4, atol=1e-4)
    assert ens.net[0].a.shape == (3, 2, 4)


def test_a_greedy_soup_has_the_mean_of_the_weights_it_took():
    ens = randomised(ds.LoRAEnsemble(net(), 4, rank=2, layers="0", own="3"))
    labels = by_hand(ens, [1, 2])(x).argmax(-1)
    found = ds.greedy_soup(ens, (x, labels))
    plain = by_hand(ens, list(found.members))
    torch.testing.assert_close(found.net(x), plain(x), rtol=1e-4, atol=1e-4)
    assert found.accuracy == pytest.approx(float((plain(x).argmax(-1) == labels).float().mean()))


def test_a_corrected_layer_shows_a_single_members_weight_and_of_several_the_dtype():
    ens = randomised(ds.LoRAEnsemble(net(), 2, rank=2))
    torch.testing.assert_close(ens.member(1)[0].weight, corrected(ens, 1, 0))
    assert ens.member(1)[0].bias is not None
    weight = ens.net[0].weight
    assert (weight.dtype, weight.shape, weight.is_meta) == (torch.float32, (16, 4), True)


class Encoder(nn.Module):
    def __init__(self, batch_first=True):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first, dropout=0.1)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.out, self.axis = nn.Linear(8, 3), 1 if batch_first else 0

    def forward(self, x):
        return self.out(self.encoder(x.transpose(0, 1 - self.axis)).mean(self.axis))


SEQUENCES = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0))


def test_members_inside_torchs_encoder_layers_are_those_of_the_ensemble():
    with seeded(0):
        ens = randomised(ds.LoRAEnsemble(Encoder().eval(), 3, rank=2, layers="*linear*")).eval()
    with torch.no_grad():
        for member in range(3):
            torch.testing.assert_close(ens.member(member)(SEQUENCES), ens(SEQUENCES)[member], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("settings", [{"layers": "*linear1"}, {"layers": (), "own": "*linear1"}])
def test_a_batch_on_the_second_axis_is_refused_where_there_are_several_members(settings):
    ens = ds.LoRAEnsemble(Encoder(batch_first=False).eval(), 3, **settings)
    with pytest.raises(ValueError, match=r"the batch, 12 rows, on the first axis .*\(5, 12, 8\).*batch_first=True"):
        ens(SEQUENCES)
    # Of a single member every row is the same one's.
    assert ens.member(0)(SEQUENCES).shape == (4, 3)


@pytest.mark.slow
def test_networks_may_ask_a_corrected_layer_for_its_dtype():
    transformers = pytest.importorskip("transformers")
    with seeded(0):
        config = transformers.T5Config(vocab_size=40, d_model=16, d_ff=32, d_kv=8, num_layers=1, num_heads=2)
        ens = ds.LoRAEnsemble(transformers.T5EncoderModel(config).eval(), 2, 2, output="last_hidden_state")
    randomised(ens).eval()
    with torch.no_grad():
        outputs = ens(input_ids=TOKENS["input_ids"])
        for member in range(2):
            alone = ens.member(member)(input_ids=TOKENS["input_ids"]).last_hidden_state
            torch.testing.assert_close(alone, outputs[member], rtol=1e-4, atol=1e-4)
