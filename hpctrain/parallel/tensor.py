"""Tensor and sequence parallelism with torch's styles, selected by the role of each matrix."""

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from hpctrain.core.errors import ConfigError
from hpctrain.parallel.guard import guarded
from hpctrain.parallel.mesh import require_one_axis
from hpctrain.parallel.mesh_agreement import require_identical, signature_of
from hpctrain.parallel.split import names_like, places_of
from hpctrain.parallel.tensor_checks import CheckedSamples, ForwardChecks, require_divided_stream

ROLES = ("column", "row", "vocabulary")


def tensor_parallel(
    model: nn.Module, mesh: DeviceMesh, roles: Mapping[str, str], *, sequence: bool = False
) -> nn.Module:
    """Divide the matrices of a transformer among the ranks of a mesh. Collective over the mesh.

    The first matrices of each block have the role ``column`` (the outputs are divided: heads,
    hidden features), the last matrix the role ``row`` (the inputs are divided). Attention and
    feed-forward layer each need one all-reduce of activations in forward and one in backward. With
    ``sequence``, activations between blocks are divided along the sequence, and each all-reduce
    becomes an all-gather and a reduce-scatter with the same number of bytes.

    Modules without a role are replicated; with ``sequence`` their gradients are summed over the
    ranks. Every parameter becomes a ``DTensor``, which torch's optimizers, ``clip_grad_norm_``,
    ``fully_shard`` and distributed checkpoints support.

    Modules exchange plain tensors ``(n, length, width)``, or ``(n, length / size, width)`` with
    ``sequence``. Code that reshapes to heads must use ``-1`` for the number of heads. All ranks of
    the mesh get the same samples and must have the same random seed, for dropout; with
    ``sequence`` each rank draws random numbers for its part. With ``sequence``, modules that mix
    positions, such as attention, must be between ``column`` and ``row``, where each rank has the
    whole sequence.

    Args:
        model: module with the same structure on all ranks, changed in place; the parameter values
            of rank 0 are used.
        mesh: one axis, such as ``build_mesh(tp=2)["tp"]``.
        roles: role by module name, in which ``*`` matches any text. ``column`` and ``row`` are for
            ``nn.Linear``. ``vocabulary`` divides the rows of the embedding, and the classes of the
            last layer; the output of that layer becomes a ``DTensor``, for
            ``torch.distributed.tensor.parallel.loss_parallel``.
        sequence: whether activations between blocks are divided along dimension 1; requires an
            embedding with the role ``vocabulary``.

    Returns:
        The model.

    Raises:
        ConfigError: a name matches no module, a module has two roles, a role does not match its
            module or has no counterpart, a matrix cannot be divided, or a parameter belongs to no
            layer or is divided already. With ``sequence``: an embedding has no role, or a module
            outside of ``column`` and ``row`` mixes positions. Also raised by forward for tokens
            outside of the vocabulary, and by the first forward for attention to a part of a
            sequence.
        MismatchError: the ranks have different models, roles or ``sequence``; on every rank of the
            mesh. Also raised by the first forward for different samples, and by forward 1, 2, 4, 8
            and so on for different random states.

    Source: Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198.
    """
    require_one_axis(mesh, "tp")
    found = _checked(model, mesh, roles, sequence=sequence)
    shared = [places for places in places_of(model).values() if len(places) > 1]
    _divide(model, found, mesh, sequence=sequence)
    ForwardChecks(mesh, mesh.size() if sequence else 1).watch(model)
    for (first, name), *others in shared:
        for module, other in others:
            module.register_parameter(other, getattr(first, name))
    guarded(model)
    return model


def _checked(
    model: nn.Module, mesh: DeviceMesh, roles: Mapping[str, str], *, sequence: bool
) -> dict[str, tuple[nn.Module, str]]:
    """Check the roles; return module and role by module name. Collective.

    Raises on all ranks or none.
    """
    lines = [f"sequence={sequence}", *(f"{name}: {role}" for name, role in roles.items())]
    remedy = "pass the same arguments on every rank"
    require_identical(mesh, lines, "arguments of tensor_parallel()", remedy)
    require_identical(mesh, signature_of(model), "the model of tensor parallel ranks")
    found = _modules_of(model, roles)
    for name, (module, role) in found.items():
        _check(name, module, role, mesh.size())
        _check_counterpart(name, role, found)
    if sequence:
        require_divided_stream(model, found)
    return found


def _divide(
    model: nn.Module,
    found: Mapping[str, tuple[nn.Module, str]],
    mesh: DeviceMesh,
    *,
    sequence: bool,
) -> None:
    """Convert parameters to ``DTensor``, and add hooks that convert inputs and outputs."""
    stream: Placement = Shard(1) if sequence else Replicate()
    inputs: dict[nn.Module, _SharedInput] = {}
    for name, (module, role) in found.items():
        if role == "column":
            parent = model.get_submodule(name.rpartition(".")[0])
            if parent not in inputs:
                inputs[parent] = _SharedInput(mesh, stream)
                parent.register_forward_hook(inputs[parent].forget, always_call=True)
            module.register_forward_pre_hook(inputs[parent].whole)
        if isinstance(module, nn.Embedding):
            module.register_forward_pre_hook(
                CheckedSamples(mesh, name, module.num_embeddings, sequence=sequence).check
            )
        parallelize_module(module, mesh, _style(module, role, stream))
    for module in model.modules():
        if not any(module is other for other, _ in found.values()):
            _replicate(module, mesh, stream)
    for parameter in model.parameters():
        placements, trains = cast("DTensor", parameter).placements, parameter.requires_grad
        parameter.requires_grad = True  # a frozen parameter may be trained later
        parameter.register_hook(partial(_placed, placements=placements))
        parameter.requires_grad = trains


