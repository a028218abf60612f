"""Models that people have, each tried as an ensemble: trained, asked, saved and loaded; or refused in a sentence.

`python tests/models_table.py` writes docs/models-table.md; tests/test_models_table.py holds it.
"""

import importlib.util
import re
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dissensus as ds
from dissensus import architectures

PAGE = Path(__file__).parents[1] / "docs" / "models-table.md"
ROWS = 6


def vectors(width=4, classes=3):
    g = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, width, generator=g), torch.arange(ROWS) % classes


def images(size=16, channels=3, classes=3):
    g = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, channels, size, size, generator=g), torch.arange(ROWS) % classes


def tokens(positions=False, classes=3):
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 30, (ROWS, 7), generator=g)
    mask = (torch.arange(7) < torch.randint(3, 8, (ROWS, 1), generator=g)).long()
    y = torch.where(mask == 1, ids % classes, -100) if positions else torch.arange(ROWS) % classes
    return {"input_ids": ids, "attention_mask": mask}, y


class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.embed, self.core, self.head = nn.Embedding(30, 6), kind(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, input_ids, attention_mask):
        return self.head(self.core(self.embed(input_ids))[0][:, -1])


class Oddity(nn.Module):
    """A small network that does one odd thing."""

    def __init__(self, odd):
        super().__init__()
        self.odd, self.a, self.b, self.out = odd, nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        if odd == "tied weights":
            self.b.weight = nn.Parameter(torch.randn(8, 8) * 0.3)
            self.c = nn.Linear(8, 8)
            self.c.weight = self.b.weight
        if odd == "weight norm":
            self.b = nn.utils.parametrizations.weight_norm(self.b)
        if odd == "spectral norm":
            self.b = nn.utils.parametrizations.spectral_norm(self.b)

    def forward(self, x):
        hidden = torch.relu(self.a(x))
        if self.odd == "in-place operations":
            hidden = hidden.clone()
            hidden.mul_(2).add_(1)
            hidden[:, 0] = 0
        if self.odd == "checkpointing":
            hidden = checkpoint(self.b, hidden, use_reentrant=False)
        else:
            hidden = self.b(hidden)
        if self.odd == "tied weights":
            hidden = self.c(torch.relu(hidden))
        if self.odd == "control flow by values" and bool(hidden.mean() > 0):
            hidden = -hidden
        if self.odd == "counter in a buffer" and self.training:
            self.seen += 1
        if self.odd == "noise of its own" and self.training:
            hidden = hidden + 0.1 * torch.randn_like(hidden)
        out = self.out(hidden)
        return {
            "dictionary out": {"features": hidden, "logits": out},
            "tuple out": (out, hidden),
            "complex out": torch.complex(out, out),
        }.get(self.odd, out)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.table, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 4), nn.Linear(8, 3)

    def forward(self, image, table):
        return self.head(torch.cat([self.image(image).mean((2, 3)), self.table(table)], 1))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.core = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1, enable_nested_tensor=False
        )
        self.head = nn.Linear(8, 3)

    def forward(self, input_ids, attention_mask):
        return self.head(self.core(self.embed(input_ids), src_key_padding_mask=attention_mask == 0).mean(1))


def unet():
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 1))


ODDITIES = (
    "plain",
    "tied weights",
    "weight norm",
    "spectral norm",
    "in-place operations",
    "checkpointing",
    "control flow by values",
    "counter in a buffer",
    "noise of its own",
    "dictionary out",
)

TEXT = (
    "Bert",
    "Roberta",
    "Electra",
    "XLMRoberta",
    "Camembert",
    "MPNet",
    "Ernie",
    "RoFormer",
    "MobileBert",
    "Nystromformer",
)

# name -> (factory, data, output)
TORCH = {
    "mlp": (lambda: architectures.mlp(4, [8], 3, dropout=0.1, norm=True), vectors(), None),
    "cnn": (lambda: architectures.cnn(3), images(32), None),
    "resnet18, width 8": (lambda: architectures.resnet18(3, width=8), images(32), None),
    "linear": (lambda: nn.Linear(4, 3), vectors(), None),
    "BatchNorm and dropout": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)),
        vectors(),
        None,
    ),
    "GroupNorm": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
        ),
        images(),
        None,
    ),
    "LSTM": (Recurrent, tokens(), None),
    "GRU": (lambda: Recurrent(nn.GRU), tokens(), None),
    "RNN": (lambda: Recurrent(nn.RNN), tokens(), None),
    "transformer encoder": (Transformer, tokens(), None),
    "two inputs": (TwoInputs, ((images()[0], vectors()[0]), vectors()[1]), None),
    "tuple out": (lambda: Oddity("tuple out"), vectors(), 0),
    "segmentation": (unet, (images()[0], (images()[0].mean(1) > 0).long()), None),
    **{name: (lambda name=name: Oddity(name), vectors(), None) for name in ODDITIES},
}
REFUSED = {
    "complex out": (lambda: Oddity("complex out"), vectors(), "must return real numbers"),
    "tuple out, unsaid": (lambda: Oddity("tuple out"), vectors(), "Choose with `output=`"),
    "two inputs as one": (TwoInputs, images(), "cannot be called as"),
}


