"""Draw random training scripts from a table of statements."""

import random
from dataclasses import dataclass

PRELUDE = '''
import copy
import os

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

DEVICE = os.environ.get("TEST_DEVICE", "cpu")


class Model(nn.Module):
    def __init__(self, *, sparse=False, tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(9, 4, sparse=sparse)
        self.trunk, self.lone = nn.Linear(4, 5), nn.Linear(4, 2)
        self.left, self.right, self.late = (nn.Linear(5, 3) for _ in range(3))
        if tied:
            self.right.weight = self.left.weight
        self.to(DEVICE, torch.float64)

    def hidden(self, x):
        return torch.tanh(self.trunk(x))


def loss_of(model, parts, number):
    """Return the loss of some parts of the model on this rank's batch of that number."""
    source = torch.Generator().manual_seed(100 * number + hvd.rank())
    x = torch.rand(4, 4, generator=source, dtype=torch.float64).mul(2).sub(1)
    x = x.to(DEVICE, model.trunk.weight.dtype)
    ids = torch.randint(9, (4, 3), generator=source).to(DEVICE)
    hidden = model.hidden(x)
    outputs = {
        "left": lambda: model.left(hidden),
        "right": lambda: model.right(hidden),
        "late": lambda: model.late(hidden),
        "lone": lambda: model.lone(x),
        "embed": lambda: model.left(model.hidden(model.embed(ids).mean(1))),
        "checkpointed": lambda: model.left(checkpoint(model.hidden, x, use_reentrant=False)),
        "reentrant": lambda: model.right(
            checkpoint(model.hidden, x.requires_grad_(), use_reentrant=True)
        ),
    }
    return sum((outputs[part]() - 0.5).square().mean() for part in parts.split())


def params_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]

'''


@dataclass(frozen=True)
class Statement:
    """Hold a line of the script, and its meaning for replicas; see ``Oracle``."""

    line: str
    kind: str = "each"
    target: str = "opt"
    meaning: tuple[tuple[str, str], ...] = ()
    """Lines and kinds that mean the same, where the line itself is no such thing."""


@dataclass(frozen=True)
class Program:
    """Hold a script and the settings of its run."""

    size: int
    per_node: int | None
    overlap: str
    statements: tuple[Statement, ...]

    @property
    def nodes(self):
        step = self.per_node or self.size
        return [list(range(self.size))[i : i + step] for i in range(0, self.size, step)]

    def says(self, *words):
        """Return True if one of the words occurs in a statement."""
        return any(word in statement.line for statement in self.statements for word in words)

    @property
    def settings(self):
        return {"HPCTRAIN_OVERLAP": self.overlap, "HPCTRAIN_BUCKET_BYTES": "128 B"}

    def script(self, note=""):
        """Return the program as a standalone script for ``hpctrain launch``."""
        comment = "".join(f"# {line}\n" for line in note.splitlines())
        lines = "\n".join(statement.line for statement in self.statements)
        return (
            f"# hpctrain launch -n {self.size} -- python THIS\n{comment}\nimport os\n\n"
            f"os.environ |= {self.settings}\n{PRELUDE}\nimport hpctrain as hvd\n\n"
            f"hvd.init(ranks_per_node={self.per_node})\n{lines}\n"
            "for name, p in model.named_parameters():\n"
            "    print(f'rank {hvd.rank()} {name} {p.double().sum().item():.12f}', flush=True)\n"
        )


# Table of statements

FREE, PASS, AFTER, LOCAL = "free", "pass", "after", "local"
"""Between steps; between two passes; between backward and step; around a local method."""

