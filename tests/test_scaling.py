"""Check that only the files in ``ALLOWED`` multiply or divide tensors in place."""

import ast
from pathlib import Path

import hpctrain

PACKAGE = Path(hpctrain.__file__).parent
SCALING = {"mul", "mul_", "div", "div_", "true_divide_", "_foreach_mul_", "_foreach_div_"}

ALLOWED = {
    # The factor that ``gradients`` has decided is applied where the bytes are moved:
    "comm/ops.py": "products of ranks, and a sum by the scale it is given",
    # The weight that ``SampleCount`` has decided is applied while a bucket is filled:
    "gradients/gradient_bucket.py": "a gradient, by its rank's weight",
    # What a user asks for, in place of torch's own functions:
    "gradients/loss_scale.py": "a gradient, by the inverse of a GradScaler's scale",
    "gradients/node_bucket.py": "a chunk of the average, where its norm is clipped",
    # A step of fixed micro-shards has a factor of its own, decided in gradients/reproducible.py:
    "gradients/step_values.py": "the sum over all micro-shards, by one over their number",
    "gradients/sparse_gradients.py": "gathered rows, by the weight and the scale of the buckets",
    # Codecs define the sum themselves; the factor is applied before:
    "compress/largest.py": "momenta, and what is clipped before they are summed up",
    "compress/sign.py": "signs, by the means of their row",
    "compress/int8.py": "packets, by the factor that keeps large values finite",
    "compress/power_sgd.py": "matrices, by the factor that keeps products finite",
    "compress/qsgd.py": "levels of a block, by their number",
    # Replicas, not gradients; the weight is decided in local_sgd/rounds.py:
    "local_sgd/averaging.py": "a replica, by its rank's weight; momentum of the outer step",
    "local_sgd/federated.py": "the distance from the model of the round, by the proximal term",
    "local_sgd/averaged_tensors.py": "optimizer state, by the share of the ranks that have it",
    # No gradients:
    "negotiation/reducing.py": "factors and averages of integers, for which there is no scale",
    "comm/process_group/reductions.py": "averages of integers, for which there is no scale",
}


def scaling_calls(path: Path) -> list[str]:
    """Return the tensor operations in a file that multiply or divide in place or with ``out``."""
    tree = ast.parse(path.read_text())
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [f.attr for f in calls if isinstance(f, ast.Attribute) and f.attr in SCALING]


def test_nothing_else_scales_a_gradient():
    layers = ("comm", "compress", "negotiation", "collectives", "gradients", "local_sgd", "train")
    files = [path for layer in layers for path in (PACKAGE / layer).rglob("*.py")]
    found = {str(path.relative_to(PACKAGE)) for path in files if scaling_calls(path)}
    assert found == set(ALLOWED)


def test_one_file_decides_the_factor():
    users = [p for p in (PACKAGE / "gradients").glob("*.py") if " SampleCount(" in p.read_text()]
    assert [p.name for p in users] == ["optimizer.py"]
