"""Optimizers do not load torch's compiler; code that uses the compiler loads all of it."""

import sys
import textwrap

import pytest

from tests.processes import ended

PRELUDE = """
import os, sys, torch
from hpctrain.runtime import lazy_dynamo
lazy_dynamo.install()
model = torch.nn.Linear(4, 2)

def stands_in():
    module = sys.modules["torch._dynamo"]
    return type(module).__name__ == "DynamoStub" and "sympy" not in sys.modules

def train(kind):
    optimizer = kind(model.parameters(), lr=0.1)
    def closure():  # no backward, because a fork does not copy its threads
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        return torch.tensor(1.0)
    for _ in range(2):
        optimizer.step(closure)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    return optimizer, closure
"""

NEEDS = {
    "a compiled step": "optimizer, closure = train(torch.optim.SGD)\n"
    "before = model.weight.clone()\n"
    "torch.compile(lambda: optimizer.step(closure), backend='eager')()\n"
    "assert not torch.equal(before, model.weight)",
    "import of a module": "import torch._dynamo.utils\n"
    "from torch._dynamo.utils import counters\n"
    "assert torch._dynamo.utils is sys.modules['torch._dynamo.utils']\n"
    "assert torch._dynamo.utils.counters is counters\n"
    "assert torch._dynamo.utils.__spec__.origin",
    "import of a name": "handed_back = torch.optim.Optimizer.add_param_group.__wrapped__\n"
    "assert '__dynamo_disable' in vars(handed_back)\n"
    "from torch._dynamo import config\n"
    "assert config is torch._dynamo.config\n"
    "assert '__dynamo_disable' not in vars(handed_back)",
    "a decorator": "@torch._dynamo.disable\ndef one(): return 1\nassert one() == 1",
}


def run(code: str) -> str:
    """Run code in a separate process; return its output."""
    done = ended([sys.executable, "-c", PRELUDE + code], timeout=140)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_no_optimizer_loads_the_compiler():
    run("""
from torch.utils.checkpoint import checkpoint
names = ("SGD", "Adam", "AdamW", "LBFGS", "RMSprop", "Adagrad", "Adadelta", "NAdam", "RAdam")
for name in names:
    train(getattr(torch.optim, name))
torch.manual_seed(1)
assert stands_in()
""")


@pytest.mark.limit(150)
@pytest.mark.parametrize(
    "needs",
    [
        ("a compiled step",),
        pytest.param(
            ("import of a name", "import of a module", "a decorator"),
            marks=pytest.mark.conformance,
        ),
    ],
    ids=", ".join,
)
def test_the_compiler_is_loaded_on_demand_after_an_optimizer_step(needs):
    """Each use of the compiler runs in a separate fork, after steps without the compiler."""
    forks = "".join(
        f"""
if os.fork() == 0:
    print({name!r})
    sys.stdout.flush()
{textwrap.indent(NEEDS[name], "    ")}
    assert not stands_in()
    os._exit(0)
assert os.wait()[1] == 0, {name!r}
"""
        for name in needs
    )
    message = run(f"""
torch.set_num_threads(1)
train(torch.optim.Adam)
assert stands_in()
{forks}
assert stands_in()
""")
    assert message.splitlines() == [*needs]