ANY = (FREE, PASS, AFTER)
GIVEN = "if model.{p}.grad is not None:\n    "
EDITS = (
    # weight, places, line
    (3, ANY, "model.{p}.grad = None"),
    (2, (FREE, AFTER), "model.{p}.grad = torch.full_like(model.{p}, 0.1 * {number})"),
    (1, (FREE, AFTER), "model.{p}.grad = torch.full_like(model.{p}, 0.1 * hvd.rank())"),
    (1, (AFTER,), "for p in params_of(opt):\n    p.grad = torch.full_like(p, 0.1 * hvd.rank())"),
    (
        1,
        (AFTER,),
        "model.zero_grad()\nfor p in params_of(opt):\n    p.grad = torch.full_like(p, {number})",
    ),
    (2, ANY, GIVEN + "model.{p}.grad = model.{p}.grad * 0.5"),
    (3, (AFTER,), GIVEN + "model.{p}.grad.data = model.{p}.grad.data.clamp(-0.02, 0.02)"),
    (2, ANY, GIVEN + "model.{p}.grad.mul_(0.5)"),
    (2, (AFTER,), "nn.utils.clip_grad_norm_(model.{layer}.parameters(), 0.01)"),
    (2, (AFTER,), "nn.utils.clip_grad_value_(model.{layer}.parameters(), 0.01)"),
    (1, (AFTER,), "nn.utils.clip_grad_norm_([p for p in params_of(opt) if p.dim() == 1], 0.01)"),
    (4, (*ANY, LOCAL), "model.{layer}.requires_grad_(False)"),
    (4, (*ANY, LOCAL), "model.requires_grad_(True)"),
    (2, (*ANY, LOCAL), "model.{p}.requires_grad_(not model.{p}.requires_grad)"),
    (2, (FREE, AFTER), "model.float()"),
    (2, (FREE, AFTER), "model.double()"),
    (1, (FREE,), "if not model.embed.sparse:\n    model.half()"),
    (2, (FREE, AFTER), "if not model.embed.sparse:\n    model.share_memory()"),
    (1, (FREE,), "torch.__future__.set_swap_module_params_on_conversion(True)"),
    (2, (FREE, LOCAL), "with torch.no_grad():\n    model.{p}.mul_(0.9)"),
    (1, (FREE, AFTER), "opt.load_state_dict(opt.state_dict())"),
    (1, (FREE,), "model.load_state_dict(copy.deepcopy(model.state_dict()))"),
    (1, (FREE, AFTER), "model.zero_grad(set_to_none={flag})"),
    (1, (FREE,), "opt.set_backward_passes_per_step({few})"),
    (2, (FREE, AFTER), "opt.add_param_group({{'params': list(model.late.parameters())}})"),
    (2, ANY, "torch.autograd.grad(loss_of(model, '{parts}', {number}), model.{layer}.weight)"),
    (1, ANY, "for group in opt.param_groups:\n    group['lr'] *= 0.9"),
    (1, ANY, "copied = copy.deepcopy(model)"),
    (2, (LOCAL,), "with method.averaged():\n    pass"),
)
"""Meaning of all: each replica does so."""

LOSS = "loss_of(model, '{parts}', {number})"
BACKWARDS = (
    (30, (LOSS + ".backward()",)),
    (
        6,
        (
            "loss_of(model, '{left}', {number}).backward()",
            "loss_of(model, '{right}', {number}).backward()",
        ),
    ),
    (4, ("loss = " + LOSS, "loss.backward(retain_graph=True)", "loss.backward()")),
    (3, (LOSS + ".backward(inputs=list(model.{layer}.parameters()))",)),
    (3, ("torch.autograd.backward([loss_of(model, '{left}', {number}), " + LOSS + "])",)),
    (
        2,
        (
            "loss = " + LOSS,
            "slope = torch.autograd.grad(loss, model.trunk.weight, create_graph=True)[0]",
            "(loss + slope.square().sum()).backward()",
        ),
    ),
)
PARTS = ("left", "right", "lone", "embed", "checkpointed")
DISJOINT = {"opt": ("trunk", "left"), "other": ("right", "lone", "embed")}
LAYERS = ("trunk", "left", "right", "lone", "embed")
OPTIMIZERS = (
    "torch.optim.SGD({of}, lr=0.1)",
    "torch.optim.SGD({of}, lr=0.1, momentum=0.9)",
    "torch.optim.SGD({of}, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)",
    "torch.optim.AdamW({of}, lr=0.02)",
    "torch.optim.Adagrad({of}, lr=0.05)",
)


