"""Which ensembles `diversification` trains, what they are called, and what each of them is made of."""

from dataclasses import replace

import pytest
import torch
from dissensus_studies.diversification.arms import objective_of, scaled_epochs
from dissensus_studies.diversification.data import of_first_classes
from dissensus_studies.diversification.settings import Setting, settings_of
from dissensus_studies.harness.image_sets import load_images

from dissensus import objectives as obj


def test_names_tell_all_arms_apart():
    for quick in (True, False):
        names = [setting.name for setting in settings_of(quick, 0)]
        assert len(set(names)) == len(names)


def test_what_the_document_varies_is_there():
    settings = [setting for setting in settings_of(False, 0) if setting.seed == 0]
    half = [s for s in settings if s.family == "heads half" and s.method == "ldr" and s.layers == 2]
    for size in (2, 5, 10, 50):
        published = {s.strength for s in half if s.num_members == size and s.guard == "none" and s.active == 2}
        assert {0, 0.1, 0.5, 1, 5, 10} <= published
    drawn = {(s.num_members, s.active) for s in half if s.strength == 0.5 and s.guard == "none"}
    assert {(5, 2), (5, 3), (5, 4), (5, 5), (50, 2), (50, 5), (50, 10)} <= drawn
    methods = {s.method for s in settings if s.kind == "nets"}
    assert {"single", "deep", "diverse", "ldr", "a2d", "divdis", "masksembles", "dropout", "batch"} == methods
    assert {"share", "none", "cap", "falling", "held-out loss", "held-out accuracy"} == {
        s.guard for s in settings if s.kind == "nets" and s.method == "ldr" and s.strength == 0.5
    }
    assert {0.1, 0.5, 1, 5} <= {s.strength for s in settings if s.kind == "nets" and s.guard == "share"}


def test_guards_become_objectives():
    sources = (torch.zeros(4, 2), torch.ones(4, 2))
    base = Setting("heads", "ldr", strength=0.5, active=2, backbone="half")
    assert objective_of(base, sources) == obj.LossGuided(0.5, active=2)
    assert objective_of(replace(base, guard="none"), sources).guard in (None, "none")
    assert objective_of(replace(base, guard="share=0.5"), sources).guard == obj.LossShare(0.5)
    falling = objective_of(replace(base, guard="falling"), sources)
    assert falling.guard == "none"
    assert falling.strength(torch.tensor(0.5)).item() == pytest.approx(0.125)
    outside = objective_of(Setting("nets", "divdis", strength=3.0, source=1), sources)
    assert (outside.regulariser, outside.strength, outside.ood_data is sources[1]) == ("divdis", 3.0, True)
    assert isinstance(objective_of(Setting("nets"), sources), obj.Independent)


def test_heads_take_as_many_steps_each_however_many_are_drawn():
    drawn = Setting("heads", "ldr", 50, 0.5, active=2)
    assert scaled_epochs(Setting("heads", num_members=50), 10) == 10
    assert scaled_epochs(drawn, 10) == 250
    assert scaled_epochs(replace(drawn, fixed=True), 10) == 10


def test_half_of_the_classes_are_the_first(tmp_path):
    sets = of_first_classes(load_images(None, limit=80), 4)
    assert sets.num_classes == 4
    assert sets.train.y.max() == 3
