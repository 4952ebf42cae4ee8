"""Every rank has a GPU of its own."""

from collections import Counter
from collections.abc import Mapping, Sequence

from hpctrain.cluster.env import launched
from hpctrain.core.finding import Finding
from hpctrain.core.units import format_ranks
from hpctrain.doctor.checks.check import check, error, few, note, ok, plural, warning
from hpctrain.doctor.checks.facts import Facts, WorldFacts
from hpctrain.doctor.checks.job import ranks_per_node

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_VARIABLES = (_VISIBLE, "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""Where launchers say which GPUs a rank may use."""
_OF_JOB = ("SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS")


@check("GPUs")
def check_gpus(facts: Facts) -> list[Finding]:
    """Name a device given twice, more ranks than devices, and a torch that cannot use them."""
    found = [*_given_twice(facts), *_too_few(facts), *_unused(facts)]
    text = f"{facts.num_gpus} in this machine"
    if _VISIBLE in facts.environ:
        text += f", {_VISIBLE}={facts.environ[_VISIBLE]}"
    return found or [ok(text)]


@check("GPUs")
def check_own_gpus(world: WorldFacts) -> list[Finding]:
    """Compare what the ranks of each node take: the one they see, or that of their local rank."""
    ranks = world.ranks
    if not any(facts.visible for facts in ranks):
        return [ok("no rank sees a GPU: the CPU calculates")]
    found = []
    for members, host in zip(world.topology.nodes, world.topology.hosts, strict=True):
        takers: dict[str, list[int]] = {}
        for number, rank in enumerate(members):
            if seen := ranks[rank].visible:
                takers.setdefault(seen[number % len(seen)], []).append(rank)
        found += [
            _shared(device, sharing, host, ranks)
            for device, sharing in takers.items()
            if len(sharing) > 1
        ]
        blind = [rank for rank in members if not ranks[rank].visible]
        if 0 < len(blind) < len(members):
            what = f"{format_ranks(blind)} on {host} see no GPU, the other ranks there do"
            found.append(warning(what, "ask for a GPU for every rank: srun --gpus-per-task=1"))
    if found:
        return few(found)
    counts = sorted(len(facts.visible) for facts in ranks)
    seen_by = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    if not any(facts.by_torch for facts in ranks):
        return [
            note(f"the environment gives {seen_by} GPUs to each rank, and torch sees none of them")
        ]
    return [ok(f"each rank has a GPU of its own among the {seen_by} it sees")]


def named(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs that the environment gives to a process.

    Their names mean the same to all of a host only where no container numbers the GPUs anew.
    """
    return _words(next((environ[name] for name in _VARIABLES if environ.get(name)), ""))


def num_of_job(environ: Mapping[str, str]) -> int | None:
    """Return how many GPUs the job has on this node; None where it does not say."""
    for name in _OF_JOB:
        words = environ.get(name, "").split(",")
        if name.endswith("ON_NODE") and words[0].isdigit():
            return int(words[0])
        if words[0]:
            return len(words)
    return None


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _given_twice(facts: Facts) -> list[Finding]:
    devices = _words(facts.environ.get(_VISIBLE, ""))
    twice = [name for name, count in Counter(devices).items() if count > 1]
    if not twice:
        return []
    what = (
        f"{_VISIBLE}={facts.environ[_VISIBLE]} names device {twice[0]} twice: two ranks would "
        "take the same GPU"
    )
    return [error(what, f"export {_VISIBLE}={','.join(dict.fromkeys(devices))}")]


def _too_few(facts: Facts) -> list[Finding]:
    """Compare tasks with devices before a launch; afterwards the ranks compare their own."""
    environ = facts.environ
    ranks = ranks_per_node(environ)
    devices = num_of_job(environ)
    if devices is None and _VISIBLE in environ:
        devices = len(set(_words(environ[_VISIBLE])))
    if not ranks or not devices or launched(environ) is not None or ranks == devices:
        return []
    as_many = f"#SBATCH --ntasks-per-node={devices}"
    if ranks < devices:
        return [
            note(f"{devices} GPUs on this node for {plural(ranks, 'task')}: some idle", as_many)
        ]
    what = f"{ranks} tasks on this node share {plural(devices, 'GPU')}: some devices get two ranks"
    return [warning(what, f"{as_many}, or as many --gpus-per-node as tasks")]


def _unused(facts: Facts) -> list[Finding]:
    torch = facts.versions.get("torch") or ""
    if facts.num_gpus and torch.endswith("+cpu"):
        what = f"{facts.num_gpus} GPUs are here, and torch {torch} cannot use them"
        do = "install the build of torch for CUDA: https://pytorch.org/get-started/locally"
        return [warning(what, do)]
    if facts.num_gpus and facts.environ.get(_VISIBLE) in ("", "-1"):
        what = f"{_VISIBLE} hides all {facts.num_gpus} GPUs of this machine"
        return [note(what, f"unset {_VISIBLE}")]
    return []


def _shared(device: str, members: Sequence[int], host: str, ranks: Sequence[Facts]) -> Finding:
    certain = all(ranks[rank].by_torch for rank in members)
    source = "" if certain else ", as the environment numbers them"
    what = f"{format_ranks(members)} on {host} take the same GPU {device}{source}"
    do = (
        "give each rank its own: srun --gpus-per-task=1, or start as many ranks on a node as "
        "there are GPUs and set the same CUDA_VISIBLE_DEVICES for all of them"
    )
    return error(what, do) if certain else warning(what, do)