class Draw:
    """Hold the random state of one program."""

    def __init__(self, seed, size, *, sharded=False):
        self.luck = random.Random(f"{seed} of {size}")
        self.size, self.number, self.sharded = size, 0, sharded
        self.parts = list(PARTS)

    def chance(self, share):
        return self.luck.random() < share

    def weighted(self, rows):
        return self.luck.choices(rows, [row[0] for row in rows])[0]

    def fill(self, template):
        """Fill parts, parameters and numbers into a line."""
        luck = self.luck
        self.number += 1
        layer = luck.choice(LAYERS[:4])
        parts = luck.sample(self.parts, luck.randint(1, 4))
        left, right = luck.choice((("left", "right"), ("left", "lone"), ("lone", "right embed")))
        return template.format(
            parts=" ".join(parts),
            left=left,
            right=right,
            layer=layer,
            p=f"{layer}.{luck.choice(('weight', 'bias'))}",
            number=self.number,
            few=luck.randint(1, 3),
            flag=luck.choice((True, False)),
        )

    def edits(self, place, most):
        rows = [row for row in EDITS if place in row[1]]
        lines = [self.weighted(rows)[2] for _ in range(self.luck.randint(0, most))]
        return [Statement(self.fill(line)) for line in lines]

    def backward(self, wrapper="{}"):
        lines = [self.fill(line) for line in self.weighted(BACKWARDS)[1]]
        if wrapper != "{}":
            lines = [wrapper.format(self.fill(LOSS)) + ".backward()"]
        return [Statement(line, "backward" if "backward(" in line else "each") for line in lines]


