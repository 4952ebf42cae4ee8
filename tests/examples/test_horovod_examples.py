"""Check that scripts of Horovod give the same result with Horovod, the shim and hpctrain."""

import ast
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import hpctrain
from tests.train.starting import ROOT, last_line, start

FOLDER = ROOT / "examples/horovod"
LINE = "import horovod.torch as hvd\n"
TINY = ("--depth", "14", "--width", "8", "--image-size", "32", "--batch-size", "8")

EXAMPLES = {
    "digits": ("--epochs", "2"),
    "elastic": ("--epochs", "2", "--fail-at", "50"),
    "imagenet_resnet50": (*TINY, "--num-train", "64", "--num-test", "16", "--epochs", "2"),
    "synthetic_benchmark": (*TINY, "--num-iters", "2"),
}
"""Each script, and options by which it takes seconds."""

WAYS = {
    "import": ("import", "hpctrain"),
    "shim": ("shim", "hpctrain"),
    "import on Horovod": ("import", "horovod"),
    "shim on Horovod": ("shim", "horovod"),
    "Horovod alone": ("plain", "hpctrain"),
}
"""How the script comes to its ``hvd``, and the engine below hpctrain."""


class Runs:
    """Run the examples on two ranks."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        (folder / "resnet.py").write_text((FOLDER / "resnet.py").read_text())

    def output(self, example: str, way: str, *more: str) -> str:
        """Return the output of an example."""
        import_of, engine = WAYS[way]
        self.monkeypatch.setenv("HPCTRAIN_ENGINE", engine)
        self.monkeypatch.setenv("OMP_NUM_THREADS", "1")  # Horovod leaves all cores to each rank
        script = FOLDER / f"{example}.py"
        if import_of == "import":
            text = script.read_text().replace(LINE, "import hpctrain as hvd\n")
            script = self.folder / script.name
            script.write_text(text)
        options = (*EXAMPLES[example], *more)
        if example == "imagenet_resnet50":
            options += ("--data", str(self.folder / "data"))
        before = ("-m", "hpctrain", "shim") if import_of == "shim" else ()
        done = start(*before, script, *options, num_ranks=2)
        assert done.returncode == 0, f"{example}, {way}: {done.stderr}{done.stdout}"
        return done.stdout

    def loss(self, example: str, way: str, *more: str) -> float:
        """Return the loss in the last line of an example."""
        return final_loss(self.output(example, way, *more))

    def check_same(self, example: str, ways: list[str], *more: str) -> None:
        """Assert that all methods end with the same loss."""
        losses = {way: self.loss(example, way, *more) for way in ways}
        first, *others = losses.values()
        # With 16 bits, Horovod rounds in the sum, hpctrain only on the slow link.
        allowed = 1e-2 if "--fp16-allreduce" in more else 1e-5
        assert others == pytest.approx([first] * len(others), abs=allowed, rel=0), losses


def final_loss(text: str) -> float:
    line = last_line(text)
    assert line.startswith("final loss ")
    return float(line.removeprefix("final loss "))


@pytest.fixture
def runs(tmp_path, monkeypatch):
    return Runs(tmp_path, monkeypatch)


@pytest.fixture
def load(monkeypatch):
    """Import an example with hpctrain in place of Horovod."""

    def module(example: str) -> ModuleType:
        monkeypatch.syspath_prepend(FOLDER)
        name = f"horovod_example_{example}"
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{example}.py")
        made = importlib.util.module_from_spec(spec)
        # DataLoader and torch.save find classes by the name of their module.
        monkeypatch.setitem(sys.modules, name, made)
        monkeypatch.setitem(sys.modules, "horovod", SimpleNamespace(torch=hpctrain))
        monkeypatch.setitem(sys.modules, "horovod.torch", hpctrain)
        spec.loader.exec_module(made)
        return made

    return module


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_one_line_of_each_script_names_horovod_and_none_names_hpctrain(path):
    tree = ast.parse(path.read_text())
    lines = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Import)}
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not any("hpctrain" in name for name in lines | modules)
    named = {name for name in lines | modules if "horovod" in name}
    assert named == ({LINE.strip()} if path.stem in EXAMPLES else set())
    assert path.read_text().count(LINE) == len(named)


@pytest.mark.parametrize("example", EXAMPLES)
def test_help_shows_how_to_start_it(example, load, monkeypatch, capsys):
    module = load(example)
    monkeypatch.setattr(sys, "argv", [f"{example}.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        module.arguments()
    text = capsys.readouterr().out
    for start_of_line in ("python", "horovodrun", "hpctrain launch", "mpirun"):
        assert f"\n    {start_of_line}" in text


@pytest.mark.conformance
@pytest.mark.launches
@pytest.mark.requires("horovod")
def test_an_operation_may_fail_on_either_engine(runs):
    texts = [runs.output("elastic", way) for way in ("shim", "import on Horovod")]
    assert all("goes on from step 40\n" in text for text in texts)
    assert final_loss(texts[1]) == pytest.approx(final_loss(texts[0]), abs=1e-5)


@pytest.mark.launches
def test_digits_are_learnt_by_the_unchanged_script(runs):
    assert runs.loss("digits", "shim") < 1.5  # without any knowledge: ln 10 = 2.3


@pytest.mark.launches
def test_resnet_learns_from_a_file_that_it_makes(runs):
    text = runs.output("imagenet_resnet50", "import")
    assert text.startswith(f"wrote {runs.folder}/data/images-")
    assert final_loss(text) < 10


@pytest.mark.launches
@pytest.mark.requires("horovod")
def test_the_benchmark_counts_images_of_each_rank_and_of_all(runs):
    text = runs.output("synthetic_benchmark", "Horovod alone", "--model", "mlp")
    line = r"^(rank \d|total of 2 ranks): ([\d.]+) \+- [\d.]+ images/s$"
    rates = re.findall(line, text, re.MULTILINE)
    (first, one), (second, other), (_, total) = rates
    assert (first, second) == ("rank 0", "rank 1")
    assert float(total) == pytest.approx(float(one) + float(other), abs=0.2)
    assert final_loss(text) < 10


LONG = [
    pytest.mark.conformance,
    pytest.mark.launches,
    pytest.mark.limit(900),
    pytest.mark.requires("horovod"),
]


class TestEveryWay:
    pytestmark = LONG

    @pytest.mark.parametrize("example", EXAMPLES)
    def test_gives_the_same_loss(self, example, runs):
        runs.check_same(example, list(WAYS))

    @pytest.mark.parametrize("option", ["--fp16-allreduce", "--use-adasum"])
    def test_gives_it_with_gradients_that_are_not_averaged_plainly(self, option, runs):
        runs.check_same("digits", list(WAYS), option)

    @pytest.mark.parametrize("way", WAYS)
    def test_has_no_other_digit_after_a_failure(self, way, runs):
        assert runs.loss("elastic", way) == runs.loss("elastic", way, "--fail-at", "-1")

    @pytest.mark.parametrize("way", WAYS)
    def test_goes_on_from_a_checkpoint(self, way, runs, tmp_path):
        options = ("--batches-per-allreduce", "2", "--checkpoints", str(tmp_path / "checkpoints"))
        whole = runs.loss("imagenet_resnet50", way, *options)
        (tmp_path / "checkpoints/epoch-2.pt").unlink()
        text = runs.output("imagenet_resnet50", way, *options, "--workers", "1")
        assert "goes on after epoch 1\n" in text
        assert final_loss(text) == pytest.approx(whole, abs=1e-5)


def test_resnet50_is_the_one_of_the_paper(load):
    # As published implementations count them: 25.6 million.
    network = load("resnet").ResNet()
    assert sum(weight.numel() for weight in network.parameters()) == 25_557_032


def test_the_rate_warms_up_and_falls_as_that_of_imagenet(load, monkeypatch):
    module = load("imagenet_resnet50")
    monkeypatch.setattr(module, "hvd", SimpleNamespace(size=lambda: 4))
    args = SimpleNamespace(base_lr=0.1, batches_per_allreduce=2, epochs=90, warmup_epochs=5)
    rates = [module.rate(args, epoch) for epoch in (0, 2.5, 5, 29.9, 30, 60, 80, 89)]
    assert rates == pytest.approx([0.1, 0.45, 0.8, 0.8, 0.08, 0.008, 0.0008, 0.0008])


def test_half_a_file_of_images_is_never_seen(load, monkeypatch, tmp_path):
    module = load("imagenet_resnet50")
    monkeypatch.setattr(
        module, "hvd", SimpleNamespace(rank=lambda: 0, size=lambda: 1, barrier=lambda: None)
    )
    monkeypatch.setattr(
        sys, "argv", ["", *EXAMPLES["imagenet_resnet50"], "--data", str(tmp_path / "data")]
    )
    args = module.arguments()
    whole = module.write_images

    def half(file, args):
        whole(file, args)
        raise OSError("disk full")

    monkeypatch.setattr(module, "write_images", half)
    with pytest.raises(OSError, match="disk full"):
        module.data_file(args)
    assert list((tmp_path / "data").glob("*.h5")) == []
    monkeypatch.setattr(module, "write_images", whole)
    path = module.data_file(args)
    assert (len(module.Images(path, "train")), len(module.Images(path, "test"))) == (64, 16)
    image, number = module.Images(path, "train")[17]
    assert (image.shape, number) == ((3, 32, 32), 1)
