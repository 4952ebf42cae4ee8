"""Third-party trainers run with our backend by the recipes of the guide."""

import os
from pathlib import Path

import pytest

from hpctrain.launch.mpirun import find_mpirun
from tests.processes import AS_ROOT, ended

pytestmark = [
    pytest.mark.conformance,
    pytest.mark.launches,
    pytest.mark.limit(400),
    pytest.mark.requires("trainers"),
]

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "hpctrain/guide/torch-distributed.md").read_text()

BEGIN = """
import os
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
RANKS, RANK = int(os.environ["RANKS"]), int(os.environ["OMPI_COMM_WORLD_RANK"])
DTYPE = torch.float32 if os.environ["NAME"] == "DeepSpeed" else torch.float64
BATCH, EPOCHS = 8, 2

torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
model.to(DTYPE)
alone = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
alone.to(DTYPE).load_state_dict(model.state_dict())
x = torch.randn(64, 6, dtype=DTYPE)
y = x.sum(1, keepdim=True).tanh()

def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)

def mine():
    batches = [batch.chunk(RANKS)[RANK] for batch in torch.arange(64).split(BATCH)]
    return DataLoader(TensorDataset(x, y), batch_sampler=[batch.tolist() for batch in batches])
"""

END = """
assert torch.distributed.get_backend() == "hpctrain"
assert torch.distributed.get_world_size() == RANKS
stepper = sgd(alone)
for _ in range(EPOCHS):
    for a, b in zip(x.split(BATCH), y.split(BATCH)):
        stepper.zero_grad()
        mse_loss(alone(a), b).backward()
        stepper.step()
bound = 1e-12 if DTYPE is torch.float64 else 1e-5
for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)
print("trained as one process does", flush=True)
torch.distributed.destroy_process_group()
"""

RECIPES = {
    "Accelerate": """
torch.distributed.init_process_group("hpctrain")
accelerator = Accelerator(cpu=True)
""",
    "Transformers": """
torch.distributed.init_process_group("hpctrain")
arguments = TrainingArguments(..., use_cpu=True)
""",
    "Lightning": """
strategy = DDPStrategy(process_group_backend="hpctrain", cluster_environment=MPIEnvironment())
trainer = Trainer(accelerator="cpu", devices=2, num_nodes=1, strategy=strategy)
""",
    "DeepSpeed": """
torch.distributed.init_process_group("hpctrain")
deepspeed.init_distributed(dist_backend="hpctrain", auto_mpi_discovery=False)
""",
}
"""Recipes as printed in the guide."""

OPTIONS = {
    "Transformers": """output_dir=os.environ["FOLDER"], num_train_epochs=EPOCHS, optim="sgd",
    per_device_train_batch_size=BATCH // RANKS, learning_rate=0.1, lr_scheduler_type="constant",
    max_grad_norm=0, save_strategy="no", report_to=[]""",
    "Lightning": """max_epochs=EPOCHS, logger=False, enable_checkpointing=False,
    use_distributed_sampler=False""",
}
"""Arguments that a recipe omits."""

PROGRAMS = {
    "Accelerate": """
from accelerate import Accelerator
RECIPE
wrapped, stepper = accelerator.prepare(model, sgd(model))
for _ in range(EPOCHS):
    for a, b in mine():
        stepper.zero_grad()
        accelerator.backward(mse_loss(wrapped(a), b))
        stepper.step()
""",
    "Transformers": """
from transformers import Trainer, TrainingArguments
RECIPE
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = model
    def forward(self, a, labels):
        return {"loss": mse_loss(self.inner(a), labels)}

class InOrder(Trainer):
    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)

samples = [{"a": a, "labels": b} for a, b in zip(x, y)]
InOrder(model=Model(), args=arguments, train_dataset=samples).train()
""",
    "Lightning": """
from lightning import LightningModule, Trainer
from lightning.pytorch.plugins.environments import MPIEnvironment
from lightning.pytorch.strategies import DDPStrategy
RECIPE
class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.inner = model
    def training_step(self, batch, _):
        return mse_loss(self.inner(batch[0]), batch[1])
    def configure_optimizers(self):
        return sgd(self)

trainer.fit(Model(), mine())
""",
    "DeepSpeed": """
import deepspeed
RECIPE
config = {"train_batch_size": BATCH, "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True, "gradient_clipping": 0.0}
engine, *_ = deepspeed.initialize(model=model, optimizer=sgd(model), config=config)
for _ in range(EPOCHS):
    for a, b in mine():
        engine.backward(mse_loss(engine(a), b))
        engine.step()
""",
}


@pytest.mark.parametrize(
    "name",
    [
        "Accelerate",
        "Transformers",
        "Lightning",
        pytest.param("DeepSpeed", marks=pytest.mark.requires("deepspeed")),
    ],
)
def test_a_recipe_of_the_guide_trains_as_one_process_does(name, tmp_path):
    recipe = RECIPES[name]
    assert "".join(f"    {line}\n" for line in recipe.strip().splitlines()) in GUIDE
    added = OPTIONS.get(name, "")
    if name == "Lightning":
        recipe = recipe.replace("strategy=strategy", f"strategy=strategy, {added}")
    recipe = recipe.replace("...", added)
    program = tmp_path / "program.py"
    program.write_text(BEGIN + PROGRAMS[name].replace("RECIPE", recipe) + END)
    python = ROOT / ".venv-trainers/bin/python"
    environ = {one: value for one, value in os.environ.items() if not one.startswith("MASTER_")}
    environ |= AS_ROOT | {"PYTHONPATH": str(ROOT), "NAME": name, "RANKS": "2"}
    environ |= {"FOLDER": str(tmp_path / "run"), "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    environ |= {"DS_ACCELERATOR": "cpu", "PATH": f"{python.parent}:{environ['PATH']}"}
    crowded = ["--oversubscribe", "--bind-to", "none"]
    done = ended(
        [find_mpirun().path, *crowded, "-np", 2, python, program], env=environ, timeout=300
    )
    assert done.stdout.count("trained as one process does") == 2, done.stdout + done.stderr
    assert done.returncode == 0
