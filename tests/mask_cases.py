"""Networks of every kind that masks go into, with the shape of an input."""

import torch
import torch.nn.functional as F
from torch import nn

import dissensus as ds
from dissensus import architectures


class Functional(nn.Module):
    """Activations that are functions, a view instead of Flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 12, 3), nn.Conv2d(12, 16, 3)
        self.norm = nn.BatchNorm2d(16)
        self.fc1, self.fc2 = nn.Linear(16, 20), nn.Linear(20, 3)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.relu(self.norm(self.conv2(x)))
        x = x.view(x.size(0), -1)
        return self.fc2(F.gelu(self.fc1(x)))


class SharedActivation(nn.Module):
    """One activation module called twice, once after a sum, as in many residual networks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.conv1, self.bn1 = nn.Conv2d(8, 12, 3, padding=1), nn.BatchNorm2d(12)
        self.conv2, self.bn2 = nn.Conv2d(12, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.stem(x)
        x = self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))) + x)
        return self.head(x.mean((2, 3)))


class Peeking(nn.Module):
    """Looks at values, so that only its parts can be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU())
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        out = self.head(self.body(x))
        return out * (2.0 if out.sum().item() > 1e9 else 1.0)


class Tokens(nn.Module):
    """Features on the last axis; the activation before LayerNorm cannot be trimmed after."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 16)
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)
        self.act, self.out_act = nn.GELU(), nn.ReLU()
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, x):
        x = self.embed(x)
        x = x + self.down(self.act(self.up(x)))
        return self.head(self.norm(self.out_act(x)).mean(1))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.encoder(self.embed(x)).mean(1))


def conv1d():
    return nn.Sequential(
        nn.Conv1d(2, 8, 3),
        nn.ReLU(),
        nn.Conv1d(8, 12, 3),
        nn.PReLU(12),
        nn.AdaptiveAvgPool1d(2),
        nn.Flatten(),
        nn.Linear(24, 3),
    )


def conv3d():
    return nn.Sequential(
        nn.Conv3d(2, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv3d(8, 12, 3),
        nn.BatchNorm3d(12),
        nn.SiLU(),
        nn.Flatten(),
        nn.Linear(96, 3),
    )


def norm_last():
    """BatchNorm after the activation: a dropped channel is a constant there, not zero."""
    return nn.Sequential(
        nn.Linear(4, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 12), nn.Sigmoid(), nn.Linear(12, 3)
    )


NETS = {
    "mlp": (lambda: architectures.mlp(4, [16, 12], 3, norm=True), (4,)),
    "norm last": (norm_last, (4,)),
    "cnn": (architectures.cnn, (3, 32, 32)),
    "resnet18": (lambda: architectures.resnet18(width=8), (3, 8, 8)),
    "wide resnet": (lambda: architectures.wide_resnet(10, 1), (3, 8, 8)),
    "functional": (Functional, (3, 8, 8)),
    "shared activation": (SharedActivation, (3, 8, 8)),
    "peeking": (Peeking, (4,)),
    "tokens": (Tokens, (7, 5)),
    "transformer": (Transformer, (7, 5)),
    "conv1d": (conv1d, (2, 8)),
    "conv3d": (conv3d, (2, 4, 4, 4)),
}


def made(name, num_members=3, scale=2.0, **options):
    make, shape = NETS[name]
    torch.manual_seed(0)
    net = make()
    for module in net.modules():  # statistics and weights as training leaves them
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
            nn.init.normal_(module.bias)
    return net, ds.Masksembles(net, num_members, scale, **options), torch.randn(5, *shape)