class Script:
    """Draw a script with one or two ``DistributedOptimizer``."""

    def __init__(self, draw):
        self.draw, luck = draw, draw.luck
        may_combine = draw.size == 2 and not draw.sharded
        ops = ["Average"] * 6 + ["Sum"] * 3 + ["Adasum"] * may_combine
        self.op = luck.choice(ops)
        self.passes = luck.choice((1, 1, 1, 2, 3))
        self.shape = luck.choice(("one",) * 6 + ("disjoint", "disjoint", "twice"))
        self.passes = 1 if self.shape == "twice" else self.passes
        self.scaled = self.op != "Adasum" and draw.chance(0.2)
        self.weighted = self.op == "Average" and draw.chance(0.2)
        self.optimizers = ["opt"] if self.shape == "one" else ["opt", "other"]
        sparse = draw.chance(0.25) and not draw.sharded
        tied = self.shape == "one" and draw.chance(0.2)
        self.model = f"model = Model(sparse={sparse}, tied={tied})"
        self.sparse = sparse
        if draw.chance(0.15):
            draw.parts.append("late")
        if draw.chance(0.1):
            draw.parts.append("reentrant")

    def statements(self):
        draw, found = self.draw, [Statement(self.model), *self.wraps()]
        if self.scaled:
            found.append(Statement("scaler = torch.amp.GradScaler(DEVICE, init_scale=8.0)"))
        for _ in range(draw.luck.randint(2, 5)):
            found += self.round()
        if self.op != "Adasum" and self.shape == "one" and draw.chance(0.1):
            found.append(JOIN)
        return found

    def wraps(self):
        luck, options = self.draw.luck, [f"op=hvd.{self.op}"]
        if self.passes > 1:
            options.append(f"backward_passes_per_step={self.passes}")
        if self.op == "Average" and luck.random() < 0.15:
            options.append("gradient_predivide_factor=2.0")
        if self.sparse and luck.random() < 0.3:
            options.append("sparse_as_dense=True")
        if luck.random() < 0.1:
            options.append(f"groups={luck.randint(1, 3)}")
        if self.draw.sharded:
            options.append("shard='node'")
        elif luck.random() < 0.05:
            options.append(f"compression=hvd.Compression.{luck.choice(('fp16', 'bf16'))}")
        own = "[p for n, p in model.named_parameters() if 'late' not in n]"
        of = {"opt": own, "other": own}
        if self.shape == "disjoint":
            for name, layers in DISJOINT.items():
                of[name] = f"[{', '.join(f'*model.{layer}.parameters()' for layer in layers)}]"
        for name in self.optimizers:
            plain = luck.choice(OPTIMIZERS[:1] if self.sparse else OPTIMIZERS)
            made = plain.format(of=of[name])
            line = f"{name} = hvd.DistributedOptimizer({made}, {', '.join(options)})"
            yield Statement(line, "each", name)

    def round(self):
        draw, luck = self.draw, self.draw.luck
        found = draw.edits(FREE, 2) if draw.chance(0.5) else []
        if any("set_backward_passes" in edit.line for edit in found):
            self.passes = 0  # no longer known
        is_new = False
        if draw.chance(0.9):
            zero = luck.choice(
                ("{}.zero_grad()", "{}.zero_grad()", "{}.zero_grad(set_to_none=False)")
            )
            names = ["model"] if draw.chance(0.35) else self.optimizers
            is_new = names != ["model"]  # an optimizer that zeroes gradients begins a step
            found += [Statement(zero.format(name)) for name in names]
        if self.weighted:
            line = "{}.set_num_samples({} + hvd.rank())"
            number = luck.randint(1, 4)
            found += [Statement(line.format(name, number)) for name in self.optimizers]
        # A rank that has skipped its first backward cannot know the gradients of reentrant ones.
        may_skip = is_new and "reentrant" not in draw.parts
        if self.shape == "one" and draw.chance(0.15) and may_skip:
            return [*found, *self.skipping()]
        if self.shape == "one" and not self.scaled and draw.chance(0.08):
            return [*found, self.closure()]
        passes = max(self.passes, 1) + luck.choice((0,) * 8 + (1, -1))
        wrapper = self.wrapper()
        for number in range(max(passes, 1)):
            found += draw.edits(PASS, 1) if number and draw.chance(0.3) else []
            found += draw.backward(wrapper)
        found += draw.edits(AFTER, 2) if draw.chance(0.5) else []
        found += draw.backward(wrapper) if draw.chance(0.08) else []
        if self.op == "Adasum" and draw.chance(0.2):
            found.append(Statement(FORGETTING))
        return [*found, *self.step()]

    def wrapper(self):
        if not self.scaled:
            return "{}"
        if self.draw.chance(0.3):
            return "scaler.scale({} * (float('inf') if hvd.rank() == 1 else 1.0))"
        return "scaler.scale({})"

    def skipping(self):
        """Let one rank skip backward in a step in which nothing has been reduced yet."""
        line = f"if hvd.rank() != 1:\n    {self.draw.fill(LOSS)}.backward()"
        backward = Statement(line, "partial")
        if self.draw.chance(0.5):
            clip = Statement("nn.utils.clip_grad_value_(params_of(opt), 0.01)")
            if self.op != "Adasum" and not self.sparse:
                either = f"{line}\nelse:\n    opt.synchronize()"
                meaning = ((line, "partial"), ("pass", "sync"))
                if self.passes == 1:
                    return (
                        Statement(either, "partial", meaning=meaning),
                        clip,
                        Statement("opt.step()", "step"),
                    )
        return (backward, Statement("opt.step()", "step"))

    def closure(self):
        """Let step() call forward and backward."""
        loss = self.draw.fill(LOSS)
        body = ("opt.zero_grad()", f"loss = {loss}", "loss.backward()", "return loss")
        line = "\n    ".join(("def closure():", *body)) + "\nopt.step(closure)"
        meaning = (
            ("opt.zero_grad()", "each"),
            (f"{loss}.backward()", "backward"),
            ("opt.step()", "step"),
        )
        return Statement(line, "step", meaning=meaning)

    def step(self):
        luck = self.draw.luck
        form = luck.choice(("plain",) * 12 + ("forced", "forced", "none", "twice"))
        for name in self.optimizers:
            if self.shape == "twice" and name == "other" and luck.random() < 0.7:
                continue
            step = Statement(f"{name}.step()", "step", name)
            if form == "none":
                continue
            if self.scaled:
                if self.passes != 1:  # ranks may disagree on finiteness
                    yield Statement(f"{name}.synchronize()", "sync", name)
                yield Statement(f"scaler.step({name})", "step", name)
            elif form == "forced" and self.op != "Adasum":
                raw = f"with {name}.skip_synchronize():\n    {name}.step()"
                yield Statement(f"{name}.synchronize()", "sync", name)
                yield Statement(raw, "raw", name)
            else:
                yield from [step] * (2 if form == "twice" else 1)
        if self.scaled:
            yield Statement("scaler.update()")