CONVOLVING = {
    "ResNet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
    "RegNet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 8},
    "ConvNext": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
    "ConvNextV2": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
    "MobileNetV2": {"depth_multiplier": 0.25},
    "PvtV2": {
        "image_size": 32,
        "hidden_sizes": [8, 8, 8, 8],
        "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 1, 1, 1],
        "mlp_ratios": [1, 1, 1, 1],
    },
}


def transformers_models():
    """Return tiny random models of transformers by name; empty where the package is missing."""
    declare_torchvision()
    try:
        import transformers as hf
    except ImportError:
        return {}
    text = {
        "vocab_size": 30,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "num_labels": 3,
        "max_position_embeddings": 40,
        "pad_token_id": 1,
    }
    decoder = text | {"num_key_value_heads": 2, "head_dim": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    vision = {
        "image_size": 16,
        "patch_size": 8,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "num_labels": 3,
    }
    cases = {
        **{
            f"{name}ForSequenceClassification": (name, text, tokens())
            for name in (
                "Bert",
                "Roberta",
                "Electra",
                "XLMRoberta",
                "Camembert",
                "MPNet",
                "Ernie",
                "RoFormer",
                "MobileBert",
                "Nystromformer",
            )
        },
        "AlbertForSequenceClassification": ("Albert", text | {"embedding_size": 8}, tokens()),
        "DistilBertForSequenceClassification": (
            "DistilBert",
            {
                "vocab_size": 30,
                "dim": 8,
                "n_layers": 1,
                "n_heads": 2,
                "hidden_dim": 16,
                "num_labels": 3,
                "pad_token_id": 1,
            },
            tokens(),
        ),
        "GPT2ForSequenceClassification": (
            "GPT2",
            {
                "vocab_size": 30,
                "n_embd": 8,
                "n_layer": 1,
                "n_head": 2,
                "n_positions": 40,
                "num_labels": 3,
                "pad_token_id": 1,
            },
            tokens(),
        ),
        **{
            f"{name}ForSequenceClassification": (name, decoder, tokens())
            for name in ("Llama", "Mistral", "Qwen2", "Gemma")
        },
        **{
            f"{name}ForTokenClassification": (name, text, tokens(positions=True))
            for name in ("Bert", "Roberta", "Electra", "XLMRoberta")
        },
        **{
            f"{name}ForImageClassification": (name, vision, images())
            for name in ("ViT", "DeiT", "Dinov2", "Beit", "ViTMSN")
        },
        "SwinForImageClassification": (
            "Swin",
            {
                "image_size": 16,
                "patch_size": 2,
                "embed_dim": 8,
                "depths": [1],
                "num_heads": [2],
                "window_size": 2,
                "num_labels": 3,
            },
            images(),
        ),
        **{
            f"{name}ForImageClassification": (name, convolving | {"num_labels": 3}, images(32))
            for name, convolving in CONVOLVING.items()
        },
        "SegformerForSemanticSegmentation": (
            "Segformer",
            {
                "num_labels": 3,
                "num_encoder_blocks": 1,
                "depths": [1],
                "sr_ratios": [1],
                "hidden_sizes": [8],
                "num_attention_heads": [2],
                "patch_sizes": [3],
                "strides": [2],
                "mlp_ratios": [1],
                "decoder_hidden_size": 8,
            },
            (images()[0], (images()[0].mean(1)[:, ::2, ::2] > 0).long()),
        ),
    }
    found = {}
    for name, (family, options, (x, y)) in cases.items():
        make, config = getattr(hf, name, None), getattr(hf, f"{family}Config", None)
        if make is None or config is None:
            continue
        inputs = x if isinstance(x, dict) else {"pixel_values": x}
        found[f"transformers {name}"] = (_maker(make, config, options), (inputs, y), "logits")
    return found


def _maker(make, config, options):
    return lambda: make(config(**options))


_DECLARED = []


def declare_torchvision():
    """Have torchvision import where its compiled operators do not load, as a GPU's wheel beside a CPU's torch: their names are enough."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or "torchvision" in sys.modules or _DECLARED:
        return
    folder = Path(spec.origin).parent
    try:
        torch.ops.load_library(next(folder.glob("_C*.so")))
    except Exception:
        library = torch.library.Library("torchvision", "DEF")
        registered = "".join((folder / f"_{part}_registrations.py").read_text() for part in ("meta", "autograd"))
        for name in set(re.findall(r'(?:torchvision::|register_meta\("|ops\.torchvision\.)(\w+)', registered)):
            library.define(f"{name}(Tensor given) -> Tensor")
        # Definitions go when the library does.
        _DECLARED.append(library)


def torchvision_models():
    """Return random models of torchvision; empty where it is missing."""
    declare_torchvision()
    try:
        from torchvision import models
    except ImportError:
        return {}
    tiny = {
        "SimpleViT": lambda: models.VisionTransformer(32, 16, 1, 2, 8, 16, num_classes=3),
        "SwinTransformer": lambda: models.SwinTransformer([4, 4], 8, [2], [2], [2, 2], num_classes=3),
        "ResNet, bottlenecks": lambda: models.ResNet(models.resnet.Bottleneck, [1, 1, 1, 1], num_classes=3),
        "DenseNet": lambda: models.DenseNet(4, (1, 1), 8, num_classes=3),
        "ConvNeXt": lambda: models.ConvNeXt([models.convnext.CNBlockConfig(8, None, 2)], num_classes=3),
    }
    names = ("resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5", "squeezenet1_1", "mnasnet0_5")
    whole = {name: (lambda name=name: getattr(models, name)(num_classes=3)) for name in names}
    segment = {
        "lraspp_mobilenet_v3_large": lambda: models.segmentation.lraspp_mobilenet_v3_large(
            num_classes=3, weights_backbone=None
        )
    }
    maps = (images(32)[0], (images(32)[0].mean(1) > 0).long())
    return {
        **{f"torchvision {name}": (make, images(32), None) for name, make in (tiny | whole).items()},
        **{f"torchvision {name}": (make, maps, "out") for name, make in segment.items()},
    }


def timm_models():
    """Return small random models of timm; empty where it is missing."""
    declare_torchvision()
    try:
        import timm
    except ImportError:
        return {}
    small = {"embed_dim": 8, "depth": 1, "num_heads": 2}
    cases = {
        "resnet10t": {},
        "mobilenetv3_small_050": {},
        "efficientnet_lite0": {},
        "convnext_atto": {"depths": (1, 1, 1, 1), "dims": (8, 8, 8, 8)},
        "regnetx_002": {},
        "ghostnet_050": {},
        "vit_tiny_patch16_224": {"img_size": 32, **small},
        "deit_tiny_distilled_patch16_224": {"img_size": 32, **small},
        "beit_base_patch16_224": {"img_size": 32, **small},
        "mixer_s32_224": {"img_size": 32},
        "swin_tiny_patch4_window7_224": {
            "img_size": 32,
            "window_size": 4,
            "embed_dim": 8,
            "depths": (1, 1),
            "num_heads": (2, 2),
        },
        "poolformer_s12": {"layers": (1, 1, 1, 1), "embed_dims": (8, 8, 8, 8)},
        "edgenext_xx_small": {},
        "resmlp_12_224": {"img_size": 32},
    }
    return {
        f"timm {name}": (_timm(timm, name, options), images(32), None)
        for name, options in cases.items()
        if timm.is_model(name)
    }


def _timm(timm, name, options):
    return lambda: timm.create_model(name, num_classes=3, **options)


def all_models():
    return {**TORCH, **transformers_models(), **timm_models(), **torchvision_models()}


def try_out(make, data, output):
    """Train two members, ask them, save and load them; return how they ran."""
    x, y = data
    ens = ds.DeepEnsemble(make, 2, output=output)
    run = ds.fit(ens, (x, y), epochs=1, batch_size=ROWS, lr=1e-3, device="cpu", engine="eager")
    assert all(torch.isfinite(torch.tensor(row["loss"])) for row in run.history.rows)
    outputs = ds.predict(ens, x)
    assert outputs.shape[:2] == (2, ROWS)
    assert bool(outputs.isfinite().all())
    assert not torch.equal(outputs[0], outputs[1])
    with tempfile.TemporaryDirectory() as folder:
        ds.save(ens, folder)
        again = ds.load(folder, make_member=make)
    torch.testing.assert_close(ds.predict(again, x), outputs)
    return "vectorised" if ens.execution_reason is None else f"in a loop: {ens.execution_reason}"


def _plainly(how):
    """Return how members ran without the names of a package's layers."""
    return re.sub(r"buffer '[^']*'", "a buffer", how).replace("|", "/")


def write_page(rows):
    """Write the table of the documentation."""
    lines = [
        "# Models that were tried",
        "",
        "Made by `tests/models_table.py`: tiny random configurations of each model as two members, trained, asked, saved and loaded. See",
        "[Your own model](models.md).",
        "",
        "| model | fit | predict | save and load | members run |",
        "|---|---|---|---|---|",
        *(f"| {name} | yes | yes | yes | {_plainly(how)} |" for name, how in rows.items()),
        "",
        "Refused in a sentence:",
        "",
        *(f'- {name}: "{words} …"' for name, (_, _, words) in REFUSED.items()),
        "",
    ]
    PAGE.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    found, failed = {}, {}
    for name, case in all_models().items():
        try:
            found[name] = try_out(*case)
            print("tried", name, flush=True)
        except Exception as problem:
            failed[name] = f"{type(problem).__name__}: {problem}"[:300]
    write_page(found)
    print(f"{len(found)} models in {PAGE}")
    for name, problem in failed.items():
        print(f"FAILED {name}: {problem}")
    sys.exit(bool(failed))
