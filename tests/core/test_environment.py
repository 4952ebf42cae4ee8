"""Check that only the modules of settings and launchers read environment variables."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import hpctrain

ROOT = Path(hpctrain.__file__).parent

TABLES = {"core/config.py", "core/horovod_variables.py", "cluster/env.py"}
"""They read variables by name."""

WITHOUT_TABLES = {
    "horovod/shim/sitecustomize.py": "starts before hpctrain can be imported",
    "guide/html/pages.py": "is no part of the wheel",
    "comm/node/kernel_build.py": "builds the package, and needs nothing of it",
    "doctor/checks/gpu_network.py": "judges variables of NCCL and MPI that hpctrain does not use",
    "doctor/host/gather_gpu_network.py": "as doctor/checks/gpu_network.py",
}

OF_SCRIPTS = "launch/slurm/lint/"
"""Variables of a batch script are no variables of this process."""

KNOWN = re.compile(
    r"(HPCTRAIN|HOROVOD|SLURM|SRUN|OMPI|PMIX?|PALS|PBS|LSB|MPI4PY|NCCL|OMP|MASTER|WORLD|TORCHELASTIC)"
    r"_?[A-Za-z_]*"
)


def reads(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield reads of ``os.environ``, except defaults of arguments and complete copies."""
    free: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            free |= {id(each) for each in [*node.args.defaults, *node.args.kw_defaults]}
        elif isinstance(node, ast.Dict):  # {**os.environ, ...}
            free |= {id(v) for k, v in zip(node.keys, node.values, strict=True) if k is None}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("dict", "sorted"):
            free |= {id(each) for each in node.args}
        elif isinstance(node, ast.Set):  # {*os.environ}
            free |= {id(each.value) for each in node.elts if isinstance(each, ast.Starred)}
        elif (
            isinstance(node, ast.comprehension) and ast.unparse(node.iter) == "os.environ.items()"
        ):
            free.add(id(node.iter.func.value))  # a filtered copy
    for node in ast.walk(tree):
        text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        if text in ("os.environ", "os.getenv", "os.environb") and id(node) not in free:
            yield node


def lookups(tree: ast.Module) -> Iterator[str]:
    """Yield names of known variables that are looked up in any mapping."""
    names = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        key: ast.expr | None = None
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("environ.get"):
            key = node.args[0]
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            key = node.slice if "environ" in ast.unparse(node.value) else None
        elif isinstance(node, ast.Compare) and type(node.ops[0]).__name__.endswith("In"):
            key = node.left if "environ" in ast.unparse(node.comparators[0]) else None
        name = names.get(key.id) if isinstance(key, ast.Name) else getattr(key, "value", None)
        if isinstance(name, str) and KNOWN.fullmatch(name):
            yield name


def test_no_other_module_reads_a_variable():
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        file = str(path.relative_to(ROOT))
        if file in TABLES | WITHOUT_TABLES.keys():
            continue
        text = path.read_text(encoding="utf-8")
        if "environ" not in text and "getenv" not in text:
            continue  # neither ``reads`` nor ``lookups`` finds anything
        tree = ast.parse(text)
        seen = [f"line {node.lineno}: {ast.unparse(node)}" for node in reads(tree)]
        if not file.startswith(OF_SCRIPTS):
            seen += lookups(tree)
        if seen:
            found[file] = seen
    assert found == {}


def test_a_read_is_noticed():
    for text in (
        'x = os.environ["A"]',
        'x = os.getenv("A")',
        'x = "A" in os.environ',
        "f(os.environ)",
        "os.environ.update(a=1)",
    ):
        assert list(reads(ast.parse(text))), text
    for text in ("def f(environ=os.environ): ...", "x = {**os.environ}", "x = dict(os.environ)"):
        assert not list(reads(ast.parse(text))), text
    for text in (
        'environ.get("SLURM_JOB_ID")',
        'A = "OMPI_MCA_btl"\nenviron.get(A)',
        'facts.environ["HPCTRAIN_ENGINE"]',
        '"MASTER_ADDR" in environ',
    ):
        assert list(lookups(ast.parse(text))), text
