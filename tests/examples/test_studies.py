"""Check the studies: published values, and a stated kind for every printed number."""

import importlib.util

import pytest

from tests.train.starting import ROOT

STUDIES = sorted(path.stem for path in (ROOT / "examples/studies").glob("*.py"))


def study(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"examples/studies/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_runs_and_says_what_is_published_fitted_or_predicted(name, capsys):
    study(name).main()
    output = capsys.readouterr().out
    assert "predicted" in output
    assert len(output.splitlines()) >= 4
    assert "torch" not in study(name).__dict__
    assert f"`{name}.py`" in (ROOT / "examples/studies/README.md").read_text()


def test_horovod_s_bars_lie_in_their_bands_and_in_their_order():
    bars = study("horovod_512")
    bands = {}
    for name, (parameters, images_per_s, published) in bars.MODELS.items():
        low, high = bands[name] = bars.band(parameters, images_per_s)
        assert low <= published <= high
        assert high - low < 0.25
    assert bands["Inception-v3"] > bands["ResNet-101"] > bands["VGG-16"]
    assert bands["VGG-16"][1] < bands["ResNet-101"][0]  # VGG-16 is apart for certain


@pytest.mark.parametrize("place", [0, 1])
def test_points_up_to_32_gpus_predict_where_parameter_servers_stop_to_scale(place):
    servers = study("parameter_server")
    system, other = list(servers.TABLES)[place], list(servers.TABLES)[1 - place]
    steps, part = servers.steps(system), servers.waits(other)
    model, ring = servers.predicted(system, part), servers.ring(system, part)
    for gpus in (64, 128):
        assert model[gpus] == pytest.approx(steps[1] / steps[gpus], rel=0.25)
    assert model[128] < 0.75 * model[32]  # the knee
    assert ring[128] == pytest.approx(ring[16], rel=0.02)  # none


def test_what_is_predicted_for_a_system_takes_nothing_of_its_points_above_32_gpus(monkeypatch):
    servers = study("parameter_server")
    system = "Piz Daint"
    part = servers.waits("EC2 p2.xlarge")
    before = servers.predicted(system, part)
    rates, counts = servers.TABLES[system]
    monkeypatch.setitem(servers.TABLES, system, ((*rates[:6], 1.0, 1.0), counts))
    assert servers.predicted(system, part) == before


def test_the_hour_of_256_gpus_is_within_the_band():
    hour = study("goyal_hour")
    low, high = (hour.efficiency(256, overlap=overlap) for overlap in (False, True))
    assert low <= 0.90 <= high
    slow, fast = (hour.IMAGES / hour.images_per_s(256, overlap=o) / 3600 for o in (False, True))
    assert fast <= 1.0 <= slow


def test_one_server_takes_time_by_node_a_ring_hardly_and_nothing_beats_the_bound():
    rings = study("ring_or_server")
    few, many = rings.seconds(8), rings.seconds(512)
    assert many["1 server"] / few["1 server"] == pytest.approx(511 / 7, rel=0.01)
    assert many["ring"] < 1.3 * few["ring"]
    assert many["all nodes"] == pytest.approx(many["bound"], rel=0.01)
    for nodes in rings.NODES:
        found = rings.seconds(nodes)
        assert min(found.values()) >= found["bound"] * (1 - 1e-3)
    assert rings.seconds(1024)["trees"] < 2 * rings.seconds(1024)["ring"]


def test_codecs_pay_on_slow_networks_alone():
    codecs = study("codecs")
    edge = codecs.break_even_gbit(4e9)

    def gain(gbit):
        here = codecs.machine(gbit, 4e9)
        plain, half = (
            codecs.allreduce(here, 1e8, codecs.AllreduceSpec("ring", 8, codec)).seconds(here)
            for codec in ("none", "bf16")
        )
        return plain / half

    assert gain(edge) == pytest.approx(1)
    assert gain(edge / 10) > 1.3
    assert gain(edge * 10) < 1
    for parameters, images_per_s in codecs.MODELS.values():
        assert codecs.ratio_needed(parameters, images_per_s, 100) == 1
        assert 1 < codecs.ratio_needed(parameters, images_per_s, 10) <= 5