FORGETTING = "if hvd.rank() == 1:\n    opt.zero_grad()"
"""One rank has gradients of no use, and adds nothing to a step of Adasum."""

JOIN = Statement(
    "for k in range(2 + hvd.rank() % 2):\n    opt.zero_grad()\n"
    "    loss_of(model, 'left right', 90 + k).backward()\n    opt.step()\n"
    "last = hvd.join()\nhvd.broadcast_parameters(model.state_dict(), root_rank=last)",
    "join",
    meaning=(("loss_of(model, 'left right', 90 + k).backward()", "join"),),
)


class LocalScript:
    """Draw a script with a local method."""

    METHODS = (
        "LocalSGD(model, opt, {h})",
        "LocalSGD(model, opt, {h}, state='average')",
        "LocalSGD(model, opt, {h}, state='reset')",
        "PostLocalSGD(model, opt, {h}, start=2)",
        "HierarchicalLocalSGD(model, opt, {h}, node_steps=1)",
        "HierarchicalLocalSGD(model, opt, {more}, node_steps=2)",
        "DiLoCo(model, opt, {h})",
        "DiLoCo(model, opt, {h}, outer_lr=0.9, outer_momentum=0.0)",
        "StagedSGD(model, opt, warmup_steps=1, cooldown_start=6, steps={h}, delay=1)",
        "StagedSGD(model, opt, warmup_steps=0, cooldown_start=99, steps={h}, delay=0)",
    )

    def __init__(self, draw):
        self.draw = draw

    def statements(self):
        draw, luck = self.draw, self.draw.luck
        h = luck.randint(1, 3)
        method = luck.choice(self.METHODS).format(h=h, more=h + 2)
        self.may_skip = method[0] in "LD"
        self.weighted = draw.chance(0.3)
        made = luck.choice(OPTIMIZERS[:4]).format(of="model.parameters()")
        lines = ("model = Model()", f"opt = {made}", f"method = hvd.{method}")
        found = [Statement(line) for line in lines]
        for _ in range(luck.randint(3, 9)):
            found += self.step()
            if draw.chance(0.1):
                found.append(Statement("method.finish()", "finish"))
        return [*found, Statement("method.finish()", "finish")]

    def step(self):
        draw, luck = self.draw, self.draw.luck
        found = draw.edits(LOCAL, 1) if draw.chance(0.5) else []
        zero = luck.choice(("opt.zero_grad()", "model.zero_grad(set_to_none=False)"))
        found.append(Statement(zero))
        if self.weighted:
            line = f"method.set_num_samples({luck.randint(1, 4)} + 2 * hvd.rank(), nominal=4)"
            found.append(Statement(line))
        found += draw.backward()
        found += draw.edits(LOCAL, 1) if draw.chance(0.2) else []
        step = Statement("opt.step()", "step")
        if self.may_skip and draw.chance(0.15):
            line = "if hvd.rank() == 1:\n    method.skip_step()\nelse:\n    opt.step()"
            step = Statement(line, "step")
        return [*found, step]


def draw_program(seed, size, *, sharded=False):
    """Draw a program, identical on all ranks; ``sharded`` stores parameters once per node."""
    draw = Draw(seed, size, sharded=sharded)
    kind = LocalScript if draw.chance(0.25) and not sharded else Script
    statements = tuple(kind(draw).statements())
    per_node = draw.luck.choice((None, 1, 2))
    return Program(size, per_node, draw.luck.choice(("thread", "inline", "end")), statements)