def _modules_of(model: nn.Module, roles: Mapping[str, str]) -> dict[str, tuple[nn.Module, str]]:
    """Return, by name, the modules that the patterns in ``roles`` match, each with its role."""
    modules = dict(model.named_modules())
    found: dict[str, tuple[nn.Module, str]] = {}
    for pattern, role in roles.items():
        if role not in ROLES:
            raise ConfigError(
                f"the role of a module must be one of {', '.join(ROLES)}, got {role!r} "
                f"for {pattern}"
            )
        for name in names_like(pattern, modules):
            if found.get(name, (None, role))[1] != role:
                raise ConfigError(
                    f"a module must have one role, got {found[name][1]} and {role} for "
                    f"{name}; change the patterns so that only one matches the module"
                )
            found[name] = modules[name], role
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ConfigError(
                "tensor_parallel() must get an undivided model, before shard() and "
                f"fully_shard(), but {name} is already divided; call tensor_parallel() once, "
                "before the other functions"
            )
    for name, module in modules.items():
        own = [key for key, one in module.named_parameters(name, recurse=False) if one is not None]
        if own and name not in found and any(True for _ in module.children()):
            raise ConfigError(
                f"tensor parallel parameters must belong to modules without submodules, "
                f"but a module with submodules has {', '.join(own)}; move these parameters into a "
                f"separate module"
            )
    return found


def _check(name: str, module: nn.Module, role: str, size: int) -> None:
    """Raise ``ConfigError`` if the matrix of ``module`` cannot be divided among ``size`` ranks."""
    divided = 0
    if isinstance(module, nn.Linear):
        divided = module.in_features if role == "row" else module.out_features
    elif isinstance(module, nn.Embedding) and role == "vocabulary":
        divided = module.num_embeddings
    else:
        raise ConfigError(
            f"column and row must be roles of nn.Linear, and vocabulary of nn.Linear or "
            f"nn.Embedding, got {role} for {name}, a {type(module).__name__}; omit the "
            f"role to replicate the module"
        )
    if divided % size:
        whose = "inputs" if role == "row" else "rows" if role == "vocabulary" else "outputs"
        raise ConfigError(
            f"the {divided} {whose} of {name} must be divisible by the {size} tensor "
            f"parallel ranks; use fewer ranks, or a multiple of {size}"
        )


def _check_counterpart(name: str, role: str, found: Mapping[str, tuple[nn.Module, str]]) -> None:
    """Raise ``ConfigError`` if the block of a ``column`` has no ``row``, or the reverse."""
    other = {"column": "row", "row": "column"}.get(role)
    around = name
    while other and around:
        inside, around = around, around.rpartition(".")[0]
        begin = f"{around}." * bool(around)
        near = [one for one, (_, its) in found.items() if its == other and one.startswith(begin)]
        for one in near:
            child = begin + one.removeprefix(begin).partition(".")[0]
            has_its_own = any(
                its == role and each.startswith(f"{child}.") for each, (_, its) in found.items()
            )
            if child in (one, inside) or not has_its_own:
                return
        if near:
            break
    if other:
        raise ConfigError(
            f"a block must have both roles, column and row, got {role} for {name} without "
            f"a {other}; assign {other} to the {'last' if role == 'column' else 'first'} "
            f"nn.Linear of the block, or remove {role}"
        )


def _style(module: nn.Module, role: str, stream: Placement) -> ParallelStyle:
    if role == "column":
        return ColwiseParallel()
    if role == "row":
        return RowwiseParallel(output_layouts=stream)
    if isinstance(module, nn.Embedding):
        return RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
    return ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False)


class _SharedInput:
    """Gathers an input once for all ``column`` matrices of a module that get the same input."""

    def __init__(self, mesh: DeviceMesh, placement: Placement) -> None:
        self._mesh, self._placement = mesh, placement
        self._given: Tensor | None = None
        self._whole: Tensor | None = None

    def whole(self, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replace the first input by the gathered tensor; called before forward."""
        given, *others = inputs
        if self._given is not given:
            as_shard = DTensor.from_local(given, self._mesh, [self._placement], run_check=False)
            self._given, self._whole = given, as_shard.redistribute(placements=[Replicate()])
        return (self._whole, *others)

    def forget(self, *_: object) -> None:
        """Release the input and the gathered tensor, after forward of the parent module."""
        self._given = self._whole = None


def _replicate(module: nn.Module, mesh: DeviceMesh, stream: Placement) -> None:
    """Replicate the parameters of a module that processes each position separately."""
    if not any(True for _ in module.parameters(recurse=False)):
        return

    distribute_module(module, mesh)
    module.register_forward_pre_hook(
        lambda _, inputs: DTensor.from_local(inputs[0], mesh, [stream], run_check=False)
    )
    module.register_forward_hook(lambda _, __, output: output.to_local())


def _placed(gradient: DTensor, *, placements: tuple[Placement, ...]) -> DTensor:
    """Return a gradient with the ``placements`` of its parameter; sum over ranks if necessary."""
    return gradient.redistribute(placements=placements)
