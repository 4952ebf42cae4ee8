"""Check of GPUs: every rank has one of its own."""

from collections import Counter
from collections.abc import Mapping

from hpctrain.cluster.env import launched
from hpctrain.core.finding import Finding
from hpctrain.doctor.host.facts import Facts
from hpctrain.doctor.host.job import ranks_per_node

CHECK = "GPUs"

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_OF_JOB = ("SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS")


def check(facts: Facts) -> list[Finding]:
    """Name a device given twice, more ranks than devices, and a torch that cannot use them."""
    found = [*_given_twice(facts), *_too_few(facts), *_unused(facts)]
    text = f"{facts.num_gpus} in this machine"
    if _VISIBLE in facts.environ:
        text += f", {_VISIBLE}={facts.environ[_VISIBLE]}"
    return found or [Finding(CHECK, "ok", text)]


def num_of_job(environ: Mapping[str, str]) -> int | None:
    """Return how many GPUs the job has on this node; None where it does not say."""
    for name in _OF_JOB:
        words = environ.get(name, "").split(",")
        if name.endswith("ON_NODE") and words[0].isdigit():
            return int(words[0])
        if words[0]:
            return len(words)
    return None


def _given_twice(facts: Facts) -> list[Finding]:
    devices = _visible(facts.environ)
    twice = [name for name, count in Counter(devices).items() if count > 1]
    if not twice:
        return []
    return [
        Finding(
            CHECK,
            "error",
            f"{_VISIBLE}={facts.environ[_VISIBLE]} names device {twice[0]} twice: two ranks "
            "would take the same GPU",
            f"export {_VISIBLE}={','.join(dict.fromkeys(devices))}",
        )
    ]


def _too_few(facts: Facts) -> list[Finding]:
    """Compare tasks with devices before a launch; afterwards the ranks compare their own."""
    environ = facts.environ
    ranks = ranks_per_node(environ)
    devices = num_of_job(environ)
    if devices is None and _VISIBLE in environ:
        devices = len(set(_visible(environ)))
    if not ranks or not devices or launched(environ) is not None:
        return []
    if ranks > devices:
        return [
            Finding(
                CHECK,
                "warning",
                f"{ranks} tasks on this node share {devices} GPU{'s' * (devices != 1)}: some "
                "devices get two ranks",
                f"#SBATCH --ntasks-per-node={devices}, or as many --gpus-per-node as tasks",
            )
        ]
    if ranks < devices:
        what = f"{devices} GPUs on this node for {ranks} task{'s' * (ranks != 1)}: some idle"
        return [Finding(CHECK, "note", what, f"#SBATCH --ntasks-per-node={devices}")]
    return []


def _unused(facts: Facts) -> list[Finding]:
    torch = facts.versions.get("torch") or ""
    if facts.num_gpus and torch.endswith("+cpu"):
        what = f"{facts.num_gpus} GPUs are here, and torch {torch} cannot use them"
        do = "install the build of torch for CUDA: https://pytorch.org/get-started/locally"
        return [Finding(CHECK, "warning", what, do)]
    if facts.num_gpus and facts.environ.get(_VISIBLE) in ("", "-1"):
        what = f"{_VISIBLE} hides all {facts.num_gpus} GPUs of this machine"
        return [Finding(CHECK, "note", what, f"unset {_VISIBLE}")]
    return []


def _visible(environ: Mapping[str, str]) -> list[str]:
    return [word.strip() for word in environ.get(_VISIBLE, "").split(",") if word.strip()]
