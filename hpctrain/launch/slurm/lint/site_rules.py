"""Checks of a batch script by the profile of its site."""

from collections.abc import Iterator

from hpctrain.launch.site import SiteNode, SiteProfile
from hpctrain.launch.slurm.lint.script import BatchScript, Fault
from hpctrain.launch.slurm.lint.task_numbers import gpus_per_node, tasks_per_node


def charge(script: BatchScript) -> Iterator[Fault]:
    """Find a job without an account."""
    site, given = _site(script), _given(script, "account")
    example = site.job.account or site.job.account_form
    if example and not given:
        what = f"jobs on {site.label} must name an account such as {example}"
        yield "warning", f"{what}, but --account is missing", f"#SBATCH --account={example}"


def queue(script: BatchScript) -> Iterator[Fault]:
    """Find a job without the partition and the options of the site."""
    site = _site(script)
    if site.job.partition and not _given(script, "partition"):
        what = f"jobs on {site.label} must name a partition, but --partition is missing"
        yield "warning", what, f"#SBATCH --partition={site.job.partition}"
    for option in site.job.options:
        name = option.removeprefix("--").partition("=")[0]
        if not _given(script, name):
            what = f"jobs on {site.label} must have {option}, but --{name} is missing"
            yield "warning", what, f"#SBATCH {option}"


def node(script: BatchScript) -> Iterator[Fault]:
    """Find requests that exceed a node of the site, and jobs that leave GPUs of a node unused."""
    site, shape = _site(script), _node(script)
    tasks, gpus = tasks_per_node(script) or 1, gpus_per_node(script)
    cpus, mem = script.number("cpus-per-task"), script.options.get("mem")
    for fault in shape.excess(tasks, cpus=cpus, gpus=gpus, mem=mem):
        do = "request less, or more nodes"
        yield "error", f"{fault}, by the profile of {site.label}", do
    if gpus and gpus < shape.gpus:
        what = f"a node of {site.label} has {shape.gpus} GPUs, but the job requests {gpus} of them"
        yield "note", what, f"#SBATCH --gpus-per-node={shape.gpus} --ntasks-per-node={shape.gpus}"


def step_options(script: BatchScript) -> Iterator[Fault]:
    """Find steps that lack srun options of the site, or a binding to the cores near the GPU."""
    site, shape = _site(script), _node(script)
    is_per_gpu = tasks_per_node(script) == gpus_per_node(script) == len(shape.gpu_cores)
    for step in script.rank_steps:
        for option in site.job.srun:
            name = option.removeprefix("--").partition("=")[0]
            if step.is_complete and name not in step.options:
                what = f"line {step.line}: srun on {site.label} must have {option}, but lacks it"
                yield "warning", what, f"srun {option} ..."
        is_near = step.option("cpu-bind", "SLURM_CPU_BIND") not in (None, "cores", "threads")
        is_near |= step.options.get("gpu-bind") == "closest" or step.does_own_launching
        if is_per_gpu and shape.gpu_cores and not is_near:
            what = f"line {step.line}: srun must bind each rank to the cores next to its GPU"
            yield (
                "note",
                f"{what}, but has no mask of cores",
                f"srun --cpu-bind={shape.cpu_mask()}",
            )


def environment(script: BatchScript) -> Iterator[Fault]:
    """Find modules and variables of the site that a job lacks; sourced files may set them."""
    site = _site(script)
    if script.has_unread_sources:
        return
    words = {
        w.partition("/")[0] for c in script.commands if c.name in ("module", "ml") for w in c.words
    }
    modules = [name for name in site.job.modules if name.partition("/")[0] not in words]
    variables = [name for name in site.job.variables if name not in script.environ]
    if modules:
        what = f"{site.label} documents modules that the job does not load: {', '.join(modules)}"
        yield "note", what, f"module load {' '.join(modules)}"
    if variables:
        what = f"{site.label} documents variables that are not set: {', '.join(variables)}"
        yield "note", what, f'export {variables[0]}="{site.job.variables[variables[0]]}"'


def _site(script: BatchScript) -> SiteProfile:
    """Return the profile of the site; an unknown site has an empty profile without rules."""
    return script.facts.site or SiteProfile()


def _given(script: BatchScript, name: str) -> str:
    """Return an option of sbatch, from the script or SBATCH_NAME; empty if neither is set."""
    variable = f"SBATCH_{name.replace('-', '_').upper()}"
    return script.options.get(name, "") or script.facts.environ.get(variable, "")


def _node(script: BatchScript) -> SiteNode:
    """Return the node of the site; empty if the job uses nodes of another kind."""
    constraint = _given(script, "constraint")
    options = [f"--constraint={constraint}"] if constraint else []
    return _site(script).node_of(_given(script, "partition") or None, options)


RULES = {
    "account": charge,
    "partition": queue,
    "node of the site": node,
    "srun on the site": step_options,
    "environment of the site": environment,
}
"""Checks of this module, by the names of their findings."""
